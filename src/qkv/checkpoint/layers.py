"""A stack of unlike layers as a config.json tells it: one word per layer, and what each word means.

    their words     S S S S S F  S S S S S F  S S        n_layers = 14
    ours            layers = (S, S, S, S, S, F)          the shortest cycle, after the shortest `first`

`Layers` stands where a template has a stack. Its `order` is a leaf whose value is the list of words: a key that holds
them (`Key("layer_types")`), or one of the rules below, which derive them from a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from qkv.checkpoint.template import Json, Keys, Leaf, fits, read, write
from qkv.errors import CheckpointError

T = TypeVar("T")


def fold(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """`first` and `cycle` such that `first`, then `cycle` over and over, begins with `items`: fewest elements in all.

    Of equally short answers the one with the shorter `first` is taken: (dense, experts) is one cycle of two.
    """
    for total in range(1, len(items) + 1):
        for skipped in range(total):
            period = total - skipped
            if all(items[i] == items[i - period] for i in range(total, len(items))):
                return list(items[:skipped]), list(items[skipped:total])
    return [], []


def unfold(n_layers: int, first: Sequence[T], cycle: Sequence[T]) -> list[T]:
    """The `n_layers` items that `first` and `cycle` stand for."""
    return [first[i] if i < len(first) else cycle[(i - len(first)) % len(cycle)] for i in range(n_layers)]


@dataclass(frozen=True)
class Layers(Leaf):
    """A whole stack whose layers are of several kinds."""

    n_layers: Leaf
    order: Leaf
    """Their word of every layer."""
    kinds: Mapping[str, Json]
    """The block that each word means; plain values tell one kind from another when a config is written."""
    norm: Any = None
    """The stack's last norm."""

    def read(self, keys: Keys) -> Json:
        n_layers, words = read(self.n_layers, keys), read(self.order, keys)
        if len(words) != n_layers:
            raise CheckpointError(f"{keys.name}: speaks of {len(words)} layer types, but of {n_layers} layers")
        unknown = sorted(set(words) - set(self.kinds))
        if unknown:
            known = ", ".join(self.kinds)
            raise CheckpointError(f"{keys.name}: has layers of type {', '.join(unknown)}; this qkv knows {known}")
        # A kind that no layer has is not read: its keys may be null.
        blocks = {word: read(block, keys) for word, block in self.kinds.items() if word in words}
        first, cycle = fold([blocks[word] for word in words])
        stack = {"n_layers": n_layers, "layers": cycle, "first": first}
        return stack if self.norm is None else stack | {"norm": read(self.norm, keys)}

    def write(self, value: Any, out: Json) -> None:
        if value is None:
            raise CheckpointError("their format needs the stack that this model lacks; save in qkv's own format")
        write(self.n_layers, value["n_layers"], out)
        blocks = unfold(value["n_layers"], value["first"], value["layers"])
        words = [self._word(index, block) for index, block in enumerate(blocks)]
        for word, block in dict(zip(words, blocks, strict=True)).items():
            write(self.kinds[word], block, out)
        write(self.order, words, out)
        write(self.norm, value.get("norm"), out)

    def _word(self, index: int, block: Json) -> str:
        for word, template in self.kinds.items():
            if fits(template, block):
                return word
        raise CheckpointError(f"their format has no word for layer {index}; save in qkv's own format")


@dataclass(frozen=True)
class Every(Leaf):
    """`usual` layers, but every `period`-th one is an `other` one. Only derives: a key with all words is written."""

    n_layers: Leaf
    period: Leaf | int
    usual: str
    other: str

    def read(self, keys: Keys) -> list[str]:
        n_layers, period = read(self.n_layers, keys), read(self.period, keys)
        return [self.usual if (index + 1) % period else self.other for index in range(n_layers)]


@dataclass(frozen=True)
class FirstThen(Leaf):
    """`first` for as many layers as `count` says, then `then` (DeepSeek's dense layers before its experts)."""

    n_layers: Leaf
    count: Leaf
    first: str
    then: str

    def read(self, keys: Keys) -> list[str]:
        n_layers = read(self.n_layers, keys)
        count = min(read(self.count, keys), n_layers)
        return [self.first] * count + [self.then] * (n_layers - count)

    def write(self, value: list[str], out: Json) -> None:
        self.count.write(value.index(self.then) if self.then in value else len(value), out)
