"""What a list of operations is made of, and the writer that keeps track of shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from qkv.config import Parameter


class Dim(NamedTuple):
    """One axis: its symbol, and its size where the config fixes it."""

    symbol: str
    size: int | None = None

    @property
    def shown(self) -> str:
        """The size, or the symbol where nothing fixes it."""
        return self.symbol if self.size is None else str(self.size)


Shape = tuple[Dim, ...]
B, T, S = Dim("B"), Dim("T"), Dim("S")
"""Rows, tokens, and the source's tokens in an encoder-decoder."""


class Value(NamedTuple):
    """What an operation reads or writes."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Operation:
    """One step of a forward pass."""

    name: str
    """The module that runs it, below its section, or in brackets what happens where no module stands."""
    formula: str
    reads: tuple[Value, ...]
    writes: Value
    parameters: int = 0
    """How many scalars it owns; a borrowed tensor counts where it is owned."""


@dataclass(frozen=True)
class Section:
    """A part of the model; `layers` are the indices of the layers that it stands for, if it is a layer."""

    path: str
    layers: tuple[int, ...]
    operations: tuple[Operation, ...]

    @property
    def parameters(self) -> int:
        """The scalars of all its copies."""
        return max(len(self.layers), 1) * sum(operation.parameters for operation in self.operations)


@dataclass
class Writer:
    """Collects operations and remembers the shape of every value written so far."""

    length: Dim
    """The axis of this side's tokens."""
    sections: list[Section] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    _open: list[Operation] = field(default_factory=list)

    def op(
        self,
        name: str,
        formula: str,
        reads: tuple[str, ...],
        writes: str,
        shape: Shape | None = None,
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        """One operation; without `shape` the result has that of the first value read."""
        inputs = tuple(Value(read, self.shapes[read]) for read in reads)
        self.shapes[writes] = inputs[0].shape if shape is None else shape
        owned = sum(parameter.size for parameter in (parameters or {}).values())
        self._open.append(Operation(name, formula, inputs, Value(writes, self.shapes[writes]), owned))

    def linear(self, name: str, read: str, writes: str, width: Dim, table: dict[str, Parameter]) -> None:
        """A dense layer whose tensors `table` holds under `name`."""
        own = {key: value for key, value in table.items() if key.startswith(f"{name}.")}
        fan_out, fan_in = own[f"{name}.weight"].shape
        before = self.shapes[read]
        assert (before[-1].size, width.size) == (fan_in, fan_out), (
            f"{name}: {before} does not fit ({fan_out}, {fan_in})"
        )
        bias = " + b" if f"{name}.bias" in own else ""
        self.op(name, f"{writes} = {read} W^T{bias}", (read,), writes, (*before[:-1], width), own)

    def close(self, path: str, layers: tuple[int, ...] = ()) -> None:
        """End the section; one without operations is left out."""
        if self._open:
            self.sections.append(Section(path, layers, tuple(self._open)))
        self._open = []


def number(x: float) -> str:
    """A number in a formula: as short as four digits allow."""
    return f"{x:.4g}" if x != int(x) else str(int(x))
