"""torch's `scaled_dot_product_attention`: without a mask (`flash`), and with one (`sdpa`).

`is_causal` is aligned top-left when queries are fewer than keys, so it is used only where both are the same range. The
CPU kernel wants values as wide as keys: the narrower side is padded with zeros, which changes no score and no sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.nn.backends.base import Backend, Scoring
from qkv.nn.backends.eager import EAGER
from qkv.nn.context import AttentionPlan


class Flash(Backend):
    """No mask: O(T) memory, and half the work for a causal pattern."""

    name = "flash"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> str | None:
        if scoring.special is not None:
            return scoring.special
        if scoring.bias is not None:
            return "it has no bias"
        if plan.cover == "partial":
            return f"pattern {plan.pattern.kind!r} with these inputs needs a mask"
        if scoring.dropout and q.device.type == "cpu":
            return "it has no dropout on a CPU"
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        return dot_product(q, k, v, None, scoring, causal=plan.cover == "causal")


class Sdpa(Backend):
    """A mask and a bias, joined into one tensor."""

    name = "sdpa"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> str | None:
        return scoring.special

    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        learned = scoring.bias is not None and scoring.bias.requires_grad and torch.is_grad_enabled()
        if learned and q.device.type == "cpu":
            return EAGER.run(q, k, v, plan, scoring)  # as torch does, which has no kernel for it, but slower
        mask = None if plan.cover == "all" else plan.mask[:, None]
        if scoring.bias is not None:
            bias = scoring.bias.to(q.dtype)
            mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
        return dot_product(q, k, v, mask, scoring)


def dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring, causal: bool = False) -> Tensor:
    """torch's kernel on heads of unequal width; grouped heads are its own business."""
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    elif width > q.shape[-1]:
        q, k = F.pad(q, (0, width - q.shape[-1])), F.pad(k, (0, width - k.shape[-1]))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, mask, scoring.dropout, is_causal=causal, scale=scoring.scale, enable_gqa=grouped
    )
    return out[..., :width]


FLASH, SDPA = Flash(), Sdpa()
