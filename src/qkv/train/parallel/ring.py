"""Ring attention: each process has some tokens of every row, and keys and values go from one process to the next.

    block j:   S_j = scores of own queries and the keys of rank j,  l_j = log sum exp S_j,  O_j = softmax(S_j) V_j
    merged:    l = log sum_j exp l_j,    O = sum_j exp(l_j - l) O_j

(Liu 2023, arXiv 2310.01889; the merge is that of FlashAttention, Dao 2022.) In the backward pass the weights of a block
are exp(S_j - l) with the l of all blocks, so that each block's share is exact; the gradients of keys and values travel
with them, and are home after one round:

    dV_j += P^T dO,   dS = P * (dO V_j^T - rowsum(dO * O) + dl),   from dS those of queries, keys and biases

A query sees a key where the pattern says so of their coordinates, which each process gets from all others once per
forward: padding, packed documents, windows and any order of tokens are right by that alone. Pieces of keys that no
query of a piece sees cost nothing.

The backend `ring` is chosen by name after `make_ring(group)`: `model(..., positions=positions, backend="ring")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from qkv.config import Coordinates
from qkv.nn.backends import BACKENDS
from qkv.nn.backends.base import Backend, Scoring
from qkv.nn.context import AttentionPlan, visible

NAME = "ring"
_ROWS = 1024  # queries whose scores are there at once


class Ring(Backend):
    """Attention over the keys of all processes of a group."""

    name = NAME

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> str | None:
        if scoring.values is not None:
            return "no process has all attention weights of a query"
        if scoring.dropout:
            return "it has no dropout"
        if plan.pattern.fields - {"position", "prefix_length"}:
            return f"pattern {plan.pattern.kind!r} reads more than positions"
        if q.shape[2] != k.shape[2]:
            return "queries and keys are not the same tokens"
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        if NAME not in plan.kept:
            plan.kept[NAME] = seen_blocks(plan, self.group)
        relative = scoring.relative
        round_ = _Round(self.group, plan.query, plan.kept[NAME], scoring)
        parameters = () if relative is None else relative.parameters
        with torch.autocast(q.device.type, enabled=False):
            function: Any = _Function  # torch leaves it untyped
            out, lse = function.apply(round_, q, k.to(q.dtype), v.to(q.dtype), *parameters)
            if scoring.sinks is not None:  # one more score: every weight is smaller by its share
                out = out * torch.sigmoid(lse - scoring.sinks.to(lse.dtype)[:, None, None])
        result: Tensor = out.to(q.dtype)
        return result


def make_ring(group: dist.ProcessGroup) -> None:
    """From now on the backend `ring` is this group's. Blocks that are recomputed ask for it in the backward pass."""
    BACKENDS[NAME] = Ring(group)


# Which keys each process has


@dataclass(frozen=True)
class Piece:
    """Some keys of a block, and the queries that look at any of them."""

    queries: slice
    keys: slice
    query: Coordinates
    key: Coordinates
    mask: Tensor | None
    """(B or 1, 1, q, k); None where every query sees every key."""


Blocks = list[list[Piece]]
"""Of each process, the pieces of its keys that this one's queries see."""


def seen_blocks(plan: AttentionPlan, group: dist.ProcessGroup) -> Blocks:
    """What this process's queries see of each process's keys."""
    return [_pieces(plan, key) for key in _everyones(plan.key, group)]


def _everyones(at: Coordinates, group: dist.ProcessGroup) -> list[Coordinates]:
    """The coordinates of every process's keys; what is of a row is the same everywhere."""
    fields = [at.position] if at.document is None else [at.position, at.document]
    batch = max(len(field) for field in fields)
    own = torch.stack([field.expand(batch, -1).long() for field in fields])
    all_ = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_, own, group=group)
    return [replace(at, position=one[0], document=one[1] if len(one) > 1 else None) for one in all_]


def _pieces(plan: AttentionPlan, key: Coordinates) -> list[Piece]:
    pieces = []
    halves = _cuts(key.position.shape[-1], 2)
    for queries in _query_cuts(plan.query.position.shape[-1]):
        for keys in halves:
            query_at, key_at = at_columns(plan.query, queries), at_columns(key, keys)
            mask = visible(plan.pattern, query_at, key_at)
            if bool(mask.any()):
                pieces.append(Piece(queries, keys, query_at, key_at, None if bool(mask.all()) else mask[:, None]))
    return pieces


def _query_cuts(length: int) -> list[slice]:
    """The two pieces of a row that a rank has, in parts that fit in memory."""
    return [part for half in _cuts(length, 2) for part in _within(half)]


def _within(piece: slice) -> Iterator[slice]:
    for start in range(piece.start, piece.stop, _ROWS):
        yield slice(start, min(start + _ROWS, piece.stop))


