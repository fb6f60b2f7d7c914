"""What a step is made of: examples become rows, rows a batch, and a batch is cut into parts that fit in memory.

    Example --objective--> Row --collate--> Batch (NumPy) --split--> Batch ... --to(device)--> Tensors

Rows are padded on the right to the longest of their batch. `targets` holds what each output must be, already at its
place (nothing here shifts anything), and IGNORE where nothing is asked; `count` is how many are asked. The mean of a
step is the sum over its parts, divided by the sum of their counts, so that it does not matter how the step was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.errors import DataError
from qkv.nn.recall import Recall

IGNORE = -100
"""The target of an output of which nothing is asked."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_PAD = {"documents": -1, "segments": 0}  # the document of padding is no document


@dataclass(frozen=True)
class Example:
    """One sequence as the data has it, before any objective: T tokens, and what is known of them."""

    tokens: Ints
    """(T,); of a pair of texts, the second: the translation, the answer, the passage."""
    source: Ints | None = None
    """(S,); of a pair, the first."""
    documents: Ints | None = None
    """(T,): the number of the document that each token belongs to, where several are packed."""
    answers: Bools | None = None
    """(T,): whether the token may be a target, where not all may."""
    words: Ints | None = None
    """(T,): the number of the word that each token is a piece of, counted from 0."""
    rejected: Ints | None = None
    """(R,): of a prompt (`source`) and the answer that was chosen (`tokens`), the other answer."""
    labels: Ints | None = None
    """A class (), one class per word (or per token), or the first and the last token of a span (2,)."""


@dataclass(frozen=True)
class Row:
    """One row of a batch, before padding."""

    inputs: Mapping[str, NDArray[np.generic]]
    """Arguments of `Transformer.forward`, each (T,), `source` (S,), `prefix_length` ()."""
    targets: Ints
    """(T,), or as the head decides: () one class, (2,) a span."""


@dataclass(frozen=True)
class Tensors:
    """A batch on a device."""

    inputs: dict[str, Tensor]
    targets: Tensor
    count: int
    places: Tensor | None
    """(count,): the indices of the real targets among all, flattened; None if all are real."""
    pairs: Tensor | None = None
    recall: Recall | None = None
    reference: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model is called with."""
        return self.inputs if self.recall is None else {**self.inputs, "recall": self.recall}


@dataclass(frozen=True)
class Batch:
    """Rows of one length: what the model is called with, and what it should answer."""

    inputs: dict[str, NDArray[np.generic]]
    targets: Ints
    pairs: Ints | None = None
    """(B,), of rows that are two texts: whether the second does not follow the first (Devlin 2018); 0: it does."""
    recall: Recall | None = None
    """Of rows that go on where others ended: what the model recalls of these. It lies on the model's device."""
    in_twos: bool = False
    """Whether rows come in twos, an answer that was chosen and one that was rejected; each two are one target."""
    reference: Tensor | None = None
    """(B,), of rows in twos: log p of the answer by the reference. It lies on the model's device."""

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.targets)

    @cached_property
    def count(self) -> int:
        """How many targets are real."""
        return self.rows // 2 if self.in_twos else int((self.targets != IGNORE).sum())

    def split(self, rows: int) -> list[Batch]:
        """Parts of at most `rows` rows, or twos of them, in order, as wide as the batch."""
        rows = 2 * rows if self.in_twos else rows
        return [self._part(slice(start, start + rows)) for start in range(0, self.rows, rows)]

    def to(self, device: torch.device | str) -> Tensors:
        """The batch as tensors."""
        places = None
        if self.count < self.targets.size:
            places = _tensor((self.targets.reshape(-1) != IGNORE).nonzero()[0], device)
        inputs = {name: _tensor(value, device) for name, value in self.inputs.items()}
        pairs = None if self.pairs is None else _tensor(self.pairs, device)
        return Tensors(inputs, _tensor(self.targets, device), self.count, places, pairs, self.recall, self.reference)

    def _part(self, rows: slice) -> Batch:
        inputs = {name: value[rows] for name, value in self.inputs.items()}
        for mask in ("valid", "source_valid"):
            if mask in inputs and inputs[mask].all():
                del inputs[mask]  # attention without a mask is faster
        pairs = None if self.pairs is None else self.pairs[rows]
        recall = None if self.recall is None else self.recall.rows(rows)
        reference = None if self.reference is None else self.reference[rows]
        return Batch(inputs, self.targets[rows], pairs, recall, self.in_twos, reference)


def collate(rows: Sequence[Row], pad: int = 0, *, pairs: Ints | None = None) -> Batch:
    """Rows as one batch, padded on the right; `valid` and `source_valid` are there only where there is padding.

    pad: the token that padding holds, which no one sees.
    """
    if not rows:
        raise DataError("batch: no rows; give at least one example")
    inputs: dict[str, NDArray[np.generic]] = {}
    for name in rows[0].inputs:
        values = [row.inputs[name] for row in rows]
        inputs[name] = _padded(values, _PAD.get(name, pad))
        mask = {"tokens": "valid", "source": "source_valid"}.get(name)
        if mask and len({value.size for value in values}) > 1:
            inputs[mask] = _padded([np.ones(value.size, np.bool_) for value in values], False)
    return Batch(inputs, _padded([row.targets for row in rows], IGNORE).astype(np.int64), pairs)


def _padded(values: Sequence[NDArray[np.generic]], filler: int) -> NDArray[np.generic]:
    if values[0].ndim == 0:
        return np.stack(values)
    whole = np.full((len(values), max(value.size for value in values)), filler, values[0].dtype)
    for row, value in zip(whole, values, strict=True):
        row[: value.size] = value
    return whole


def _tensor(value: NDArray[np.generic], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(value)).to(device, non_blocking=True)
