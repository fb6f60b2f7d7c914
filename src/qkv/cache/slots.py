"""Layouts in which a row has slots of its own: `full`, `window`, and `static`.

    slot(p) = p                                for the first positions, the sinks
              sinks + (p - sinks) mod ring     after them

A window of W keys needs a ring of W slots; a ring of W + slack still holds what is needed after `slack` tokens are
taken back, and lets a chunk of slack + 1 be written before it looks. With a ring as long as the context nothing is ever
overwritten: that is the full layout. Each slot holds the position of its key, and -1 while it is empty.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qkv.cache.layout import Layout
from qkv.cache.spec import Retention, view_slots
from qkv.cache.step import Chunk, GroupStep, Ints, View, Write, destinations
from qkv.cache.store import Arrays, Store


class Slots(Layout):
    """Every row is a line."""

    def __init__(
        self,
        names: tuple[str, ...],
        retention: Retention,
        batch: int,
        max_len: int | None,
        slack: int,
        granule: int = 1,
    ) -> None:
        super().__init__(names, retention, max_len, slack, granule)
        capacity = retention.slots(max_len, slack, granule)
        assert capacity is not None
        self.positions: Ints = np.full((batch, capacity), -1, np.int64)
        self.lowest = np.zeros(batch, np.int64)
        self._arrays: Arrays = {}

    @property
    def kind(self) -> Literal["full", "window", "static"]:
        return "full" if self.behind is None else "window"

    @property
    def arrays(self) -> Arrays:
        return self._arrays

    @property
    def capacity(self) -> int:
        """How many slots a row has."""
        slots: int = self.positions.shape[1]
        return slots

    def lines(self) -> tuple[int, int]:
        return self.positions.shape

    def step(self, chunk: Chunk, canonical: bool, store: Store) -> GroupStep:
        position, ring = chunk.position, self.capacity - self.sinks
        slots = np.where(position < self.sinks, position, self.sinks + (position - self.sinks) % ring)
        old = None if self.fits(chunk) else self._view(chunk.before, chunk.uniform, snapshot=True)
        write = destinations(chunk, self.worth_keeping(position, chunk.after), slots)
        if write.rows is None:
            self.positions[:, write.slots] = position[0][write.tokens]
        else:
            self.positions[write.rows, write.slots] = position[write.rows, write.tokens]
        self.lose(chunk.after)
        if chunk.fresh and not canonical:
            return GroupStep("new", write, None)
        if old is None:
            return GroupStep("stored", write, self._view(chunk.after, chunk.uniform))
        return GroupStep("both", write, old)

    def _view(self, lengths: Ints, uniform: bool, snapshot: bool = False) -> View:
        """The slots that hold anything when rows have these lengths."""
        slots = min(self.capacity, view_slots(int(lengths.max())))
        seen = self.positions[:1, :slots] if uniform else self.positions[:, :slots]
        return View(seen.copy() if snapshot else seen, slots)

    def snapshot(self, chunk: Chunk) -> tuple[Ints, Ints] | None:
        return None if self.fits(chunk) else (self.positions.copy(), self.lowest)

    def rewind(self, former: tuple[Ints, Ints]) -> None:
        self.positions, self.lowest = former

    def truncate(self, lengths: Ints) -> None:
        self.positions[self.positions >= lengths[:, None]] = -1
        self.lowest = np.minimum(self.lowest, lengths)  # a row that begins anew has lost nothing

    def select(self, rows: Ints, store: Store) -> None:
        self.positions, self.lowest = self.positions[rows], self.lowest[rows]
        self._arrays = {name: store.take(array, rows) for name, array in self._arrays.items()}

    def fork(self, store: Store) -> Slots:
        other = copy.copy(self)
        other.positions, other.lowest = self.positions.copy(), self.lowest.copy()
        other._arrays = {name: store.copy(array) for name, array in self._arrays.items()}
        return other

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {"positions": self.positions, "lowest": self.lowest}

    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        self.positions, self.lowest = state["positions"].copy(), state["lowest"].copy()


class Static(Slots):
    """Cross-attention's: the source's keys and values, written once."""

    def __init__(self, names: tuple[str, ...], batch: int) -> None:
        super().__init__(names, Retention(None), batch, 0, 0)

    @property
    def kind(self) -> Literal["full", "window", "static"]:
        return "static"

    def fill(self, position: Ints) -> GroupStep:
        """Take the source's positions (B, S), -1 where there is no token; its streams are to be written whole."""
        self.positions = position.copy()
        every = np.arange(self.capacity)
        return GroupStep("stored", Write(every, every), View(self.positions, self.capacity))

    def seen(self) -> GroupStep:
        """Nothing new: the source as it is."""
        nothing = np.zeros(0, np.int64)
        return GroupStep("stored", Write(nothing, nothing), View(self.positions, self.capacity))

    def truncate(self, lengths: Ints) -> None:
        """The source stays."""
