"""Windows by chunks of queries: cost and memory linear in T for a pattern with bounded reach.

A chunk of queries [a, b) meets the keys [a - behind, b + ahead), and besides them the few that everybody sees: sinks
and global tokens. Rows of global queries, which see everything, are computed apart. Exact: each chunk's mask is the
pattern's predicate on the coordinates of its own queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qkv.config import Coordinates
from qkv.nn.backends.base import Backend, Scoring
from qkv.nn.backends.sdpa import dot_product
from qkv.nn.context import AttentionPlan, visible
from qkv.nn.gradient import differentiated
from qkv.nn.invariant import active


class Window(Backend):
    """Query chunks as long as the window, but at least 64."""

    name = "window"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> str | None:
        if scoring.special is not None:
            return scoring.special
        if scoring.bias is not None:
            return "it has no bias"
        reach = plan.pattern.reach()
        if reach.behind is None or reach.ahead is None:
            return f"pattern {plan.pattern.kind!r} has no bounded reach"
        if not plan.contiguous or q.shape[2] != k.shape[2]:
            return "explicit positions or gaps between valid tokens leave no band of keys"
        if torch.compiler.is_compiling() and (_reads_global(plan) or (reach.sinks and not _sinks_lead(plan))):
            return "how many keys everybody sees depends on the data, which a compiled graph cannot"
        return None

    def worthwhile(self, q: Tensor, plan: AttentionPlan) -> bool:
        reach = plan.pattern.reach()
        # Keys cut where chunks of queries end are summed in another order than a cache's.
        return q.shape[2] > 2 * (1 + (reach.behind or 0) + (reach.ahead or 0)) and not active()

    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        reach, length = plan.pattern.reach(), q.shape[2]
        behind, ahead = reach.behind or 0, reach.ahead or 0
        seen_by_all = _seen_by_all(plan, reach.sinks)
        far = None if seen_by_all is None else (_pick(k, seen_by_all), _pick(v, seen_by_all))
        out = []
        step = max(64, behind + 1)
        spans = [(max(0, at - behind), min(length, at + step + ahead)) for at in range(0, length, step)]
        chunks = zip(q.split(step, 2), pieces(k, spans), pieces(v, spans), spans, strict=True)
        for number, (queries, keys, values, (low, high)) in enumerate(chunks):
            start = number * step
            query, near = _slice(plan.query, start, start + queries.shape[2]), _slice(plan.key, low, high)
            mask = visible(plan.pattern, query, near)
            if far is not None and seen_by_all is not None:
                outside = (seen_by_all < low) | (seen_by_all >= high)
                far_mask = visible(plan.pattern, query, _gather(plan.key, seen_by_all)) & outside[:, None]
                mask = _join(far_mask, mask)
                keys, values = torch.cat((far[0], keys), 2), torch.cat((far[1], values), 2)
            out.append(dot_product(queries, keys, values, mask[:, None], scoring))
        return _with_global_queries(torch.cat(out, 2), q, k, v, plan, scoring)


def pieces(x: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """x (B, G, T, F) from `low` to `high`, for each of the spans, which overlap."""
    if differentiated(x):
        parts: tuple[Tensor, ...] = _Pieces.apply(x, spans)
        return parts
    return tuple(x[:, :, low:high] for low, high in spans)


class _Pieces(torch.autograd.Function):
    """The same; torch alone gives each piece a gradient as long as the row, which grows with its square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.spans, ctx.shape = spans, x.shape
        return tuple(x[:, :, low:high] for low, high in spans)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].new_zeros(ctx.shape)
        for gradient, (low, high) in zip(gradients, ctx.spans, strict=True):
            whole[:, :, low:high] += gradient
        return whole, None


def _seen_by_all(plan: AttentionPlan, sinks: int) -> Tensor | None:
    """(B or 1, n): indices of the keys that queries see beyond their window, filled up with others."""
    position = plan.key.position
    if not _reads_global(plan) and (not sinks or _sinks_lead(plan)):
        return torch.arange(min(sinks, position.shape[-1]), device=position.device)[None] if sinks else None
    seen = (position >= 0) & (position < sinks)
    if _reads_global(plan):
        seen = seen | plan.key.is_global
    return _indices(seen)


def _sinks_lead(plan: AttentionPlan) -> bool:
    """Whether every row is the same plain row, which begins with its sinks."""
    return plan.contiguous and plan.key.document is None and plan.key.position.shape[0] == 1


def _indices(marked: Tensor) -> Tensor | None:
    """(B, n): where each row is marked, filled up with other places to the largest number; None if nowhere."""
    n = int(marked.sum(-1).max())
    return marked.int().argsort(dim=-1, descending=True, stable=True)[:, :n] if n else None


def _reads_global(plan: AttentionPlan) -> bool:
    return plan.key.is_global is not None and "is_global" in plan.pattern.fields


def _with_global_queries(out: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
    rows = _indices(plan.query.is_global) if _reads_global(plan) else None
    if rows is None:
        return out
    mask = visible(plan.pattern, _gather(plan.query, rows), plan.key)
    picked = rows[:, None, :, None]
    full = dot_product(_pick(q, rows), k, v, mask[:, None], scoring)
    return out.scatter(2, picked.expand_as(full), full)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """(B, H, n, F): the slots of x (B, H, T, F) at `index` (B or 1, n)."""
    batch, heads, _, width = x.shape
    return x.gather(2, index.expand(batch, -1)[:, None, :, None].expand(-1, heads, -1, width))


def _slice(at: Coordinates, start: int, stop: int) -> Coordinates:
    return _each(at, lambda x: x[:, start:stop] if x.shape[-1] > 1 else x)


def _gather(at: Coordinates, index: Tensor) -> Coordinates:
    return _each(
        at, lambda x: x.expand(max(len(x), len(index)), -1).gather(1, index.expand(max(len(x), len(index)), -1))
    )


def _each(at: Coordinates, f: Callable[[Tensor], Tensor]) -> Coordinates:
    values = (at.position, at.document, at.is_global, at.prefix_length, at.length)
    return Coordinates(*(None if x is None else f(x) for x in values))


def _join(left: Tensor, right: Tensor) -> Tensor:
    batch = max(len(left), len(right))
    return torch.cat((left.expand(batch, -1, -1), right.expand(batch, -1, -1)), -1)


WINDOW = Window()
