"""What may happen to a tensor between their file and our model: small operations, each with its inverse.

An operation turns a list of arrays into a list of arrays. `forward` goes from theirs to ours, `inverse` back. `exact`
ones move elements and give back every bit; the others say so. Arrays are NumPy; uint16 holds bfloat16's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qkv.config import Block, ModelConfig

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Place:
    """Where a rule is applied: the model, the layer (if it speaks of one), and the shapes of our tensors there."""

    config: ModelConfig
    block: Block | None
    shapes: tuple[tuple[int, ...], ...]


class Op:
    """One step; a subclass defines both directions."""

    exact: ClassVar[bool] = True

    def forward(self, parts: list[Array], place: Place) -> list[Array]:
        """From theirs to ours."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def inverse(self, parts: list[Array], place: Place) -> list[Array]:
        """From ours to theirs."""
        raise NotImplementedError(f"{type(self).__name__} must define inverse")


@dataclass(frozen=True)
class Transpose(Op):
    """(in, out) to (out, in): GPT-2's Conv1D."""

    def forward(self, parts: list[Array], place: Place) -> list[Array]:
        return [part.swapaxes(-1, -2) for part in parts]

    inverse = forward


@dataclass(frozen=True)
class Split(Op):
    """One tensor to several, one after the other along `axis`, as large as ours are there."""

    axis: int = 0

    def forward(self, parts: list[Array], place: Place) -> list[Array]:
        (whole,) = parts
        return np.split(whole, np.cumsum([shape[self.axis] for shape in place.shapes])[:-1], self.axis)

    def inverse(self, parts: list[Array], place: Place) -> list[Array]:
        return [np.concatenate(parts, self.axis)]


@dataclass(frozen=True)
class SplitHeads(Op):
    """Fused queries, keys and values that lie together for each key-value head: its queries, its key, its value."""

    def _groups(self, place: Place) -> tuple[int, list[int]]:
        """The number of groups, and how many rows of each group are queries, keys, values."""
        assert place.block is not None
        attention = place.block.attention
        groups = attention.kv_heads  # type: ignore[attr-defined]  # a family with fused heads has multi-head attention
        return groups, [shape[0] // groups for shape in place.shapes]

    def forward(self, parts: list[Array], place: Place) -> list[Array]:
        (whole,) = parts
        groups, rows = self._groups(place)
        grouped = whole.reshape(groups, sum(rows), *whole.shape[1:])
        pieces = np.split(grouped, np.cumsum(rows)[:-1], 1)
        return [piece.reshape(-1, *whole.shape[1:]) for piece in pieces]

    def inverse(self, parts: list[Array], place: Place) -> list[Array]:
        groups, _ = self._groups(place)
        whole = np.concatenate([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1)
        return [whole.reshape(-1, *whole.shape[2:])]


@dataclass(frozen=True)
class Stack(Op):
    """Many tensors to one with a leading axis: experts."""

    def forward(self, parts: list[Array], place: Place) -> list[Array]:
        return [np.stack(parts)]

    def inverse(self, parts: list[Array], place: Place) -> list[Array]:
        return list(parts[0])


@dataclass(frozen=True)
class Reshape(Op):
    """To our shape; theirs is given, as it differs only by axes of length 1 or by flattened heads."""

    theirs: tuple[int, ...]

    def forward(self, parts: list[Array], place: Place) -> list[Array]:
        return [part.reshape(shape) for part, shape in zip(parts, place.shapes, strict=True)]

    def inverse(self, parts: list[Array], place: Place) -> list[Array]:
        return [part.reshape(self.theirs) for part in parts]


@dataclass(frozen=True)
class Reverse(Op):
    """The order along the first axis turned round (Transformer-XL's clusters)."""

    def forward(self, parts: list[Array], place: Place) -> list[Array]:
        return [part[::-1] for part in parts]

    inverse = forward
