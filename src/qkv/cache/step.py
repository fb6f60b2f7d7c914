"""What one forward pass does to a cache, worked out on the host before anything is computed.

A chunk of T new tokens is written into slots and then looks at a view of them:

    new      an empty cache: the chunk looks at itself alone, which needs no mask beyond the pattern's
    stored   the chunk is written, then looks at the slots
    both     the chunk is longer than what a window may lose: it looks at the old slots and itself, then its tail is
             written

Positions decide what is seen in all three, so they compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """T new tokens for each of B rows."""

    position: Ints
    """(B, T), or (1, T) where all rows are the same: where each token stands; -1 where there is none."""
    before: Ints
    """(B,): how many tokens each row had."""
    after: Ints
    """(B,): and has then."""

    @property
    def uniform(self) -> bool:
        """Whether all rows stand at the same positions, without gaps."""
        return len(self.position) == 1

    @property
    def size(self) -> int:
        """T."""
        size: int = self.position.shape[1]
        return size

    @property
    def fresh(self) -> bool:
        """Whether no row had any token."""
        return not self.before.any()


@dataclass(frozen=True)
class Write:
    """Where tokens go: token `tokens[n]` of row `rows[n]` to slot `slots[n]` of line `lines[n]`.

    A line is what the first axis of the arrays counts: rows, or the pages of a pool. For a uniform chunk, `rows` and
    `lines` are None and every row's `tokens` go to the same `slots`.
    """

    tokens: Ints
    slots: Ints
    rows: Ints | None = None
    lines: Ints | None = None


@dataclass(frozen=True)
class View:
    """Which slots are looked at, and where their tokens stand."""

    positions: Ints
    """(B or 1, K), -1 for an empty slot."""
    slots: int
    """The first so many slots of every line."""
    pages: Ints | None = None
    """(B, n): the lines that make up each row, in order; None where a row is a line."""


@dataclass(frozen=True)
class GroupStep:
    """A chunk's doings in the layers that keep the same tokens."""

    mode: Literal["new", "stored", "both"]
    write: Write
    view: View | None
    """None where only the chunk itself is seen."""


def destinations(chunk: Chunk, kept: npt.NDArray[np.bool_], slots: Ints) -> Write:
    """The write of a chunk's `kept` tokens (B or 1, T) to `slots` (B or 1, T), line by row."""
    if chunk.uniform:
        return Write(np.flatnonzero(kept[0]), slots[0][kept[0]])
    rows, tokens = np.nonzero(kept)
    return Write(tokens, slots[rows, tokens], rows, rows)
