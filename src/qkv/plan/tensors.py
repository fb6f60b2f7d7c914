"""The tensors of a model, with layers that repeat identically written once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from qkv.config import ModelConfig, Parameter


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that differ in nothing but the layer that they belong to."""

    name: str
    """`decoder.layers.0-31.ffn.up_proj.weight`"""
    shape: tuple[int, ...]
    copies: int

    @property
    def size(self) -> int:
        """The scalars of one copy."""
        return math.prod(self.shape)


def tensor_groups(config: ModelConfig) -> list[TensorGroup]:
    """Every tensor of the config, in the order of its table."""
    table = config.shapes()
    groups: list[TensorGroup] = []
    done: set[str] = set()
    layers = {name: _layers(table, f"{name}.layers.") for name in config.stacks}
    for name, parameter in table.items():
        stack, *rest = name.split(".")
        if rest[0] != "layers":
            groups.append(TensorGroup(name, parameter.shape, 1))
        elif name not in done:
            alike = [i for i, layer in layers[stack].items() if layer == layers[stack][int(rest[1])]]
            tail = ".".join(rest[2:])
            groups.append(TensorGroup(f"{stack}.layers.{index_ranges(alike)}.{tail}", parameter.shape, len(alike)))
            done |= {f"{stack}.layers.{i}.{tail}" for i in alike}
    return groups


def index_ranges(indices: Iterable[int]) -> str:
    """Sorted indices in short: `5`, `0-31`, `{0-4,6-10}`."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    short = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return short[0] if len(short) == 1 else f"{{{','.join(short)}}}"


def _layers(table: dict[str, Parameter], prefix: str) -> dict[int, dict[str, Parameter]]:
    """Each layer's own table."""
    layers: dict[int, dict[str, Parameter]] = {}
    for name, parameter in table.items():
        if name.startswith(prefix):
            index, tail = name[len(prefix) :].split(".", 1)
            layers.setdefault(int(index), {})[tail] = parameter
    return layers
