"""What all layouts share: how much of the past is kept, and what therefore can be done.

A layout is for the layers that keep the same tokens (Gemma 3 has two kinds). It knows where a token's streams lie and
which tokens are there; the arrays themselves are the same for all layouts, (line, head, slot, width).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qkv.cache.spec import Retention
from qkv.cache.step import Chunk, GroupStep, Ints
from qkv.cache.store import Arrays, Store
from qkv.errors import CacheError


class Layout(ABC):
    """The rows of the layers `names`, which keep the same tokens."""

    def __init__(
        self, names: tuple[str, ...], retention: Retention, max_len: int | None, slack: int, granule: int = 1
    ) -> None:
        per_row = retention.slots(max_len, slack, granule)
        if per_row is None:
            raise CacheError(f"max_len: {names[0]} has no window and keeps every token; give a length")
        self.names, self.max_len, self.slack = names, max_len, slack
        # A window that is as long as the context never loses anything.
        bounded = retention.behind is not None and per_row == retention.slots(None, slack, granule)
        if bounded:
            assert retention.behind is not None
            self.slack = per_row - retention.sinks - retention.behind - 1
        self.behind = retention.behind if bounded else None
        self.sinks = retention.sinks if bounded else 0
        self.lowest: Ints
        """(B,): from which position on, sinks aside, every token is still there."""

    @property
    def kept(self) -> int:
        """How many of the newest tokens a window keeps."""
        assert self.behind is not None
        return self.behind + 1 + self.slack

    def check(self, chunk: Chunk, canonical: bool) -> None:
        """Refuse a chunk that does not fit, before anything changes."""
        longest = int(chunk.after.max())
        if self.behind is None and self.max_len is not None and longest > self.max_len:
            raise CacheError(f"cache: {longest} tokens do not fit a max_len of {self.max_len}; make a cache with more")
        self.need(chunk.before)
        if canonical and not self.fits(chunk):
            raise CacheError(
                f"cache: a chunk of {chunk.size} tokens, but in canonical order a window with slack {self.slack} takes "
                f"{self.slack + 1}; give smaller chunks, or a cache with slack={chunk.size - 1} or more"
            )

    def need(self, lengths: Ints) -> None:
        """Refuse if a row that goes on at `lengths` (B,) would look at tokens that are gone."""
        if self.behind is None:
            return
        needed = np.maximum(lengths - self.behind, self.sinks)
        gone = np.flatnonzero((needed < self.lowest) & (needed < lengths))
        if gone.size:
            row = int(gone[0])
            raise CacheError(
                f"cache: row {row} cannot go on at {lengths[row]}: of its window the tokens {needed[row]} to "
                f"{min(self.lowest[row], lengths[row]) - 1} are gone; a cache with more slack can be taken back further"
            )

    def fits(self, chunk: Chunk) -> bool:
        """Whether the chunk may be written before it looks: what it overwrites, none of its queries sees."""
        return self.behind is None or chunk.size <= self.slack + 1

    def worth_keeping(self, position: Ints, after: Ints) -> npt.NDArray[np.bool_]:
        """Which tokens at `position` (B or 1, T) may be looked at again when rows have `after` (B,) tokens."""
        if self.behind is None:
            return position >= 0
        near = position >= after[: len(position), None] - self.kept
        return (position >= 0) & (near | (position < self.sinks))

    def lose(self, after: Ints) -> None:
        """Note what is overwritten or given back when rows have `after` (B,) tokens."""
        if self.behind is not None:
            self.lowest = np.maximum(self.lowest, after - self.kept)

    @property
    @abstractmethod
    def kind(self) -> Literal["full", "window", "static", "paged"]:
        """What it is called."""

    @property
    @abstractmethod
    def arrays(self) -> Arrays:
        """Every layer's streams, by name."""

    @abstractmethod
    def lines(self) -> tuple[int, int]:
        """The first axis of the arrays, and how many slots a line has."""

    @abstractmethod
    def step(self, chunk: Chunk, canonical: bool, store: Store) -> GroupStep:
        """Take the chunk's positions, and say what is to be done with its streams."""

    @abstractmethod
    def snapshot(self, chunk: Chunk) -> Any:
        """What `rewind` needs to undo a step with this chunk; None where `truncate` is enough."""

    @abstractmethod
    def rewind(self, former: Any) -> None:
        """Be as at the snapshot. The arrays must not have been written to since."""

    @abstractmethod
    def truncate(self, lengths: Ints) -> None:
        """Forget what comes after the first `lengths` (B,) tokens of each row."""

    @abstractmethod
    def select(self, rows: Ints, store: Store) -> None:
        """Rows in a new order; a row may be repeated or left out."""

    @abstractmethod
    def fork(self, store: Store) -> Layout:
        """An independent copy."""

    @abstractmethod
    def state(self) -> dict[str, npt.NDArray[Any]]:
        """What, beside the arrays, a saved cache holds."""

    @abstractmethod
    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """The inverse of `state`, in a new layout of the same kind."""
