"""Leaves of BERT and its kin, T5 and BART: widths that agree, segments, classes, offset positions, windows."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.template import Json, Keys, Leaf, read, write
from qkv.errors import CheckpointError


@dataclass(frozen=True)
class Agreeing(Leaf):
    """A key, and others that must have its value if they are there (an embedding as wide as the model)."""

    name: str
    others: tuple[str, ...]

    def read(self, keys: Keys) -> Any:
        value = keys.get(self.name)
        for other in self.others:
            found = keys.get(other, value)
            if found != value:
                raise CheckpointError(
                    f"{keys.name}: {other} is {found!r}; this qkv needs that of {self.name} ({value})"
                )
        return value

    def write(self, value: Any, out: Json) -> None:
        out[self.name] = value


@dataclass(frozen=True)
class Segments(Leaf):
    """Rows of the segment table; the format always has one."""

    default: int = 2

    def read(self, keys: Keys) -> Any:
        return keys.get("type_vocab_size", self.default)

    def write(self, value: Any, out: Json) -> None:
        if not value:
            raise CheckpointError("type_vocab_size: their format has no model without segments")
        out["type_vocab_size"] = value


@dataclass(frozen=True)
class Classes(Leaf):
    """How many classes: one for each label of `id2label`, or `num_labels`."""

    default: int = 2

    def read(self, keys: Keys) -> int:
        labels, count = keys.get("id2label", None), keys.get("num_labels", self.default)
        return count if labels is None else len(labels)

    def write(self, value: Any, out: Json) -> None:
        if value is None:
            raise CheckpointError("id2label: this head has no classes")
        out["id2label"] = {str(index): f"LABEL_{index}" for index in range(value)}
        out["label2id"] = {f"LABEL_{index}": index for index in range(value)}


@dataclass(frozen=True)
class PaddedLength(Leaf):
    """RoBERTa's table starts with one row per id up to the padding's, so it serves fewer positions than it has rows."""

    def read(self, keys: Keys) -> int:
        length: int = keys.get("max_position_embeddings") - _offset(keys)
        return length

    def write(self, value: Any, out: Json) -> None:
        out["max_position_embeddings"] = value  # of rows used; `PaddedOffset`, which comes later, adds the others


@dataclass(frozen=True)
class PaddedOffset(Leaf):
    """The first position's row: one more than the padding's id."""

    def read(self, keys: Keys) -> int:
        return _offset(keys)

    def write(self, value: Any, out: Json) -> None:
        if not value:
            raise CheckpointError("positions: their format cannot start at row 0; save in qkv's own format")
        out["pad_token_id"] = value - 1
        out["max_position_embeddings"] += value


def _offset(keys: Keys) -> int:
    padding: int = keys.get("pad_token_id", 1)
    return padding + 1


@dataclass(frozen=True)
class Windows(Leaf):
    """Longformer's layers: alike but for `attention_window`, a number or a list with one per layer."""

    block: Any
    """The template of one layer, whose pattern lacks its window."""

    def read(self, keys: Keys) -> list[Any]:
        windows, n_layers = keys.get("attention_window", 512), keys.get("num_hidden_layers")
        listed = windows if isinstance(windows, list) else [windows] * n_layers
        if len(listed) != n_layers:
            raise CheckpointError(f"{keys.name}: attention_window has {len(listed)} windows for {n_layers} layers")
        block = read(self.block, keys)
        return [_with_window(block, window) for window in listed[: _period(listed)]]

    def write(self, value: Any, out: Json) -> None:
        write(self.block, value[0], out)
        cycle = [block["attention"]["pattern"].get("window") for block in value]
        out["attention_window"] = [cycle[index % len(cycle)] for index in range(out["num_hidden_layers"])]


def _with_window(block: Json, window: int) -> Json:
    own = deepcopy(block)
    own["attention"]["pattern"]["window"] = window
    return own


def _period(values: list[Any]) -> int:
    """The length of the shortest cycle that gives the list."""
    lengths = range(1, len(values) + 1)
    return next((n for n in lengths if all(v == values[i % n] for i, v in enumerate(values))), 0)
