"""Attention: heads, their projections, and the pattern and positions that they use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qkv.config.base import Positive, PositiveFloat, Probability, Problem, Variant
from qkv.config.norm import NoNorm, Norm, RMSNorm
from qkv.config.parameter import Parameter, Sizes, Table, linear, under
from qkv.config.pattern import Pattern
from qkv.config.position import NoPositions, Positions, Rotary


class Attention(Variant):
    """The union of attention mechanisms."""

    n_heads: Positive
    pattern: Pattern
    """Who may look at whom."""
    positions: Positions = NoPositions()
    """What turns queries and keys, or biases the scores."""
    scale: PositiveFloat | None = None
    """Multiplies the scores; by default 1/sqrt(width of a query). T5 uses 1."""
    dropout: Probability = 0.0
    """Applied to the attention weights in training."""

    @property
    def query_dim(self) -> int:
        """The width of one head's query, over which a score sums."""
        raise NotImplementedError(f"{type(self).__name__} must define query_dim")

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        return self.scale if self.scale is not None else self.query_dim**-0.5

    def streams(self) -> dict[str, tuple[int, int]]:
        """What a cache stores of each token: name -> (heads, width)."""
        raise NotImplementedError(f"{type(self).__name__} must define streams()")

    def parameters(self, sizes: Sizes) -> Table:
        """The tensors, except those of a position scheme that the layers of a stack share."""
        raise NotImplementedError(f"{type(self).__name__} must define parameters(sizes)")


class MultiHead(Attention):
    """softmax(Q K^T * scale) V in `n_heads` heads (Vaswani 2017, section 3.2).

    Fewer key-value heads make grouped-query (Ainslie 2023) or, with one, multi-query attention (Shazeer 2019): query
    head h reads key-value head h // (n_heads / n_kv_heads). n_heads * head_dim need not equal d_model.
    """

    kind: Literal["multi-head"] = "multi-head"
    head_dim: Positive
    n_kv_heads: Positive | None = None
    """Key-value heads; by default as many as query heads."""
    qkv_bias: bool = False
    o_bias: bool = False
    clip: PositiveFloat | None = None
    """Queries, keys and values as they leave their projections are held between -clip and clip (MPT, DBRX)."""
    qk_norm: Norm = NoNorm()
    """Applied to each head's query and key before positions (Henry 2020)."""
    softcap: PositiveFloat | None = None
    """Scores become softcap * tanh(score / softcap) before the mask (Gemma 2)."""
    sinks: bool = False
    """A learned score per head that joins each softmax and gives its weight to nothing (gpt-oss)."""
    log_n: Positive | None = None
    """Queries beyond this trained length n are multiplied by log(position + 1) / log(n) (Su 2021; Qwen)."""
    global_projections: bool = False
    """Longformer: global tokens have query, key and value projections of their own."""

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def query_dim(self) -> int:
        return self.head_dim

    def streams(self) -> dict[str, tuple[int, int]]:
        names = ("k", "v", "k_global", "v_global") if self.global_projections else ("k", "v")
        return dict.fromkeys(names, (self.kv_heads, self.head_dim))

    def problems(self) -> Iterator[Problem]:
        if self.n_heads % self.kv_heads:
            yield "n_kv_heads", f"must divide n_heads ({self.n_heads}), got {self.kv_heads}"
        yield from _position_problems(self.positions, self.head_dim, self.pattern)
        if self.global_projections and "is_global" not in self.pattern.fields:
            yield (
                "global_projections",
                f"needs a pattern with global tokens, such as 'longformer', not {self.pattern.kind!r}",
            )
        if self.log_n == 1:
            yield "log_n", "must be at least 2, since it divides by its logarithm"

    def parameters(self, sizes: Sizes) -> Table:
        d, q, kv = sizes.d_model, self.n_heads * self.head_dim, self.kv_heads * self.head_dim
        table = under("q_proj", linear(d, q, "query", bias=self.qkv_bias, heads=self.n_heads))
        table |= under("k_proj", linear(d, kv, "key", bias=self.qkv_bias, heads=self.kv_heads))
        table |= under("v_proj", linear(d, kv, "value", bias=self.qkv_bias, heads=self.kv_heads))
        if self.global_projections:
            table |= under("q_global_proj", linear(d, q, "query", bias=self.qkv_bias, heads=self.n_heads))
            table |= under("k_global_proj", linear(d, kv, "key", bias=self.qkv_bias, heads=self.kv_heads))
            table |= under("v_global_proj", linear(d, kv, "value", bias=self.qkv_bias, heads=self.kv_heads))
        table |= under("o_proj", linear(q, d, "attention_output", bias=self.o_bias))
        table |= under("q_norm", self.qk_norm.parameters(self.head_dim))
        table |= under("k_norm", self.qk_norm.parameters(self.head_dim))
        if self.sinks:
            table["sinks"] = Parameter((self.n_heads,), "zeros")
        return table | _own_positions(self.positions, sizes, self.n_heads, self.head_dim)


