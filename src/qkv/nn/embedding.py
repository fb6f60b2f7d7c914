"""Embeddings: norm(table[token] * factor + position + segment), dropout in training (Vaswani 2017, section 3.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import config as c
from qkv.errors import DataError
from qkv.nn.context import Context
from qkv.nn.position import Scheme
from qkv.nn.registry import implements, make


@implements(c.FullTable)
class FullTable(nn.Module):
    """One row per token."""

    def __init__(self, config: c.FullTable, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return F.embedding(tokens, self.weight)


@implements(c.AdaptiveTable)
class AdaptiveTable(nn.Module):
    """Narrower rows for rarer tokens, projected to d_model (Baevski and Auli 2018)."""

    def __init__(self, config: c.AdaptiveTable, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.d_model, self.bounds = d_model, config.clusters(vocab_size, d_model)
        self.clusters = nn.ModuleList(nn.Embedding(stop - start, width) for start, stop, width in self.bounds)
        self.projections = nn.ModuleList(nn.Linear(width, d_model, bias=False) for _, _, width in self.bounds)

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        flat = tokens.flatten()
        places, vectors = [], []
        for (start, stop, _), table, project in zip(self.bounds, self.clusters, self.projections, strict=True):
            at = ((flat >= start) & (flat < stop)).nonzero().squeeze(-1)
            places.append(at)
            vectors.append(project(table(flat[at] - start)))
        order = torch.cat(places).argsort()
        return torch.cat(vectors)[order].view(*tokens.shape, self.d_model)


class Embedding(nn.Module):
    """Tokens, positions and segments joined. `tokens` is None where the table belongs to another embedding."""

    tokens: nn.Module | None
    positions: Scheme
    segments: nn.Embedding | None

    def __init__(self, config: c.Embedding, model: c.ModelConfig, *, with_tokens: bool = True) -> None:
        super().__init__()
        self.factor, self.dropout = config.factor(model.d_model), config.dropout
        self.vocab_size = model.vocab_size
        self.tokens = make(config.tokens, model.vocab_size, model.d_model) if with_tokens else None
        self.positions = make(config.positions, model.sizes)
        self.segments = nn.Embedding(config.n_segments, model.d_model) if config.n_segments else None
        self.norm = make(config.norm, model.d_model)

    def forward(
        self, tokens: Int[Tensor, "B T"], segments: Int[Tensor, "B T"] | None, table: nn.Module, ctx: Context
    ) -> Float[Tensor, "B T D"]:
        """`table` is the token table: this embedding's own, or the shared one."""
        hidden = table(tokens)
        if self.factor != 1.0:
            hidden = hidden * self.factor
        position = self.positions.embed(ctx.query.position, hidden.dtype)
        if position is not None:
            hidden = hidden + position
        if self.segments is not None:
            hidden = hidden + self.segments(torch.zeros_like(tokens) if segments is None else segments)
        return ctx.tap(self, "output", F.dropout(self.norm(hidden), self.dropout, self.training))

    def check(self, name: str, tokens: Tensor, positions: Tensor | None, segments: Tensor | None) -> None:
        """Refuse what the tables have no row for, before anything is computed; `name` is the argument's."""
        _check_ids(name, tokens, self.vocab_size)
        self.positions.check(tokens.shape[1] if positions is None else int(positions.max()) + 1)
        if segments is None:
            return
        if self.segments is None:
            raise DataError("segments: this model has no segment table; leave them out")
        _check_ids("segments", segments, self.segments.num_embeddings)


def _check_ids(name: str, ids: Tensor, size: int) -> None:
    if ids.numel() == 0:
        raise DataError(f"{name}: empty, shape {tuple(ids.shape)}; give at least one token per row")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise DataError(f"{name}: id {low if low < 0 else high} is outside 0 to {size - 1}")
