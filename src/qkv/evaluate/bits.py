"""How many bits a model needs per token of a text: -log2 p(token | tokens before it), on average.

The protocol `disjoint_windows`: the text is cut into windows of `context` tokens that do not overlap; in each, every
token is predicted from those before it, and the first of the next window from the whole one. So each token but the
text's first is predicted exactly once, on average from half a window: a model never looks better than it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from qkv.errors import DataError
from qkv.evaluate.scoring import Window, scored
from qkv.nn import Transformer


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

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many equally likely tokens the model would be as unsure."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def disjoint_windows(model: Transformer, tokens: Tensor, context: int) -> Score:
    """The cost of `tokens` (N,) by the protocol above."""
    if len(tokens) < 2:
        raise DataError(f"tokens: a text of {len(tokens)} tokens predicts nothing; give at least 2")
    text = tokens.tolist()
    edges = range(0, len(text) - 1, context)
    windows = (Window(text[at : at + context][: len(text) - 1 - at], text[at + 1 : at + 1 + context]) for at in edges)
    return Score(-sum(found.logprob for found in scored(model, windows)), len(text) - 1)
