"""Embeddings: from token ids to vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from qkv.config.base import (
    Config,
    NonNegative,
    Positive,
    PositiveFloat,
    Probability,
    Problem,
    Tuple,
    Variant,
    expecting,
)
from qkv.config.norm import NoNorm, Norm
from qkv.config.parameter import Parameter, Sizes, Table, under
from qkv.config.position import NoPositions, Positions

Scale = Annotated[PositiveFloat | Literal["sqrt_d_model"], expecting("a positive number or 'sqrt_d_model'")]


class TokenTable(Variant):
    """The union of tables that hold one vector per token."""

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        """The table's tensors."""
        raise NotImplementedError(f"{type(self).__name__} must define parameters(vocab_size, d_model)")


class FullTable(TokenTable):
    """One row of width d_model per token."""

    kind: Literal["full"] = "full"

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        return {"weight": Parameter((vocab_size, d_model), "token_embedding")}


class AdaptiveTable(TokenTable):
    """Rare tokens get narrower rows (Baevski and Auli 2018): d_model / divisor^c wide in cluster c, then a projection.

    Cluster c holds the ids from cutoffs[c-1] to cutoffs[c] - 1, the last one those to the end of the vocabulary.
    """

    kind: Literal["adaptive"] = "adaptive"
    cutoffs: Tuple[Positive]
    divisor: Positive = 4

    def problems(self) -> Iterator[Problem]:
        if not self.cutoffs or list(self.cutoffs) != sorted(set(self.cutoffs)):
            yield "cutoffs", f"must be increasing and not empty, got {list(self.cutoffs)}"

    def clusters(self, vocab_size: int, d_model: int) -> tuple[tuple[int, int, int], ...]:
        """(first id, one past the last id, width) of each cluster."""
        edges = (0, *self.cutoffs, vocab_size)
        return tuple((edges[c], edges[c + 1], d_model // self.divisor**c) for c in range(len(edges) - 1))

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        table: Table = {}
        for index, (start, stop, width) in enumerate(self.clusters(vocab_size, d_model)):
            table[f"clusters.{index}.weight"] = Parameter((stop - start, width), "token_embedding")
            table[f"projections.{index}.weight"] = Parameter((d_model, width), "projection")
        return table


TokenTable.members = (FullTable, AdaptiveTable)


class Embedding(Config):
    """norm(table[token] * scale + position + segment), with dropout in training."""

    tokens: TokenTable = FullTable()
    scale: Scale = 1.0
    """Multiplies token vectors: a number, or `sqrt_d_model` (Vaswani 2017, section 3.4; Gemma)."""
    positions: Positions = NoPositions()
    """What is added: `sinusoidal`, `learned`, or `none`."""
    n_segments: NonNegative = 0
    """Rows of the segment (token type) table; 0 is no table (BERT: 2)."""
    norm: Norm = NoNorm()
    dropout: Probability = 0.0

    def problems(self) -> Iterator[Problem]:
        if "embedding" not in self.positions.places:
            yield (
                "positions",
                f"{self.positions.kind!r} acts in attention: set it at attention.positions, and 'none' here",
            )

    def factor(self, d_model: int) -> float:
        """The number that multiplies token vectors."""
        return d_model**0.5 if self.scale == "sqrt_d_model" else float(self.scale)

    def parameters(self, vocab_size: int, sizes: Sizes, *, with_tokens: bool = True) -> Table:
        """The embedding's tensors, without the token table where that belongs to another embedding."""
        table = under("tokens", self.tokens.parameters(vocab_size, sizes.d_model)) if with_tokens else {}
        table |= under("positions", self.positions.parameters(sizes))
        if self.n_segments:
            table["segments.weight"] = Parameter((self.n_segments, sizes.d_model), "segment_embedding")
        return table | under("norm", self.norm.parameters(sizes.d_model))
