"""What a model in training remembers of the segment before: the inputs of its layers, without gradient.

    h~ = [SG(h of the last M tokens) ; h]        q = W_q h,    k, v = W_k h~, W_v h~

(Dai 2019, arXiv 1901.02860, section 3.2; SG stops the gradient.) Inputs and not keys are kept, so that keys and values
are made of them with the weights of this step, whose gradient they have a part in. Tokens are numbered from the
beginning of the text, so that distances, and patterns that count positions, are those of the whole text.

    recall = Recall.empty(64)
    output = model(segment, recall=recall);    recall = output.recall
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qkv.config import Coordinates
from qkv.errors import DataError


@dataclass(frozen=True)
class Recall:
    """The inputs of every layer of the decoder, for the last tokens before a segment."""

    size: int
    """How many tokens are kept, at most."""
    seen: int = 0
    """How many tokens of the text each row has read."""
    layers: tuple[Tensor, ...] = ()
    """(B, M, D), one of each layer; none at the beginning of a text."""

    @classmethod
    def empty(cls, size: int) -> Recall:
        """That of a text which is about to begin."""
        return cls(size)

    @property
    def length(self) -> int:
        """M: how many tokens there are."""
        return self.layers[0].shape[1] if self.layers else 0

    def coordinates(self, tokens: Tensor) -> tuple[Coordinates, Coordinates]:
        """Where new tokens stand, (1, T), and the keys that they look at, (1, M + T)."""
        if self.layers and len(self.layers[0]) != len(tokens):
            raise DataError(f"recall: of {len(self.layers[0])} rows, but there are {len(tokens)}; carry each row's own")
        stop = self.seen + tokens.shape[1]
        every = torch.arange(self.seen - self.length, stop, device=tokens.device)[None]
        query = every[:, self.length :]
        return (
            Coordinates(query, length=torch.full_like(query, stop)),
            Coordinates(every, length=torch.full_like(every, stop)),
        )

    def after(self, inputs: Sequence[Tensor]) -> Recall:
        """What is remembered once the layers have read `inputs`, (B, T, D) each."""
        before = self.layers or [x[:, :0] for x in inputs]
        joined = [torch.cat((old, new.detach()), 1) for old, new in zip(before, inputs, strict=True)]
        # A copy: a view would keep the whole segment alive.
        kept = tuple(x[:, max(0, x.shape[1] - self.size) :].clone() for x in joined)
        return Recall(self.size, self.seen + inputs[0].shape[1], kept)

    def rows(self, rows: slice) -> Recall:
        """That of some of the rows."""
        return replace(self, layers=tuple(x[rows] for x in self.layers))

    @classmethod
    def joined(cls, parts: Sequence[Recall]) -> Recall:
        """Of all rows, from parts of them in order."""
        layers = (torch.cat(one) for one in zip(*(part.layers for part in parts), strict=True))
        return replace(parts[0], layers=tuple(layers))
