"""What a caller says of a sequence: checked, and turned into coordinates.

Shapes and types are always checked. Values (ids, positions) are looked at on a CPU only, and not while compiling: on a
GPU that would wait for the device, and in a graph it would break it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.cache.cache import Cache, Step
from qkv.config import Coordinates, ModelConfig, NoPositions
from qkv.errors import CacheError, DataError


@dataclass
class Inputs:
    """One sequence per row; None takes the default."""

    tokens: Int[Tensor, "B T"]
    valid: Bool[Tensor, "B T"] | None = None
    positions: Int[Tensor, "B T"] | None = None
    documents: Int[Tensor, "B T"] | None = None
    segments: Int[Tensor, "B T"] | None = None
    prefix_length: Int[Tensor, " B"] | None = None
    global_tokens: Bool[Tensor, "B T"] | None = None
    _full: bool | None = field(default=None, init=False)

    @property
    def visible(self) -> bool:
        """Whether values may be looked at."""
        return self.tokens.device.type == "cpu" and not torch.compiler.is_compiling()

    @property
    def padding(self) -> Tensor | None:
        """`valid`, or None where it is known to mark no padding."""
        if self._full is None:  # looked at once; a cached_property takes a lock, which no graph can
            self._full = self.valid is None or (self.visible and bool(self.valid.all()))
        return None if self._full else self.valid

    def coordinates(self, reads_global: bool) -> Coordinates:
        """Where the tokens stand: fields (B or 1, T); see docs/design.md."""
        padding = self.padding
        if self.positions is None:
            position = _default_positions(padding, self.documents, self.tokens)
        else:
            position = self.positions.long()  # the predicates' arithmetic needs 64 bits
            position = position if padding is None else torch.where(padding, position, -1)
        is_global = self.global_tokens
        if is_global is None and reads_global:
            is_global = torch.zeros_like(position, dtype=torch.bool)
        prefix = None if self.prefix_length is None else self.prefix_length[:, None]
        return Coordinates(position, self.documents, is_global, prefix, _lengths(position, self.documents))

    @property
    def regular(self) -> bool:
        """Whether every token exists and stands at its index, and nothing else is said that a pattern could read."""
        said = (self.positions, self.documents, self.prefix_length, self.global_tokens, self.padding)
        return all(value is None for value in said)

    def contiguous(self, at: Coordinates) -> bool:
        """Whether, inside a row and document, distances of indices are known to be distances of positions."""
        if self.regular:
            return True
        if not self.visible:
            return self.positions is None and self.documents is None and self.padding is None
        position, real = at.position, at.position >= 0
        same, together = torch.ones_like(real[:, 1:]), real[:, 1:] & real[:, :-1]
        if self.documents is not None:
            if bool((_changes(self.documents) != _changes(self.documents.sort(-1).values)).any()):
                return False  # a document in several pieces
            same = self.documents[:, 1:] == self.documents[:, :-1]
        in_step = position.diff(dim=-1) == 1
        gaps = (real[:, 1:] != real[:, :-1]).sum(-1) > real[:, :1].logical_not().sum(-1) + 1
        return bool((in_step | ~together | ~same).all()) and not bool(gaps.any())


def _changes(x: Tensor) -> Tensor:
    return (x[:, 1:] != x[:, :-1]).sum(-1)


def _lengths(position: Tensor, document: Tensor | None) -> Tensor:
    """(B, T): 1 + the largest position of each token's row and document."""
    if document is None:
        return position.max(-1, keepdim=True).values.expand_as(position) + 1
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    return torch.where(same, position.unsqueeze(-2), -1).max(-1).values + 1


def _default_positions(valid: Tensor | None, document: Tensor | None, like: Tensor) -> Tensor:
    """(B or 1, T): how many valid tokens of its row (and document) precede each token; -1 where there is none."""
    if valid is None and document is None:
        return torch.arange(like.shape[1], device=like.device)[None]
    real = torch.ones_like(like, dtype=torch.bool) if valid is None else valid
    before = real.cumsum(-1) - 1
    if document is not None:
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        before = (same & real.unsqueeze(-2)).long().tril().sum(-1) - 1
    return torch.where(real, before, -1)


def begin(cache: Cache, inputs: Inputs) -> Step:
    """The cache's places for these tokens."""
    rows, size = inputs.tokens.shape
    if rows != cache.batch:
        raise CacheError(f"tokens: {rows} rows, but the cache has {cache.batch}; use cache.select, or make another")

    def host(x: Tensor | None) -> Any:
        return None if x is None else x.cpu().numpy()

    prefix = None if inputs.prefix_length is None else inputs.prefix_length.long()
    return cache.begin(size, host(inputs.valid), prefix_length=host(prefix), is_global=host(inputs.global_tokens))


