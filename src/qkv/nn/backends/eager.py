"""The formula as it stands: all scores, softmax, all weights. Every feature, O(Q K) memory.

Grouped heads are not repeated: queries are viewed as (B, G, H/G, Q, F) against keys (B, G, 1, K, F).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkv.nn.backends.base import Backend, Scoring
from qkv.nn.context import AttentionPlan


class Eager(Backend):
    """Serves every call."""

    name = "eager"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> str | None:
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        weights = attention_weights(q, k, plan, scoring)
        dropped = F.dropout(weights, scoring.dropout) if scoring.dropout else weights
        grouped = dropped.unflatten(1, (v.shape[1], -1))
        out = (grouped @ v[:, :, None]).flatten(1, 2)
        extra = scoring.values(dropped) if scoring.values is not None else None
        return out if extra is None else out + extra


def attention_weights(
    q: Float[Tensor, "B H Q F"], k: Float[Tensor, "B G K F"], plan: AttentionPlan, scoring: Scoring
) -> Float[Tensor, "B H Q K"]:
    """The softmax of the scores; rows that see nothing are 0."""
    scores = (q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].transpose(-1, -2)).flatten(1, 2)
    if scoring.scale != 1.0:
        scores = scores * scoring.scale
    bias, hidden = scoring.bias, None if plan.cover == "all" else _hidden(plan)
    if bias is not None and hidden is not None and scoring.softcap is None:
        bias, hidden = bias.masked_fill(hidden, -torch.inf), None  # before it is spread over the rows
    if bias is not None:
        scores = scores + bias
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if scoring.sinks is not None:
        sink = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if plan.cover == "partial":
        weights = weights.masked_fill(~plan.mask[:, None], 0.0)
    return weights.to(q.dtype)


def _hidden(plan: AttentionPlan) -> Tensor:
    """(B or 1, 1, Q, K): the keys that count for nothing.

    Not those of a query that sees nothing: any finite scores do there, and its weights are set to 0 after.
    """
    mask = plan.mask[:, None]
    return ~mask & mask.any(-1, keepdim=True)


EAGER = Eager()
