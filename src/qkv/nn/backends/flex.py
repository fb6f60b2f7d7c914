"""FlexAttention: the pattern's predicate compiled into the kernel (Dong 2024).

On a GPU it skips blocks that the pattern forbids. On a CPU it exists to prove that the predicates run there too: it has
no backward, and takes seconds to compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from qkv.config import Coordinates
from qkv.nn.backends.base import Backend, Scoring
from qkv.nn.context import AttentionPlan


class Flex(Backend):
    """Masks and biases inside the kernel."""

    name = "flex"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> str | None:
        if scoring.sinks is not None or scoring.values is not None:
            return scoring.special
        if scoring.dropout:
            return "it has no dropout"
        if q.device.type == "cpu" and q.dtype == torch.float64:
            return "it has no float64 on a CPU"
        if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return "it has no backward on a CPU"
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        query, key, pattern = plan.query, plan.key, plan.pattern

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            at, to = _at(query, b, i), _at(key, b, j)
            seen = pattern.allowed(at, to) & (at.position >= 0) & (to.position >= 0)
            return seen if at.document is None else seen & (at.document == to.document)

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if scoring.bias is not None:
                full = scoring.bias
                index = [x if full.shape[d] > 1 else 0 for d, x in enumerate((b, h, i, j))]
                score = score + full[tuple(index)]
            if scoring.softcap is not None:
                score = scoring.softcap * torch.tanh(score / scoring.softcap)
            return score

        batch, heads, rows, columns = len(q), q.shape[1], q.shape[2], k.shape[2]
        mask = create_block_mask(mask_mod, batch, None, rows, columns, device=str(q.device))
        modify = score_mod if scoring.bias is not None or scoring.softcap is not None else None
        grouped = heads != k.shape[1]
        kernel = torch.compile(flex_attention, dynamic=False)
        return kernel(q, k, v, modify, mask, scoring.scale, enable_gqa=grouped)


def _at(where: Coordinates, b: Any, i: Any) -> Coordinates:
    """The coordinates of token i of row b; an axis of length 1 holds for all."""

    def at(x: Tensor | None) -> Any:
        if x is None:
            return None
        return x[b if x.shape[0] > 1 else 0, i if x.shape[1] > 1 else 0]

    return Coordinates(
        at(where.position), at(where.document), at(where.is_global), at(where.prefix_length), at(where.length)
    )


FLEX = Flex()
