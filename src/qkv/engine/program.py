"""A program: instructions over buffers of rows, in the order in which they run (`native/run.cpp` explains them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from qkv.engine.packing import Bytes, Floats, Format, pack, quantised


class Op(IntEnum):
    """As in run.cpp."""

    EMBED = 0
    PLACE = 1
    NORM = 2
    CODES = 3
    LINEAR = 4
    ROTATE = 5
    STORE = 6
    ATTEND = 7
    ACT = 8
    ADD = 9
    SCALE = 10
    CAP = 11
    WANTED = 12


@dataclass(frozen=True)
class Matrix:
    """A packed matrix (rows, columns)."""

    data: Bytes
    rows: int
    columns: int
    form: Format


@dataclass(frozen=True)
class Instruction:
    """One step."""

    op: Op
    out: int = 0
    read: int = 0
    other: int = -1
    n: tuple[int, ...] = ()
    x: tuple[float, ...] = ()
    p: tuple[Matrix | Floats | None, ...] = ()


@dataclass
class Program:
    """Instructions, and how wide the buffers and the rows of codes are."""

    instructions: list[Instruction] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    code_widths: list[int] = field(default_factory=list)
    result: int = 0
    """The buffer that holds the answer."""

    def buffer(self, width: int) -> int:
        """A new one."""
        self.widths.append(width)
        return len(self.widths) - 1

    def do(
        self,
        op: Op,
        out: int = 0,
        read: int = 0,
        other: int = -1,
        *,
        n: Sequence[int] = (),
        x: Sequence[float] = (),
        p: Sequence[Matrix | Floats | None] = (),
    ) -> None:
        """Append an instruction."""
        self.instructions.append(Instruction(op, out, read, other, tuple(n), tuple(x), tuple(p)))

    def codes(self, read: int) -> int:
        """The rows of a buffer as codes; the slot that holds them, which the next codes of that width take over."""
        width = self.widths[read]
        if width not in self.code_widths:
            self.code_widths.append(width)
        slot = self.code_widths.index(width)
        self.do(Op.CODES, slot, read, n=(width,))
        return slot

    def linear(self, out: int, read: int, matrix: Matrix, bias: Floats | None = None, *, add: bool = False) -> None:
        """out (+)= read W^T + bias."""
        slot = self.codes(read) if quantised(matrix.form) else -1
        self.do(Op.LINEAR, out, read, slot, n=(int(add), 0), p=(matrix, bias))


def matrix(weights: Sequence[Floats], form: Format) -> Matrix:
    """Matrices one below the other, packed."""
    whole = np.concatenate(weights) if len(weights) > 1 else weights[0]
    rows, columns = whole.shape
    return Matrix(pack(np.asarray(whole, np.float32), form), rows, columns, form)
