"""The size of a KV cache, from the config alone."""

from __future__ import annotations

from qkv.cache.spec import stored, vector_bytes
from qkv.config import ModelConfig
from qkv.errors import ConfigError


def kv_cache_bytes(
    config: ModelConfig,
    context: int | None,
    *,
    batch: int = 1,
    source: int = 0,
    codec: str = "raw",
    slack: int = 0,
    page: int | None = None,
    bytes_per_element: int = 2,
) -> int:
    """Bytes of keys and values (or latents) for `batch` rows of `context` tokens, by default in 16 bits.

    `source` is the encoder's length, whose keys and values cross-attention keeps. `codec` names how they are stored,
    `slack` how many tokens a windowed layer can take back, and `page` the size of the pages of a paged cache, which
    are whole. `context` None: any number of tokens, where every layer has a window.
    """
    total = 0
    for one in stored(config):
        if one.cross:
            slots: int | None = source
        elif page is None:
            slots = one.retention.slots(context, slack)
        else:
            pages = one.retention.pages(context, slack, page)
            slots = None if pages is None else pages * page
        if slots is None:
            raise ConfigError(f"context: {one.name} has no window, so its cache has no bound; give a context")
        vectors = (heads * vector_bytes(codec, width, bytes_per_element) for heads, width in one.streams.values())
        total += slots * sum(vectors)
    return batch * total
