"""The size of a KV cache, from the config alone."""

from __future__ import annotations

from qkv.cache.spec import stored
from qkv.config import ModelConfig


def kv_cache_bytes(
    config: ModelConfig, context: int, *, batch: int = 1, source: int = 0, bytes_per_element: int = 2
) -> int:
    """Bytes of keys and values (or latents) for `batch` rows of `context` tokens, by default in 16 bits.

    `source` is the encoder's length, whose keys and values cross-attention keeps.
    """
    kept = sum(one.slots * one.elements for one in stored(config, context, source))
    return batch * kept * bytes_per_element