def check_arguments(
    config: ModelConfig, inputs: Inputs, source: Inputs | None, reads: frozenset[str], cache: Cache | None
) -> None:
    """One clear line for arguments that this model does not take, or lacks; `reads`: what its patterns read."""
    both = config.encoder is not None and config.decoder is not None
    stored = cache is not None and cache.has_source
    if (both and not stored) != (source is not None):
        need = "needs source= (B, S)" if both else "has no encoder beside its decoder: leave source out"
        raise DataError("source: the cache holds one already: leave it out" if stored else f"source: this model {need}")
    if cache is not None:
        _check_cache(config, inputs, cache)
    if both and inputs.documents is not None:
        raise DataError("documents: packing is for models with one stack; give one pair per row")
    if both and inputs.segments is not None:
        raise DataError("segments: not for an encoder-decoder; leave them out")
    kept = cache is not None and any(cache.lengths) and inputs.prefix_length is None
    if not kept and ("prefix_length" in reads) != (inputs.prefix_length is not None):
        need = "needs prefix_length= (B,)" if "prefix_length" in reads else "reads no prefix: leave it out"
        raise DataError(f"prefix_length: this model {need}")
    if inputs.global_tokens is not None and "is_global" not in reads:
        raise DataError("global_tokens: no pattern of this model reads them; leave them out")
    if inputs.segments is not None and not config.embedding.n_segments:
        raise DataError("segments: this model has no segment table; leave them out")
    _check_shapes(inputs, source)
    if inputs.visible:
        _check_values(config, inputs, "tokens")
        if source is not None:
            _check_values(config, source, "source")


def check_recall(config: ModelConfig, inputs: Inputs, cache: Cache | None) -> None:
    """One clear line for what a recall cannot stand beside."""
    if cache is not None:
        raise DataError("recall: not beside a cache, which recalls more; give one of them")
    if config.decoder is None or config.encoder is not None:
        raise DataError("recall: for a decoder alone, which reads a text from its beginning; leave it out")
    if not isinstance(config.embedding.positions, NoPositions):
        kind = config.embedding.positions.kind
        raise DataError(f"recall: {kind!r} positions in the embedding are counted anew in each segment; leave it out")
    if not inputs.regular:
        raise DataError("recall: takes whole rows of one text each; leave out valid, positions, documents and the like")


def _check_cache(config: ModelConfig, inputs: Inputs, cache: Cache) -> None:
    if cache.config is not config and cache.config != config:
        raise CacheError("cache: made for another config; make one with Cache.for_model(model)")
    for name in ("positions", "documents"):
        if getattr(inputs, name) is not None:
            raise CacheError(f"{name}: with a cache they follow from the tokens that it holds: leave them out")


def _check_shapes(inputs: Inputs, source: Inputs | None) -> None:
    """Every input per token has the tokens' shape; ids are whole numbers and masks are boolean."""
    shape: tuple[int, ...] = tuple(inputs.tokens.shape)
    if len(shape) != 2:
        raise DataError(f"tokens: must be (B, T), got shape {shape}; add a batch axis with tokens[None]")
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {"tokens": (inputs.tokens, shape)}
    for name in ("valid", "positions", "documents", "segments", "global_tokens"):
        expected[name] = (getattr(inputs, name), shape)
    expected["prefix_length"] = (inputs.prefix_length, shape[:1])
    if source is not None:
        expected["source"] = (source.tokens, (shape[0], source.tokens.shape[-1]))
        expected["source_valid"] = (source.valid, tuple(source.tokens.shape))
    for name, (value, needed) in expected.items():
        if value is None:
            continue
        if tuple(value.shape) != needed:
            raise DataError(f"{name}: must have shape {needed} to fit the tokens, got {tuple(value.shape)}")
        is_mask = name in ("valid", "source_valid", "global_tokens")
        if is_mask and value.dtype != torch.bool:
            raise DataError(f"{name}: must be boolean, True = yes, got {value.dtype}; use {name}.bool()")
        if not is_mask and (value.dtype == torch.bool or value.is_floating_point()):
            raise DataError(f"{name}: must be whole numbers, got {value.dtype}; use {name}.long()")


def _check_values(config: ModelConfig, inputs: Inputs, name: str) -> None:
    if inputs.tokens.numel() == 0:
        raise DataError(f"{name}: empty, shape {tuple(inputs.tokens.shape)}; give at least one token per row")
    _check_range(name, inputs.tokens, config.vocab_size)
    if inputs.segments is not None:
        _check_range("segments", inputs.segments, config.embedding.n_segments)
    if inputs.prefix_length is not None and int(inputs.prefix_length.min()) < 0:
        raise DataError(f"prefix_length: must not be negative, got {int(inputs.prefix_length.min())}")
    if inputs.positions is not None:
        real = inputs.positions if inputs.valid is None else inputs.positions[inputs.valid]
        if real.numel() and int(real.min()) < 0:
            raise DataError(f"positions: {int(real.min())} at a real token; mark padding with valid=False instead")
    pooled = config.head.kind in ("pooler", "next-sentence", "classifier")
    if pooled and inputs.valid is not None and name == "tokens" and not bool(inputs.valid.any(-1).all()):
        raise DataError("valid: a row without a real token has no vector for the head; leave the row out")


def _check_range(name: str, ids: Tensor, size: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise DataError(f"{name}: id {low if low < 0 else high} is outside 0 to {size - 1}")
