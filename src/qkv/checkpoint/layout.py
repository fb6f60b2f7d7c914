"""The two orders of a rotary head's rows, `pairs` (2i, 2i + 1) and `halves` (i, i + d/2): one model, two files.

Meta's files, llama2.c and GGUF's llama have pairs; Hugging Face's have halves. Turning one into the other moves the
rows of q_proj and k_proj inside each head, and nothing else: scores sum over a head, in whatever order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qkv.checkpoint.ops import Array, Op, Place
from qkv.config import ModelConfig, MultiHead, Rotary
from qkv.errors import CheckpointError


def pairs_to_halves(rows: Array, head_dim: int) -> Array:
    """Within each head of `head_dim` rows: the even ones, then the odd ones."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def halves_to_pairs(rows: Array, head_dim: int) -> Array:
    """The inverse."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def identical(one: Array, other: Array) -> bool:
    """Whether two large arrays are equal; unlike ones mostly differ at once, and are then not read."""
    return np.array_equal(one[:64], other[:64]) and np.array_equal(one, other)


@dataclass(frozen=True)
class FromPairs(Op):
    """Rows of one projection, of queries or of keys: theirs in pairs, ours in halves.

    The number of heads follows from the rows: with fewer key-value heads, keys have fewer of them.
    """

    def forward(self, parts: list[Array], place: Place) -> list[Array]:
        return [pairs_to_halves(part, _head_dim(place)) for part in parts]

    def inverse(self, parts: list[Array], place: Place) -> list[Array]:
        return [halves_to_pairs(part, _head_dim(place)) for part in parts]


def _head_dim(place: Place) -> int:
    assert place.block is not None
    assert isinstance(place.block.attention, MultiHead)
    return place.block.attention.head_dim


def to_halves(config: ModelConfig, tensors: Mapping[str, Array]) -> tuple[ModelConfig, dict[str, Array]]:
    """The same model with every rotary head in halves, as Hugging Face's families have it."""
    ours = dict(tensors)
    for stack_name, stack in config.stacks.items():
        for index, block in enumerate(stack.blocks):
            attention, where = block.attention, f"{stack_name}.layers.{index}.attention"
            if not isinstance(attention.positions, Rotary) or attention.positions.layout == "halves":
                continue
            if not isinstance(attention, MultiHead) or attention.positions.fraction != 1:
                raise CheckpointError(f"{where}: only heads that turn as a whole can go from pairs to halves")
            if attention.qk_norm.parameters(attention.head_dim):
                raise CheckpointError(f"{where}: its qk_norm has weights for pairs; save in qkv's own format")
            for name in (f"{where}.{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")):
                if name in ours:
                    ours[name] = pairs_to_halves(ours[name], attention.head_dim)
    tree = config.to_dict()
    for stack_name in config.stacks:
        for block in (*tree[stack_name]["first"], *tree[stack_name]["layers"]):
            if block["attention"]["positions"]["kind"] == "rotary":
                block["attention"]["positions"]["layout"] = "halves"
    return ModelConfig.from_dict(tree), ours