class Latent(Attention):
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1): keys and values rebuilt from one small vector.

    A token stores a latent of `kv_rank` and one rotary key of `rope_dim` that all heads share. Each head's query and
    key have `nope_dim` elements without positions and `rope_dim` turned ones; values have `v_head_dim`.
    """

    kind: Literal["latent"] = "latent"
    q_rank: Positive | None = None
    """Width of the query's own latent; None projects queries directly (V2-Lite)."""
    kv_rank: Positive
    nope_dim: Positive
    rope_dim: Positive
    v_head_dim: Positive
    norm: Norm = RMSNorm(eps=1e-6)
    """Applied to both latents."""

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def streams(self) -> dict[str, tuple[int, int]]:
        return {"latent": (1, self.kv_rank), "rope": (1, self.rope_dim)}

    def problems(self) -> Iterator[Problem]:
        if not isinstance(self.positions, Rotary):
            yield (
                "positions",
                f"latent attention turns its rope_dim elements: use 'rotary', not {self.positions.kind!r}",
            )
            return
        yield from _position_problems(self.positions, self.rope_dim, self.pattern)

    def parameters(self, sizes: Sizes) -> Table:
        d, heads, queries = sizes.d_model, self.n_heads, self.n_heads * self.query_dim
        if self.q_rank is None:
            table = under("q_proj", linear(d, queries, "query", bias=False, heads=heads))
        else:
            table = under("q_down_proj", linear(d, self.q_rank, "query", bias=False))
            table |= under("q_norm", self.norm.parameters(self.q_rank))
            table |= under("q_up_proj", linear(self.q_rank, queries, "query", bias=False, heads=heads))
        table |= under("kv_down_proj", linear(d, self.kv_rank + self.rope_dim, "key", bias=False))
        table |= under("kv_norm", self.norm.parameters(self.kv_rank))
        rebuilt = heads * (self.nope_dim + self.v_head_dim)
        table |= under("kv_up_proj", linear(self.kv_rank, rebuilt, "key", bias=False, heads=heads))
        return table | under("o_proj", linear(heads * self.v_head_dim, d, "attention_output", bias=False))


Attention.members = (MultiHead, Latent)


def _position_problems(positions: Positions, width: int, pattern: Pattern) -> Iterator[Problem]:
    if "attention" not in positions.places:
        yield "positions", f"{positions.kind!r} is added to embeddings: set it at embedding.positions, and 'none' here"
    if isinstance(positions, Rotary):
        yield from ((f"positions.{path}", what) for path, what in positions.misfits(width))
    if positions.kind == "transformer-xl" and pattern.reach().ahead != 0:
        yield "positions", f"'transformer-xl' knows distances to the past only: not with pattern {pattern.kind!r}"


def _own_positions(positions: Positions, sizes: Sizes, n_heads: int, head_dim: int) -> Table:
    if positions.shared:
        return {}
    full = Sizes(sizes.d_model, sizes.max_seq_len, n_heads, head_dim)
    return under("positions", positions.parameters(full))
