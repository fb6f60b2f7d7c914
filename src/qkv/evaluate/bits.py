"""How many bits a model needs per token of a text: -log2 p(token | tokens before it), on average.

The protocol `disjoint_windows`: the text is cut into windows of `context` tokens that do not overlap; in each, every
token is predicted from those before it, and the first of the next window from the whole one. So each token but the
text's first is predicted exactly once, on average from half a window: a model never looks better than it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.errors import DataError
from qkv.nn import Transformer

_BATCH = 16  # windows per forward


@dataclass(frozen=True)
class Score:
    """The cost of a text."""

    nats: float
    """-log p of all predicted tokens."""
    tokens: int
    """How many were predicted."""

    @property
    def bits_per_token(self) -> float:
        """Bits per predicted token: per byte, where tokens are bytes."""
        return self.nats / self.tokens / math.log(2)

    @property
    def loss(self) -> float:
        """Nats per predicted token: the cross-entropy."""
        return self.nats / self.tokens


@torch.inference_mode()
def disjoint_windows(model: Transformer, tokens: Tensor, context: int) -> Score:
    """The cost of `tokens` (N,) by the protocol above."""
    if len(tokens) < 2:
        raise DataError(f"tokens: a text of {len(tokens)} tokens predicts nothing; give at least 2")
    was_training = model.training
    model.eval()
    last, nats = len(tokens) - 1, 0.0
    whole = last // context * context
    edges = [*range(0, whole, _BATCH * context), whole, last]
    for start, stop in pairwise(edges):
        if start < stop:
            x, y = (tokens[start + shift : stop + shift].view(-1, min(context, stop - start)) for shift in (0, 1))
            logits = model(x).logits
            nats += F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum").item()
    model.train(was_training)
    return Score(nats, last)
