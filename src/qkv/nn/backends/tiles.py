"""Patterns made of square tiles: each tile of queries meets the tiles of keys that it sees, and no others.

A pattern says with `tile` that its predicate has one value on every tile of that side. Asked once per pair of tiles, it
gives the list of each tile of queries; the listed keys are gathered, so that time and memory grow as the lists, which
for BigBird (Zaheer 2020, section 3.1) are as long in a long row as in a short one. The few tiles whose queries see most
of the row (BigBird's first and last) meet all keys. Exact: what a list is filled up with, to the longest, is masked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.config import Coordinates
from qkv.nn.backends.base import Backend, Scoring
from qkv.nn.backends.sdpa import dot_product
from qkv.nn.context import AttentionPlan, visible
from qkv.nn.invariant import active


class _Lists(NamedTuple):
    """Who meets whom; n tiles of a row, of which s have short lists of m tiles."""

    short: Int[Tensor, " s"]
    long: Int[Tensor, " l"]
    """The other tiles of queries."""
    keys: Int[Tensor, "R s m"]
    """The tiles of keys of each, in every row (R is B, or 1 where all are alike)."""
    seen: Bool[Tensor, "R s m"]
    """Which of these it does see."""
    exists: Bool[Tensor, "R n tile"]


class Tiles(Backend):
    """Gathers the keys of each tile of queries."""

    name = "tiles"

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> str | None:
        if scoring.special is not None:
            return scoring.special
        if scoring.bias is not None:
            return "it has no bias"
        if plan.pattern.tile is None:
            return f"pattern {plan.pattern.kind!r} is not made of tiles"
        if torch.compiler.is_compiling():
            return "how many tiles are seen depends on the data, which a compiled graph cannot"
        if plan.key.document is not None or q.shape[2] != k.shape[2] or not _begins(plan):
            return "its tiles begin with the row: no packing, explicit positions, or padding on the left"
        return None

    def worthwhile(self, q: Tensor, plan: AttentionPlan) -> bool:
        if plan.pattern.tile is None or torch.compiler.is_compiling() or active():
            return False
        if q.shape[2] != plan.key.position.shape[-1] or not _begins(plan):
            return False
        lists = _lists(plan, plan.pattern.tile)
        return len(lists.long) + lists.keys.shape[-1] < lists.exists.shape[1] // 2

    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        assert plan.pattern.tile is not None
        tile, length = plan.pattern.tile, q.shape[2]
        lists = _lists(plan, tile)
        q_tiles, k_tiles, v_tiles = (_cut(x, tile) for x in (q, k, v))
        parts = []
        if len(lists.long):
            queries = q_tiles[:, lists.long].flatten(1, 2)
            mask = _seen_by(plan, lists.long, tile)
            parts.append(dot_product(queries.transpose(1, 2), k, v, mask, scoring).transpose(1, 2))
        if len(lists.short):
            queries = q_tiles[:, lists.short].flatten(0, 1).transpose(1, 2)
            keys, values = (_gathered(x, lists.keys) for x in (k_tiles, v_tiles))
            mixed = dot_product(queries, keys, values, _mask(lists, len(q)), scoring)
            parts.append(mixed.transpose(1, 2).unflatten(0, (len(q), -1)).flatten(1, 2))
        order = torch.cat((lists.long, lists.short)).argsort()
        tiles = torch.cat(parts, 1).unflatten(1, (-1, tile)).index_select(1, order)
        out = tiles.flatten(1, 2)[:, :length].transpose(1, 2)
        return out.masked_fill((plan.query.position < 0)[:, None, :, None], 0.0)


def _begins(plan: AttentionPlan) -> bool:
    """Whether every token stands at its index, and only padding behind a row does not."""
    if "begins" not in plan.kept:
        position = plan.key.position
        index = torch.arange(position.shape[-1], device=position.device)
        plan.kept["begins"] = plan.key is plan.query and bool(((position == index) | (position < 0)).all())
    return bool(plan.kept["begins"])


def _lists(plan: AttentionPlan, tile: int) -> _Lists:
    """The lists of all tiles of queries."""
    if "tiles" not in plan.kept:
        position, length = plan.query.position, plan.query.length
        padded = F.pad(position, (0, -position.shape[-1] % tile), value=-1).unflatten(-1, (-1, tile))
        # Of each tile its first token: where that does not exist, none does.
        firsts = Coordinates(padded[..., 0], length=None if length is None else length[:, ::tile])
        seen = visible(plan.pattern, firsts, firsts)
        counts = seen.sum(-1).amax(0)
        is_short = counts <= counts.numel() // 2
        size = int(counts[is_short].max()) if bool(is_short.any()) else 0
        short, long = is_short.nonzero().squeeze(-1), (~is_short).nonzero().squeeze(-1)
        keys = seen[:, short].int().argsort(dim=-1, descending=True, stable=True)[..., :size]
        plan.kept["tiles"] = _Lists(short, long, keys, seen[:, short].gather(-1, keys), padded >= 0)
    lists: _Lists = plan.kept["tiles"]
    return lists


def _cut(x: Float[Tensor, "B H T F"], tile: int) -> Float[Tensor, "B n tile H F"]:
    """Tiles, the last filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % tile)).transpose(1, 2).unflatten(1, (-1, tile))


def _gathered(x: Float[Tensor, "B n tile G F"], tiles: Int[Tensor, "R s m"]) -> Float[Tensor, "Bs G mtile F"]:
    """The listed tiles of each row, side by side."""
    rows, n = x.shape[:2]
    index = tiles + n * torch.arange(rows, device=x.device)[:, None, None]
    picked = x.flatten(0, 1).index_select(0, index.flatten())
    return picked.unflatten(0, (-1, tiles.shape[-1])).flatten(1, 2).transpose(1, 2)


def _mask(lists: _Lists, rows: int) -> Bool[Tensor, "Bs 1 1 mtile"] | None:
    """Which of the gathered keys are seen; None if all are."""
    exists = lists.exists.take_along_dim(lists.keys.flatten(1)[..., None], 1).unflatten(1, lists.keys.shape[1:])
    seen = lists.seen[..., None] & exists
    if bool(seen.all()):
        return None
    return seen.flatten(-2).expand(rows, -1, -1).flatten(0, 1)[:, None, None]


def _seen_by(plan: AttentionPlan, tiles: Int[Tensor, " l"], tile: int) -> Bool[Tensor, "R 1 _ T"]:
    """Which keys the queries of these tiles see."""
    index = (tiles[:, None] * tile + torch.arange(tile, device=tiles.device)).flatten()
    index = index.clamp(max=plan.query.position.shape[-1] - 1)  # for what fills up the last tile
    query = Coordinates(
        plan.query.position[:, index], length=None if plan.query.length is None else plan.query.length[:, index]
    )
    return visible(plan.pattern, query, plan.key)[:, None]


TILES = Tiles()
