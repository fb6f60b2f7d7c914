"""A program that is ready to run: its tensors in place, its threads waiting.

    engine = Engine(lower(config, weights, Precision.of("int8"), 4096), threads=2)
    logits = engine.run(rows, cache, step)

Rows are tokens, each with its line of the cache and its position. Rows of one line must come in order. What a row gives
does not depend on the rows beside it, nor on the number of threads, nor on the instruction set.
"""

from __future__ import annotations

import ctypes as ct
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qkv.cache.cache import Cache, Step
from qkv.cache.slots import Slots
from qkv.engine import library as native
from qkv.engine.packing import FORMATS, Floats
from qkv.engine.program import Matrix, Program
from qkv.errors import EngineError

Ints = npt.NDArray[np.int32]
_ALIGNED = 64


@dataclass(frozen=True)
class Rows:
    """M tokens."""

    token: Ints
    line: Ints
    position: Ints
    wanted: Ints
    """The rows whose logits are wanted."""


class Engine:
    """One program, for calls one after another."""

    def __init__(self, program: Program, *, threads: int | None = None, kernels: str = "") -> None:
        """threads: by default as many as this process may use. kernels: `avx512`, `avx2`, `portable`; "" the best."""
        self._handle: int | None = None
        self._library = native.library()
        if native.kernels(kernels) is None:
            raise EngineError(f"engine: this machine does not run kernels {kernels!r}; leave them out")
        self.program, self.threads = program, usable_threads() if threads is None else threads
        if self.threads < 1:
            raise EngineError(f"threads: must be 1 or more, got {self.threads}")
        self._kept: list[Any] = []  # what the program points to
        table = (native.Instruction * len(program.instructions))(*map(self._instruction, program.instructions))
        widths, codes = (np.array(numbers, np.int32) for numbers in (program.widths, program.code_widths))
        self._handle = self._library.qkv_program(
            table, len(table), widths.ctypes.data, len(widths), codes.ctypes.data, len(codes),
            kernels.encode(), self.threads,
        )  # fmt: skip

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.qkv_free(self._handle)

    def run(self, rows: Rows, cache: Cache, step: Step) -> Floats:
        """Read the rows; the wanted ones' logits (W, V). Keys and values go into the cache as `step` says."""
        names = [f"decoder.layers.{index}.attention" for index in range(len(cache.group_of))]
        layers = (native.Streams * len(names))(*(_streams(cache, name) for name in names))
        slots = [_written(step, number, rows) for number in range(len(cache.groups))]
        groups = (native.Slots * len(slots))(*(_slots(cache, number, to) for number, to in enumerate(slots)))
        used = max(group.capacity for group in cache.groups if isinstance(group, Slots))
        result = np.empty((len(rows.wanted), self.program.widths[self.program.result]), np.float32)
        call = native.Call(
            len(rows.token), len(rows.wanted),
            *(array.ctypes.data for array in (rows.token, rows.line, rows.position, rows.wanted)),
            ct.addressof(layers), ct.addressof(groups), used, self.program.result, result.ctypes.data,
        )  # fmt: skip
        if self._library.qkv_run(self._handle, ct.byref(call)):
            raise EngineError(f"engine: no memory for {len(rows.token)} rows; give smaller chunks")
        return result

    def _instruction(self, one: Any) -> native.Instruction:
        entry = native.Instruction(one.op, one.out, one.read, one.other)
        for place, number in enumerate(one.n):
            entry.n[place] = number
        for place, number in enumerate(one.x):
            entry.x[place] = number
        for place, what in enumerate(one.p):
            entry.p[place] = None if what is None else self._address(what)
        return entry

    def _address(self, what: Matrix | Floats) -> int:
        """Where it lies from now on."""
        if isinstance(what, Matrix):
            data = aligned(what.data)
            entry = native.Matrix(FORMATS.index(what.form), what.rows, what.columns, 0, data.ctypes.data)
            self._kept += [data, entry]
            return ct.addressof(entry)
        data = np.ascontiguousarray(what, np.float32)
        self._kept.append(data)
        return int(data.ctypes.data)


def usable_threads() -> int:
    """As many as this process may use: its affinity, and the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):
        return allowed


def aligned(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The same bytes at an address that is a multiple of 64."""
    if array.ctypes.data % _ALIGNED == 0:
        return array
    space = np.empty(array.nbytes + _ALIGNED, np.uint8)
    start = -space.ctypes.data % _ALIGNED
    space[start : start + array.nbytes] = array
    return space[start : start + array.nbytes]


def _streams(cache: Cache, name: str) -> native.Streams:
    keys, values = (cache.parts(name, stream)["values"] for stream in ("k", "v"))
    strides = [array.strides[axis] // 4 for array in (keys, values) for axis in (0, 1)]
    return native.Streams(keys.ctypes.data, values.ctypes.data, *strides)


def _slots(cache: Cache, number: int, to: Ints) -> native.Slots:
    group = cache.groups[number]
    assert isinstance(group, Slots)
    if group.kind == "full":
        return native.Slots(to.ctypes.data, None, group.capacity, 0, 0)
    return native.Slots(to.ctypes.data, group.positions.ctypes.data, group.capacity, group.capacity, 0)


def _written(step: Step, number: int, rows: Rows) -> Ints:
    """The slot that each row is written to: with chunks that fit the slack, every token has one."""
    write, lines = step.groups[number].write, rows.line
    if write.rows is None:
        place = np.arange(len(lines)) % len(write.slots)
        return np.ascontiguousarray(write.slots[place], np.int32)
    return np.ascontiguousarray(write.slots, np.int32)


def ragged(tokens: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Rows of different lengths as tokens one after the other, and the line of each."""
    flat = np.array([token for row in tokens for token in row], np.int32)
    return flat, np.repeat(np.arange(len(tokens), dtype=np.int32), [len(row) for row in tokens])
