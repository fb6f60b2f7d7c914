"""The `paged` layout: rows share a pool of pages, each of a fixed number of slots (Kwon 2023, PagedAttention).

Page n of a row holds its positions n * size to (n + 1) * size - 1; the row's table says which line of the pool that is.
Rows and copies of a cache may share a page: it is counted, and copied before one of them writes into it. A windowed
layer gives back the pages that nobody will look at again. A pool without a fixed size grows when it is full.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qkv.cache.layout import Layout
from qkv.cache.spec import GRANULE, Retention, rounded_up
from qkv.cache.step import Chunk, GroupStep, Ints, View, Write
from qkv.cache.store import Arrays, Store
from qkv.errors import CacheError

Table = dict[int, int]
"""Page number -> line of the pool."""


class Pool:
    """Lines of memory, and how many tables name each."""

    def __init__(self, size: int, fixed: bool) -> None:
        self.users = np.zeros(size, np.int64)
        self.fixed = fixed
        self.arrays: Arrays = {}

    @property
    def size(self) -> int:
        return len(self.users)

    @property
    def free(self) -> int:
        """How many lines nobody names."""
        return int((self.users == 0).sum())

    def room(self, wanted: int, store: Store) -> None:
        """Make sure that `wanted` lines are free: grow, or refuse."""
        if wanted <= self.free:
            return
        if self.fixed:
            raise CacheError(f"cache: {wanted} pages needed, {self.free} of {self.size} free; make it with more pages")
        more = max(wanted - self.free, self.size)
        self.users = np.concatenate((self.users, np.zeros(more, np.int64)))
        for name, array in self.arrays.items():
            grown = store.zeros((self.size, *array.shape[1:]), store.to_numpy(array[:0]).dtype)
            grown[: self.size - more] = array
            self.arrays[name] = grown

    def claim(self) -> int:
        """A free line."""
        line = int(np.flatnonzero(self.users == 0)[0])
        self.users[line] = 1
        return line

    def leave(self, tables: list[Table]) -> None:
        """These tables name nothing any more."""
        for table in tables:
            for line in table.values():
                self.users[line] -= 1
            table.clear()


class Pages(Layout):
    """Every row is a table of pages."""

    def __init__(
        self,
        names: tuple[str, ...],
        retention: Retention,
        batch: int,
        max_len: int | None,
        slack: int,
        page: int,
        pages: int | None,
    ) -> None:
        super().__init__(names, retention, max_len, slack)
        per_row = retention.pages(max_len, slack, page)
        assert per_row is not None
        self.size = page
        self.pool = Pool(batch * per_row if pages is None else pages, fixed=pages is not None)
        self._adopt([{} for _ in range(batch)], np.zeros(batch, np.int64))

    def _adopt(self, tables: list[Table], lowest: Ints) -> None:
        self.tables, self.lowest = tables, lowest
        # A cache that is dropped gives its pages back to those that it shares a pool with.
        self._release = weakref.finalize(self, self.pool.leave, tables)

    @property
    def kind(self) -> Literal["paged"]:
        return "paged"

    @property
    def arrays(self) -> Arrays:
        return self.pool.arrays

    def lines(self) -> tuple[int, int]:
        return self.pool.size, self.size

    def step(self, chunk: Chunk, canonical: bool, store: Store) -> GroupStep:
        old = None if self.fits(chunk) else self._view(chunk.before)
        position = np.broadcast_to(chunk.position, (len(self.tables), chunk.size))
        rows, tokens = np.nonzero(self.worth_keeping(position, chunk.after))
        stands = position[rows, tokens]
        wanted = sorted(set(zip(rows.tolist(), (stands // self.size).tolist(), strict=True)))
        self._separate(wanted, store)
        # What a chunk that looks at the old slots frees and takes again, every layer has read before it writes.
        self._give_back(chunk.after)
        self._provide(wanted, store)
        lines = np.array([self.tables[r][p // self.size] for r, p in zip(rows, stands, strict=True)], np.int64)
        write = Write(tokens, stands % self.size, rows, lines)
        self.lose(chunk.after)
        if chunk.fresh and not canonical:
            return GroupStep("new", write, None)
        return GroupStep("both", write, old) if old is not None else GroupStep("stored", write, self._view(chunk.after))

    def _separate(self, wanted: list[tuple[int, int]], store: Store) -> None:
        """Copy the shared pages that are written into."""
        shared = [(r, n) for r, n in wanted if n in self.tables[r] and self.pool.users[self.tables[r][n]] > 1]
        self.pool.room(len(shared), store)
        targets, sources = [], []
        for row, number in shared:
            line = self.tables[row][number]
            if self.pool.users[line] == 1:
                continue  # the others have their own by now
            self.pool.users[line] -= 1
            self.tables[row][number] = self.pool.claim()
            targets.append(self.tables[row][number])
            sources.append(line)
        for array in self.pool.arrays.values() if targets else ():
            store.move(array, np.array(targets), np.array(sources))

    def _give_back(self, after: Ints) -> None:
        """Free the pages of which nothing is kept when rows have `after` tokens."""
        if self.behind is None:
            return
        for table, length in zip(self.tables, after, strict=True):
            start = length - self.kept
            for number in [n for n in table if (n + 1) * self.size <= start and n * self.size >= self.sinks]:
                self.pool.users[table.pop(number)] -= 1

    def _provide(self, wanted: list[tuple[int, int]], store: Store) -> None:
        """A line for each page that is not there yet."""
        new = [(row, number) for row, number in wanted if number not in self.tables[row]]
        self.pool.room(len(new), store)
        for row, number in new:
            self.tables[row][number] = self.pool.claim()

    def _view(self, lengths: Ints) -> View:
        """Every page of each row, in order, filled up with empty ones to a common number."""
        numbers = [sorted(table) for table in self.tables]
        count = rounded_up(max(1, *(len(own) for own in numbers)), max(1, GRANULE // self.size))
        lines = np.zeros((len(numbers), count), np.int64)
        first = np.full((len(numbers), count), -1, np.int64)
        for row, (own, table) in enumerate(zip(numbers, self.tables, strict=True)):
            lines[row, : len(own)] = [table[number] for number in own]
            first[row, : len(own)] = [number * self.size for number in own]
        stands = np.where(first[:, :, None] >= 0, first[:, :, None] + np.arange(self.size), -1)
        stands = stands.reshape(len(numbers), -1)
        there = (stands < lengths[:, None]) & ((stands >= self.lowest[:, None]) | (stands < self.sinks))
        return View(np.where(there, stands, -1), self.size, lines)

    def snapshot(self, chunk: Chunk) -> tuple[list[Table], Ints] | None:
        if self.fits(chunk) and not self.pool.fixed:
            return None
        return [dict(table) for table in self.tables], self.lowest

    def rewind(self, former: tuple[list[Table], Ints]) -> None:
        for table, before in zip(self.tables, former[0], strict=True):
            for line in table.values():
                self.pool.users[line] -= 1
            for line in before.values():
                self.pool.users[line] += 1
            table.clear()
            table.update(before)
        self.lowest = former[1]

    def truncate(self, lengths: Ints) -> None:
        self.lowest = np.minimum(self.lowest, lengths)  # a row that begins anew has lost nothing
        for table, length in zip(self.tables, lengths, strict=True):
            for number in [n for n in table if n * self.size >= length]:
                self.pool.users[table.pop(number)] -= 1

    def select(self, rows: Ints, store: Store) -> None:
        """Repeated rows share their pages."""
        former = self._release
        self._adopt(self._named_again([self.tables[row] for row in rows]), self.lowest[rows])
        former()

    def fork(self, store: Store) -> Pages:
        """It shares every page until one of the two writes into it."""
        other = copy.copy(self)
        other._adopt(self._named_again(self.tables), self.lowest.copy())
        return other

    def _named_again(self, tables: list[Table]) -> list[Table]:
        """Copies of tables, with their pages counted once more."""
        for table in tables:
            for line in table.values():
                self.pool.users[line] += 1
        return [dict(table) for table in tables]

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """(row, page number, line) of every page."""
        named = [(r, n, line) for r, table in enumerate(self.tables) for n, line in sorted(table.items())]
        return {"tables": np.array(named, np.int64).reshape(-1, 3), "lowest": self.lowest}

    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        self.pool.users = np.zeros(len(next(iter(self.arrays.values()))), np.int64)  # it may have grown
        tables: list[Table] = [{} for _ in state["lowest"]]
        for row, number, line in state["tables"].tolist():
            tables[row][number] = line
            self.pool.users[line] += 1
        self._adopt(tables, state["lowest"].copy())
