"""Embeddings: norm(table[token] * factor + position + segment), dropout in training (Vaswani 2017, section 3.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import config as c
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
        return F.dropout(self.norm(hidden), self.dropout, self.training)
