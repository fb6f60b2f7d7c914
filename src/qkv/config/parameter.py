"""The parameter table: what a config says about its tensors, before any tensor exists.

Every config class that owns tensors answers `parameters(...) -> {name: Parameter}`; `ModelConfig.parameters()` joins
them under the names that the torch model's `state_dict()` uses. Counting, strict loading, initialisation, the oracle's
weights and the planner read this one table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "token_embedding", "position_embedding", "segment_embedding", "relative_embedding",
    "query", "key", "value", "attention_output", "ffn_input", "ffn_output", "router", "head", "projection",
    "ones", "zeros",
]  # fmt: skip
"""What a tensor is for; an init scheme maps it to a distribution. `ones` and `zeros` mean the same in every scheme."""


@dataclass(frozen=True)
class Parameter:
    """One tensor. A matrix is stored (fan_out, fan_in), as torch does; experts add a leading axis."""

    shape: tuple[int, ...]
    role: Role
    heads: int = 1
    """How many heads share the rows of a query, key or value projection (T5 initialises by the width of one)."""
    inputs: int | None = None
    """What counts as `fan_in` where it is not the last axis."""

    @property
    def size(self) -> int:
        """The number of scalars."""
        return math.prod(self.shape)

    @property
    def fan_in(self) -> int:
        """The width that one output sums over."""
        return self.shape[-1] if self.inputs is None else self.inputs

    @property
    def fan_out(self) -> int:
        """The number of outputs."""
        return self.shape[-2] if len(self.shape) > 1 else self.shape[-1]


Table = dict[str, Parameter]


@dataclass(frozen=True)
class Sizes:
    """The widths that a part of the model takes from its surroundings."""

    d_model: int
    max_seq_len: int
    n_heads: int = 0
    head_dim: int = 0


def under(prefix: str, *tables: Table) -> Table:
    """The tables joined, each name below `prefix`."""
    return {f"{prefix}.{name}": parameter for table in tables for name, parameter in table.items()}


def linear(fan_in: int, fan_out: int, role: Role, *, bias: bool, heads: int = 1) -> Table:
    """A dense layer: `weight` (fan_out, fan_in) and, if asked, `bias` (fan_out,)."""
    table = {"weight": Parameter((fan_out, fan_in), role, heads)}
    return table | {"bias": Parameter((fan_out,), "zeros")} if bias else table
