"""Preferences: an answer that people chose becomes likelier than the one that they rejected, without a reward model.

    L = -log sigmoid(beta [ (log p(chosen | x) - log r(chosen | x)) - (log p(rejected | x) - log r(rejected | x)) ])

(Rafailov 2023, DPO, arXiv 2305.18290, equation 7.) p is the model, r the reference: the model as it was at the start.
Rows of a batch come in twos, the chosen answer first; their targets are the tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkv.nn import Transformer
from qkv.nn.model import Output
from qkv.train.batch import IGNORE, Batch, Tensors


def answer_logprobs(logits: Float[Tensor, "B T V"], targets: Tensor) -> Float[Tensor, " B"]:
    """log p of each row's targets together, in float32 or better."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return -flat.view(targets.shape).sum(-1)


def margins(output: Output, batch: Tensors) -> Float[Tensor, " pairs"]:
    """How much more the chosen answer has gained on the reference than the rejected one: rewards apart, over beta."""
    assert output.logits is not None
    assert batch.reference is not None
    gained = answer_logprobs(output.logits, batch.targets) - batch.reference
    return gained[0::2] - gained[1::2]


def preference_loss(output: Output, batch: Tensors, beta: float) -> Float[Tensor, ""]:
    """The sum over the pairs of rows."""
    return F.softplus(-beta * margins(output, batch)).sum()


def frozen_copy(model: Transformer) -> Transformer:
    """The model as it is, which nothing moves."""
    return deepcopy(model).requires_grad_(False).eval()


@dataclass(frozen=True)
class Reference:
    """A frozen model, and what calls it."""

    model: Transformer
    run: Callable[..., Output]
    rows: int
    """How many twos of rows it reads at a time."""

    def beside(self, batch: Batch) -> Batch:
        """The batch with the reference's log p of every answer."""
        device, found = next(self.model.parameters()).device, []
        with torch.no_grad():
            for part in batch.split(self.rows):
                tensors = part.to(device)
                logits = self.run(**tensors.arguments).logits
                assert logits is not None
                found.append(answer_logprobs(logits, tensors.targets))
        return replace(batch, reference=torch.cat(found))
