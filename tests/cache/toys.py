"""A cache driven by hand, beside a naive model that remembers everything.

`Twin` writes into the cache's arrays, with NumPy alone and as `nn.memory` does, a number that says which token of which
row and history stands there. What a step shows must be the right number at the right position, once, and all that the
pattern could look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from parity.cases import attention, block, decoder
from qkv import config as c
from qkv.cache.cache import Cache, Options, Step
from qkv.cache.pages import Pages
from qkv.cache.step import GroupStep, View
from qkv.cache.store import HostStore


def toy(*patterns: c.Pattern) -> c.ModelConfig:
    """One layer of one narrow head for each pattern."""
    layers = (block(attention=attention(pattern=one, n_heads=1, n_kv_heads=1, head_dim=2)) for one in patterns)
    return decoder(*layers, n_layers=len(patterns))


FULL = toy(c.Causal())
WINDOW = toy(c.SlidingWindow(window=4))
SINKS = toy(c.SlidingWindow(window=3, sinks=2))
MIXED = toy(c.SlidingWindow(window=3), c.Causal(), c.SlidingWindow(window=6, sinks=1))
_numbers = count(1)


class Twin:
    """The cache, and the rows as lists of the numbers that were read."""

    def __init__(self, config: c.ModelConfig, batch: int, options: Options) -> None:
        self.cache = Cache(config, HostStore("float64"), batch, options)
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.floors: dict[int, list[int]] = {n: [0] * batch for n in range(len(self.cache.groups))}
        """By group and row: from which position on nothing was overwritten."""

    def append(self, sizes: Sequence[int], gaps: int = 0, fail: bool = False) -> None:
        """Read so many new tokens in each row, with `gaps` more places left of them; a failing step is taken back."""
        width = max(sizes) + gaps
        valid = np.array([[t >= width - n for t in range(width)] for n in sizes])
        step = self.cache.begin(width, None if valid.all() else valid)
        new = [[next(_numbers) for _ in range(n)] for n in sizes]
        chunk = np.zeros((len(sizes), width))
        chunk[valid] = [number for row in new for number in row]
        try:
            self._run(step, chunk, [[*old, *more] for old, more in zip(self.rows, new, strict=True)], fail)
        except InterruptedError:
            self.cache.abort(step)
            for number, group in enumerate(self.cache.groups):
                if group.fits(step.chunk):  # written before it failed
                    self._lose(number, step.chunk.after.tolist())
            return
        self.cache.commit(step)
        self.rows = [[*old, *more] for old, more in zip(self.rows, new, strict=True)]
        for number in range(len(self.cache.groups)):
            self._lose(number, step.chunk.after.tolist())
        self.check()

    def _lose(self, number: int, lengths: list[int]) -> None:
        group = self.cache.groups[number]
        if group.behind is not None:
            pairs = zip(self.floors[number], lengths, strict=True)
            self.floors[number] = [max(floor, length - group.kept) for floor, length in pairs]

    def _run(self, step: Step, chunk: np.ndarray, rows: list[list[int]], fail: bool) -> None:
        for number, (group, one) in enumerate(zip(self.cache.groups, step.groups, strict=True)):
            for name in group.names:
                for stream in ("k", "v"):
                    array = self.cache.parts(name, stream)["values"]
                    old = {} if one.mode != "both" else [dict(row) for row in self._seen(array, one.view)]
                    self._write(step, array, one, chunk if stream == "k" else -chunk)
                    shown = self._shown(step, array, one, chunk if stream == "k" else -chunk, old)
                    sign = 1 if stream == "k" else -1
                    self._compare(step, number, [{p: sign * v for p, v in row.items()} for row in shown], rows)
            if fail:
                raise InterruptedError

    def _write(self, step: Step, array: np.ndarray, one: GroupStep, chunk: np.ndarray) -> None:
        def put() -> None:
            write = one.write
            if write.rows is None:
                array[:, 0, write.slots] = chunk[:, write.tokens, None]
            else:
                array[write.lines, 0, write.slots] = chunk[write.rows, write.tokens, None]

        if one.mode == "both":
            step.later.append(put)
        else:
            put()

    def _seen(self, array: np.ndarray, view: View) -> list[list[tuple[int, float]]]:
        """(position, number) of every slot of the view that holds a token."""
        batch = self.cache.batch
        values = array[:, 0, : view.slots, 0]
        if view.pages is not None:
            values = values[view.pages].reshape(batch, -1)
        stands = np.broadcast_to(view.positions, (batch, view.positions.shape[1]))
        result = [
            [(int(p), float(v)) for p, v in zip(at, row, strict=True) if p >= 0]
            for at, row in zip(stands, values, strict=True)
        ]
        assert all(len(row) == len(dict(row)) for row in result), "a position stands in two slots"
        return result

    def _shown(
        self, step: Step, array: np.ndarray, one: GroupStep, chunk: np.ndarray, old: Sequence[dict[int, float]]
    ) -> list[dict[int, float]]:
        if one.mode == "stored":
            assert one.view is not None
            return [dict(row) for row in self._seen(array, one.view)]
        stands = np.broadcast_to(step.chunk.position, chunk.shape)
        new = [
            {int(p): float(v) for p, v in zip(at, row, strict=True) if p >= 0}
            for at, row in zip(stands, chunk, strict=True)
        ]
        if one.mode == "new":
            return new
        assert not any(before.keys() & own.keys() for before, own in zip(old, new, strict=True))
        return [before | own for before, own in zip(old, new, strict=True)]

    def _compare(self, step: Step, number: int, shown: list[dict[int, float]], rows: list[list[int]]) -> None:
        """All that the new queries may look at is there, and what is there is right."""
        kept = self.cache._stored[self.cache.groups[number].names[0]].retention
        for row, (there, numbers) in enumerate(zip(shown, rows, strict=True)):
            assert all(numbers[p] == value for p, value in there.items())
            for query in range(step.chunk.before[row], step.chunk.after[row]):
                start = 0 if kept.behind is None else max(0, query - kept.behind)
                needed = {*range(start, query + 1), *range(min(kept.sinks, query))}
                assert needed <= there.keys(), (row, query)

    def may_become(self, lengths: Sequence[int]) -> bool:
        """Whether every row could go on at that length: what a window would look at was never overwritten."""
        for number, group in enumerate(self.cache.groups):
            if group.behind is None:
                continue
            for floor, length in zip(self.floors[number], lengths, strict=True):
                if any(p < floor and p >= group.sinks for p in range(max(0, length - group.behind), length)):
                    return False
        return True

    def truncate(self, lengths: Sequence[int]) -> None:
        self.cache.truncate(lengths)
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]
        for number, floors in self.floors.items():
            self.floors[number] = [min(floor, length) for floor, length in zip(floors, lengths, strict=True)]
        self.check()

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.rows = [list(self.rows[row]) for row in rows]
        self.floors = {number: [floors[row] for row in rows] for number, floors in self.floors.items()}
        self.check()

    def fork(self) -> Twin:
        other = object.__new__(Twin)
        other.cache, other.rows = self.cache.fork(), [list(row) for row in self.rows]
        other.floors = {number: list(floors) for number, floors in self.floors.items()}
        return other

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows]


def users(cache: Cache, *others: Cache) -> None:
    """The pools' counts are those of the names in all tables of these caches."""
    for number, group in enumerate(cache.groups):
        assert isinstance(group, Pages)
        expected = np.zeros(group.pool.size, np.int64)
        for one in (cache, *others):
            same = one.groups[number]
            assert isinstance(same, Pages)
            assert same.pool is group.pool
            for table in same.tables:
                for line in table.values():
                    expected[line] += 1
        assert np.array_equal(group.pool.users, expected)