def _cuts(length: int, parts: int) -> list[slice]:
    edges = [length * part // parts for part in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]


def at_columns(at: Coordinates, columns: slice) -> Coordinates:
    """The coordinates of some tokens."""

    def cut(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[-1] == 1 else x[:, columns]

    return Coordinates(cut(at.position), cut(at.document), cut(at.is_global), at.prefix_length, cut(at.length))


# Once around


@dataclass(frozen=True)
class _Round:
    """What one attention does with each block that comes by."""

    group: dist.ProcessGroup
    query: Coordinates
    blocks: Blocks
    scoring: Scoring

    @property
    def ranks(self) -> int:
        return len(self.blocks)

    def pieces(self, hop: int) -> list[Piece]:
        """Those of the block that is here after so many hops."""
        return self.blocks[(dist.get_rank(self.group) - hop) % self.ranks]

    def scores(self, q: Tensor, k: Tensor, piece: Piece) -> Tensor:
        """(B, H, q, k), -inf where nothing is seen."""
        scoring = self.scoring
        s = (_grouped(q, k) @ k[:, :, None].transpose(-1, -2)).flatten(1, 2) * scoring.scale
        if scoring.relative is not None:
            s = s + scoring.relative.at(q, k, piece.query, piece.key)
        if scoring.softcap is not None:
            s = scoring.softcap * torch.tanh(s / scoring.softcap)
        wide: Tensor = s.to(torch.promote_types(s.dtype, torch.float32))
        return wide if piece.mask is None else wide.masked_fill(~piece.mask, -torch.inf)

    def around(self, tensors: list[Tensor], travellers: Callable[[int, list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Send tensors once around; `travellers` adds what came of each visit, which goes along to the next process.

        What is only read is on its way while it is computed with; what is added to it leaves afterwards.
        """
        carried: list[Tensor] = []
        for hop in range(self.ranks):
            last = hop == self.ranks - 1
            coming, works = ([], []) if last else self._sent(tensors)
            carried = travellers(hop, [*tensors, *carried])
            for work in works:
                work.wait()
            tensors = coming
            if carried and self.ranks > 1:
                carried, works = self._sent(carried)
                for work in works:
                    work.wait()
        return carried

    def _sent(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
        """Tensors on their way to the next process, and those that come from the one before."""
        rank = dist.get_rank(self.group)
        to = dist.get_global_rank(self.group, (rank + 1) % self.ranks)
        source = dist.get_global_rank(self.group, (rank - 1) % self.ranks)
        leaving = [tensor.contiguous() for tensor in tensors]
        coming = [torch.empty_like(tensor) for tensor in leaving]
        calls = []
        for sent, received in zip(leaving, coming, strict=True):
            calls.append(dist.P2POp(dist.isend, sent, to, self.group))
            calls.append(dist.P2POp(dist.irecv, received, source, self.group))
        return coming, dist.batch_isend_irecv(calls)


class _Function(torch.autograd.Function):
    """Output and log-sum-exp (B, H, Q, 1) of queries towards the keys of all processes."""

    @staticmethod
    def forward(
        ctx: Any, round_: _Round, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=wide)
        lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=wide)

        def meet(hop: int, block: list[Tensor]) -> list[Tensor]:
            for piece in round_.pieces(hop):
                at, keys, values = piece.queries, block[0][:, :, piece.keys], block[1][:, :, piece.keys]
                scores = round_.scores(q[:, :, at], keys, piece)
                part = scores.logsumexp(-1, keepdim=True)
                weights = _weights(scores, part)
                both = torch.logaddexp(lse[:, :, at], part)
                out[:, :, at] *= _weights(lse[:, :, at], both)
                out[:, :, at] += _mixed(weights, values.to(wide)) * _weights(part, both)
                lse[:, :, at] = both
            return []

        round_.around([k, v], meet)
        ctx.round, ctx.parameters = round_, parameters
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        round_: _Round = ctx.round
        q, k, v, out, lse = ctx.saved_tensors
        wanted = [p for p in ctx.parameters if p.requires_grad]
        d_q, d_parameters = torch.zeros_like(q, dtype=out.dtype), [torch.zeros_like(p) for p in wanted]
        shift = d_lse - (d_out * out).sum(-1, keepdim=True)

        def meet(hop: int, block: list[Tensor]) -> list[Tensor]:
            keys, values, *carried = block
            d_k, d_v = carried or [torch.zeros_like(x, dtype=out.dtype) for x in (keys, values)]
            for piece in round_.pieces(hop):
                at, near = piece.queries, piece.keys
                with torch.enable_grad():
                    queries, close = (x.detach().requires_grad_() for x in (q[:, :, at], keys[:, :, near]))
                    scores = round_.scores(queries, close, piece)
                weights = _weights(scores.detach(), lse[:, :, at])
                d_values, towards = _backwards(weights, d_out[:, :, at], values[:, :, near].to(out.dtype))
                d_v[:, :, near] += d_values
                d_scores = weights * (towards + shift[:, :, at])
                found = torch.autograd.grad(scores, [queries, close, *wanted], d_scores, allow_unused=True)
                d_q[:, :, at] += found[0]
                d_k[:, :, near] += found[1]
                for total, part in zip(d_parameters, found[2:], strict=True):
                    if part is not None:
                        total += part
            return [d_k, d_v]

        with torch.autocast(q.device.type, enabled=False):
            d_k, d_v = round_.around([k, v], meet)
        shares = iter(d_parameters)
        d_all = (next(shares) if p.requires_grad else None for p in ctx.parameters)
        return None, d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), *d_all


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 where nothing was seen."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    """(B, H, ...) as (B, G, H/G, ...), for the G heads of keys or values."""
    return x.reshape(len(x), keys.shape[1], -1, *x.shape[2:])


def _mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Values (B, G, k, F) summed by weights (B, H, q, k)."""
    return (_grouped(weights, values) @ values[:, :, None]).flatten(1, 2)


def _backwards(weights: Tensor, d_out: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of values (B, G, k, F), and of weights (B, H, q, k)."""
    by_group, d_by_group = _grouped(weights, values), _grouped(d_out, values)
    d_values = (by_group.transpose(-1, -2) @ d_by_group).sum(2)
    return d_values, (d_by_group @ values[:, :, None].transpose(-1, -2)).flatten(1, 2)
