"""What the oracle is given: checked, and turned into rows that know where their tokens stand.

The arguments of `reference.forward` for the tokens of one side, with their defaults:

    tokens         (B, T) integers below the vocabulary's size
    valid          (B, T) booleans, True = real token; all True
    positions      (B, T) integers; the number of valid tokens before this one in its row and document
    documents      (B, T) integers: tokens see only their own document; all in one
    segments       (B, T) integers: rows of the segment table; 0
    prefix_length  (B,) integers: required exactly when a pattern reads it
    global_tokens  (B, T) booleans; none

A token that is not valid has position -1. `length` is 1 + the largest position of the token's row and document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qkv.config import Coordinates, ModelConfig, Stack
from qkv.errors import ConfigError, DataError
from qkv.reference.ops import Ints, Mask, Weights


@dataclass(frozen=True)
class Inputs:
    """The arguments for one side of the model, as the caller gave them."""

    tokens: Any
    valid: Any = None
    positions: Any = None
    documents: Any = None
    segments: Any = None
    prefix_length: Any = None
    global_tokens: Any = None
    name: str = "tokens"
    """What messages call the tokens: `source` on the encoder's side."""


@dataclass(frozen=True)
class Row:
    """One row of a batch: ids and segments (T,), and where the tokens stand."""

    tokens: Ints
    segments: Ints
    at: Coordinates

    @property
    def exists(self) -> Mask:
        """Whether each token is real."""
        mask: Mask = self.at.position >= 0
        return mask


def rows(cfg: ModelConfig, stack: Stack, given: Inputs) -> list[Row]:
    """The rows of the side whose tokens pass through `stack`. Raises DataError if an argument does not fit."""
    _check_needed(cfg, stack, given)
    tokens = _array(given.name, given.tokens, "iu")
    if tokens.ndim != 2 or not tokens.size:
        raise DataError(f"{given.name}: expected a shape (B, T) that is not empty, got {tokens.shape}")
    B, T = tokens.shape
    valid = np.full((B, T), True)
    if given.valid is not None:
        valid = _array("valid" if given.name == "tokens" else "source_valid", given.valid, "b", (B, T))
    documents = _integers("documents", given.documents, (B, T))
    segments = _integers("segments", given.segments, (B, T))
    prefix = _integers("prefix_length", given.prefix_length, (B,))
    is_global = np.full((B, T), False)
    if given.global_tokens is not None:
        is_global = _array("global_tokens", given.global_tokens, "b", (B, T))
    if given.positions is None:
        positions = np.array([_count(valid[b], documents[b]) for b in range(B)])
    else:
        positions = np.where(valid, _integers("positions", given.positions, (B, T)), -1)
        _check_range("positions", positions[valid], None)
    _check_range(given.name, tokens, cfg.vocab_size)
    _check_range("segments", segments, max(cfg.embedding.n_segments, 1))
    _check_range("prefix_length", prefix, None)
    return [
        Row(
            tokens[b].astype(np.int64),
            segments[b],
            Coordinates(
                position=positions[b],
                document=documents[b],
                is_global=is_global[b],
                prefix_length=np.full(T, prefix[b]),
                length=_lengths(positions[b], documents[b]),
            ),
        )
        for b in range(B)
    ]


def _count(valid: Mask, documents: Ints) -> list[int]:
    """Default positions of one row: how many valid tokens of the same document stand before each valid token."""
    return [int(sum(valid[:t] & (documents[:t] == documents[t]))) if valid[t] else -1 for t in range(len(valid))]


def _lengths(positions: Ints, documents: Ints) -> Ints:
    return np.array([1 + max(positions[documents == document]) for document in documents])


def _check_needed(cfg: ModelConfig, stack: Stack, given: Inputs) -> None:
    """An argument that the model would ignore is an error, as is one that it needs and lacks."""
    reads = {field for block in stack.blocks for field in block.attention.pattern.fields}
    if "prefix_length" in reads and given.prefix_length is None:
        raise DataError("prefix_length: required, since a pattern of this model reads it: give one integer per row")
    if "prefix_length" not in reads and given.prefix_length is not None:
        raise DataError("prefix_length: given, but no pattern of this model reads it: leave it out")
    if "is_global" not in reads and given.global_tokens is not None:
        raise DataError("global_tokens: given, but no pattern of this model reads them: leave them out")
    if not cfg.embedding.n_segments and given.segments is not None:
        raise DataError("segments: given, but the model has no table of them (embedding.n_segments is 0): leave out")
    if len(cfg.stacks) > 1 and given.documents is not None:
        raise DataError("documents: an encoder-decoder cannot pack documents into a row: give one pair per row")


def _array(name: str, value: Any, kinds: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in kinds:
        raise DataError(f"{name}: expected {'booleans' if kinds == 'b' else 'integers'}, got dtype {array.dtype}")
    if shape is not None and array.shape != shape:
        raise DataError(f"{name}: expected shape {shape}, got {array.shape}")
    return array


def _integers(name: str, value: Any, shape: tuple[int, ...]) -> Ints:
    """Zeros if nothing is given."""
    return np.zeros(shape, dtype=np.int64) if value is None else _array(name, value, "iu", shape).astype(np.int64)


def _check_range(name: str, values: npt.NDArray[Any], end: int | None) -> None:
    for value in values.ravel():
        if value < 0 or (end is not None and value >= end):
            bound = "0 or more" if end is None else f"from 0 to {end - 1}"
            raise DataError(f"{name}: must be {bound}, got {value}")


def checked_weights(cfg: ModelConfig, weights: dict[str, Any]) -> Weights:
    """The tensors in float64. Raises one ConfigError that names every missing, unexpected and misshapen tensor."""
    shapes = {name: parameter.shape for name, parameter in cfg.shapes().items()}
    arrays = {name: np.asarray(value) for name, value in weights.items()}
    wrong = [f"{name} is missing" for name in shapes if name not in arrays]
    wrong += [f"{name} is unexpected" for name in arrays if name not in shapes]
    for name in shapes.keys() & arrays.keys():
        if arrays[name].shape != shapes[name]:
            wrong.append(f"{name} has shape {arrays[name].shape} instead of {shapes[name]}")
        elif arrays[name].dtype.kind != "f":
            wrong.append(f"{name} has dtype {arrays[name].dtype} instead of a float type")
    if wrong:
        raise ConfigError(f"weights do not fit the configuration: {'; '.join(sorted(wrong))}")
    return {name: array.astype(np.float64) for name, array in arrays.items()}
