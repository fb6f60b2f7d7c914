"""Another number of tokens: a model for a vocabulary to which tokens were added.

    config, tensors = resized(config, tensors, vocab_size)

Every tensor that has a row for each token grows: the table, a head of its own and its bias, the bias of a masked-LM
head. A tied head stays tied. Rows that were there stay to the bit; new ones are the mean of those (Hewitt 2021,
"Initializing new word embeddings"): then no new token is likelier than the average one, and what the model says of the
others hardly moves. A table is never cut: rows that only pad it are as much part of a model as any.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qkv.checkpoint.gguf_blocks import as_bfloat16, as_float
from qkv.checkpoint.safetensors import Array
from qkv.config import ModelConfig
from qkv.errors import CheckpointError, ConfigError


def resized(config: ModelConfig, tensors: Mapping[str, Array], vocab_size: int) -> tuple[ModelConfig, dict[str, Array]]:
    """Config and tensors with `vocab_size` tokens; uint16 is bfloat16."""
    if vocab_size < config.vocab_size:
        raise CheckpointError(
            f"vocab_size: {vocab_size} is less than the {config.vocab_size} rows of the model's table, which is never "
            "cut; give at least as many"
        )
    try:
        larger = config.override({"vocab_size": vocab_size})
    except ConfigError as error:
        raise CheckpointError(f"vocab_size: this model cannot have {vocab_size} tokens: {error}") from None
    wanted = {name: parameter.shape for name, parameter in larger.shapes().items()}
    return larger, {name: _grown(name, array, wanted[name]) for name, array in tensors.items()}


def _grown(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    """The array with rows of their mean behind it, up to the shape."""
    if array.shape == shape:
        return array
    if array.shape[1:] != shape[1:] or array.shape[0] > shape[0]:
        raise CheckpointError(f"vocab_size: {name} would change from {array.shape} to {shape}, which is no added row")
    numbers = array if array.dtype == np.float64 else as_float(array)
    mean = numbers.mean(0, dtype=np.float64)
    row = as_bfloat16(mean.astype(np.float32)) if array.dtype == np.uint16 else mean.astype(array.dtype)
    return np.concatenate([array, np.broadcast_to(row, (shape[0] - len(array), *array.shape[1:]))])
