"""A text as a model reads it: at once, or in pieces with a cache.

Every layer's output is kept, to find where a fault begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qkv.cache.cache import Cache
from qkv.nn import Transformer, capture
from qkv.verify.certificate import Row, compare
from qkv.verify.sample import Sample


@dataclass(frozen=True)
class Reading:
    """What a decoder made of each token."""

    result: Tensor
    """(B, T, V), logits; hidden states (B, T, D) where the head says nothing of single tokens."""
    layers: dict[str, Tensor]
    """(B, T, D) of each layer, by name."""

    def since(self, start: int) -> Reading:
        """The tokens from `start` on."""
        return Reading(self.result[:, start:], {name: x[:, start:] for name, x in self.layers.items()})

    def rows(self, indices: list[int]) -> Reading:
        """These rows, in this order."""
        return Reading(self.result[indices], {name: x[indices] for name, x in self.layers.items()})


def at_once(model: Transformer, given: Sample, *, hidden: bool = False, cache: Cache | None = None) -> Reading:
    """One call of the model. `hidden`: only the hidden states are wanted, and logits of one token at most computed."""
    options: dict[str, Any] = {"logits_at": torch.zeros(len(given.tokens), 1, dtype=torch.long)} if hidden else {}
    with torch.no_grad(), capture(model, "decoder.layers.*.output") as trace:
        out = model(given.tokens, **given.more, cache=cache, **options)
    per_token = not hidden and out.logits is not None and out.logits.ndim == 3
    return Reading(out.logits if per_token else out.hidden, dict(trace))


def in_pieces(
    model: Transformer, given: Sample, cache: Cache, sizes: Sequence[int], *, start: int = 0, hidden: bool = False
) -> Reading:
    """So many tokens per call, those from `start` on."""
    parts = []
    for size in sizes:
        parts.append(at_once(model, given.part(start, start + size), hidden=hidden, cache=cache))
        start += size
    return joined(parts)


def joined(parts: Sequence[Reading]) -> Reading:
    """Readings of one piece after another."""
    layers = {name: torch.cat([part.layers[name] for part in parts], 1) for name in parts[0].layers}
    return Reading(torch.cat([part.result for part in parts], 1), layers)


def held_against(path: str, expected: Reading, found: Reading, tolerance: float, *, start: int = 0) -> Row:
    """A row for two readings of the tokens from position `start` on; a difference is traced to its layer and token."""
    row = compare(path, expected.result, found.result, tolerance, origin=(0, start))
    if row.verdict != "DIFFERS":
        return row
    for name, right in expected.layers.items():
        wrong = ~((right.double() - found.layers[name].double()).abs() <= tolerance * right.double().abs().max())
        if wrong.any():
            position = start + int(wrong.any(-1).any(0).nonzero()[0])
            return replace(row, where=f"first in {name.removesuffix('.output')} at position {position}; {_end(row)}")
    return replace(row, where=f"first after the last layer; {_end(row)}")


def _end(row: Row) -> str:
    return f"largest at {row.where}"
