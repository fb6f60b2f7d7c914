"""Attention modules: projections around `attend`.

    attention(x) = o_proj( softmax(q k^T * scale + bias) v ),   q, k, v = projections of x, split into heads

`forward(x, source, ctx)`: queries from `x` (B, T, D), keys and values from `source` (B, S, D), which is `x` itself in
self-attention and the encoder's output in cross-attention.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import config as c
from qkv.nn.backends import Relative, Scoring, attend, attention_weights
from qkv.nn.context import AttentionPlan, Context
from qkv.nn.position import Rotary, Scheme
from qkv.nn.registry import implements, make


class AttentionModule(nn.Module):
    """What all mechanisms share: which pattern and position scheme they use, and how q, k, v become an output.

    `pattern_key` and `positions_key` number the distinct patterns and schemes of the stack, and `name` is what a cache
    calls this attention; the stack sets them.
    A scheme whose tensors the layers share belongs to the stack: `positions` is None here, and the context has it.
    """

    def __init__(self, config: c.Attention, head_sizes: c.Sizes) -> None:
        super().__init__()
        self.pattern, self.scale, self.dropout = config.pattern, config.score_scale, config.dropout
        self.pattern_key = self.positions_key = 0
        self.name = ""
        self.positions = None if config.positions.shared else make(config.positions, head_sizes)

    def scheme(self, ctx: Context) -> tuple[Scheme, Any]:
        """The position scheme and what it computed for this forward."""
        scheme = self.positions if self.positions is not None else ctx.shared[self.positions_key]
        return scheme, ctx.table(self.positions_key, scheme)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, scoring: Scoring) -> Float[Tensor, "B H T Fv"]:
        """Values mixed by the scores of q and k, with what the position scheme adds."""
        scoring = self.relative(q, k, ctx, scoring)
        return self.attend(q, k, v, ctx, ctx.plan(self.pattern_key, self.pattern), scoring)

    def relative(self, q: Tensor, k: Tensor, ctx: Context, scoring: Scoring) -> Scoring:
        """`scoring` with what the position scheme adds to scores and sums, and dropout in training."""
        scheme, table = self.scheme(ctx)
        bias = scheme.bias(q, k, table, self.scale)
        return replace(
            scoring,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
            values=(lambda weights: scheme.values(weights, table)) if scheme.uses_weights else None,
            relative=None if bias is None or torch.compiler.is_compiling() else self._towards(scheme, ctx),
        )

    def _towards(self, scheme: Scheme, ctx: Context) -> Relative:
        """The scheme's bias between any tokens."""

        def at(q: Tensor, k: Tensor, query: c.Coordinates, key: c.Coordinates) -> Tensor:
            bias = scheme.bias(q, k, scheme.table(ctx.between(query, key)), self.scale)
            assert bias is not None
            return bias

        return Relative(at, tuple(scheme.parameters()))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, plan: AttentionPlan, scoring: Scoring
    ) -> Float[Tensor, "B H T Fv"]:
        """`attend`, watched."""
        if ctx.trace is not None:
            for point, value in (("q", q), ("k", k), ("v", v)):
                ctx.tap(self, point, value)
            ctx.trace.record(self, "weights", lambda: attention_weights(q, k, plan, scoring))
        return attend(q, k, v, plan, scoring)


@implements(c.MultiHead)
class MultiHead(AttentionModule):
    """Vaswani 2017, section 3.2; with fewer key-value heads, Shazeer 2019 and Ainslie 2023."""

    def __init__(self, config: c.MultiHead, sizes: c.Sizes) -> None:
        heads, kv_heads, head_dim = config.n_heads, config.kv_heads, config.head_dim
        super().__init__(config, c.Sizes(sizes.d_model, sizes.max_seq_len, heads, head_dim))
        self.n_heads, self.kv_heads = heads, kv_heads
        self.softcap, self.log_n, self.clip = config.softcap, config.log_n, config.clip
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
        if config.global_projections:
            names += ("q_global_proj", "k_global_proj", "v_global_proj")
        for name in names:
            width = head_dim * (heads if name[0] == "q" else kv_heads)
            self.add_module(name, nn.Linear(sizes.d_model, width, bias=config.qkv_bias))
        self.o_proj = nn.Linear(heads * head_dim, sizes.d_model, bias=config.o_bias)
        self.q_norm, self.k_norm = make(config.qk_norm, head_dim), make(config.qk_norm, head_dim)
        self.sinks = nn.Parameter(torch.empty(heads)) if config.sinks else None
        self.global_projections = config.global_projections

    def forward(
        self, x: Float[Tensor, "B T D"], source: Float[Tensor, "B S D"] | None, ctx: Context
    ) -> Float[Tensor, "B T D"]:
        ctx = ctx.seen_from(self.name)
        scoring = Scoring(self.scale, softcap=self.softcap, sinks=self.sinks)
        q = self.queries(x, ctx, "")
        k, v = self.keys_and_values(source, ctx, "")
        out = self.mix(q, k, v, ctx, scoring)
        if self.global_projections:
            out = self._global(x, source, out, ctx, scoring)
        return self.o_proj(ctx.tap(self, "context", join(out)))

    def queries(self, x: Float[Tensor, "B T D"], ctx: Context, kind: str) -> Float[Tensor, "B H T F"]:
        """Queries in heads, with positions, through the projection q{kind}_proj."""
        q = self.q_norm(split(self._projected(f"q{kind}_proj", x), self.n_heads))
        if self.log_n is not None:
            growth = (ctx.query.position.double() + 1).clamp(min=1).log() / math.log(self.log_n)
            q = q * growth.clamp(min=1)[:, None, :, None].to(q.dtype)
        scheme, table = self.scheme(ctx)
        return scheme.turn(q, table)

    def keys_and_values(
        self, source: Float[Tensor, "B S D"] | None, ctx: Context, kind: str
    ) -> tuple[Float[Tensor, "B G K F"], Float[Tensor, "B G K F"]]:
        """Keys, with positions, and values in heads: the source's, and what a cache has (all, if source is None)."""

        def new() -> dict[str, Tensor]:
            assert source is not None
            scheme, table = self.scheme(ctx.of_keys)
            k = self.k_norm(split(self._projected(f"k{kind}_proj", source), self.kv_heads))
            v = split(self._projected(f"v{kind}_proj", source), self.kv_heads)
            return {f"k{kind}": scheme.turn(k, table), f"v{kind}": v}

        seen = ctx.remember(self.name, new)
        return seen[f"k{kind}"], seen[f"v{kind}"]

    def _projected(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = getattr(self, name)(x)
        return out if self.clip is None else out.clamp(-self.clip, self.clip)

    def _global(self, x: Tensor, source: Tensor | None, out: Tensor, ctx: Context, scoring: Scoring) -> Tensor:
        """Rows of global tokens replaced by attention to every key through projections of their own (Beltagy 2020)."""
        rows = ctx.global_rows  # (B, n) indices of the global tokens, padded with other rows
        if rows is None and ctx.memory is None:
            return out
        k, v = self.keys_and_values(source, ctx, "_global")  # a cache needs them for global tokens to come
        if rows is None:
            return out
        q = self.queries(x, ctx, "_global")
        picked = rows[:, None, :, None].expand(-1, self.n_heads, -1, q.shape[-1])
        own, q = ctx.at_rows(rows), q.gather(2, picked)
        scoring = self.relative(q, k, own, scoring)
        everywhere = attend(q, k, v, own.plan(self.pattern_key, self.pattern), scoring)
        is_global = ctx.query.is_global.gather(1, rows)[:, None, :, None]
        kept = torch.where(is_global, everywhere, out.gather(2, picked))
        return out.scatter(2, picked, kept)


@implements(c.Latent)
class Latent(AttentionModule):
    """DeepSeek-V2, section 2.1: keys and values rebuilt from a latent of `kv_rank`; one turned key for all heads."""

    def __init__(self, config: c.Latent, sizes: c.Sizes) -> None:
        super().__init__(config, c.Sizes(sizes.d_model, sizes.max_seq_len, config.n_heads, config.rope_dim))
        d, heads = sizes.d_model, config.n_heads
        self.n_heads, self.nope_dim, self.rope_dim = heads, config.nope_dim, config.rope_dim
        self.kv_rank = config.kv_rank
        if config.q_rank is None:
            self.q_proj = nn.Linear(d, heads * config.query_dim, bias=False)
        else:
            self.q_down_proj = nn.Linear(d, config.q_rank, bias=False)
            self.q_norm = make(config.norm, config.q_rank)
            self.q_up_proj = nn.Linear(config.q_rank, heads * config.query_dim, bias=False)
        self.q_rank = config.q_rank
        self.kv_down_proj = nn.Linear(d, config.kv_rank + config.rope_dim, bias=False)
        self.kv_norm = make(config.norm, config.kv_rank)
        self.kv_up_proj = nn.Linear(config.kv_rank, heads * (config.nope_dim + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, d, bias=False)

    def forward(
        self, x: Float[Tensor, "B T D"], source: Float[Tensor, "B S D"], ctx: Context
    ) -> Float[Tensor, "B T D"]:
        ctx = ctx.seen_from(self.name)
        rotary, table = self.scheme(ctx)
        assert isinstance(rotary, Rotary)
        flat = self.q_proj(x) if self.q_rank is None else self.q_up_proj(self.q_norm(self.q_down_proj(x)))
        q_nope, q_rope = split(flat, self.n_heads).split((self.nope_dim, self.rope_dim), -1)
        q_rope = rotary.turn(q_rope, table)

        def new() -> dict[str, Tensor]:
            latent, rope = self.kv_down_proj(source).split((self.kv_rank, self.rope_dim), -1)
            _, where = self.scheme(ctx.of_keys)
            return {"latent": self.kv_norm(latent)[:, None], "rope": rotary.turn(rope[:, None], where)}

        seen = ctx.remember(self.name, new)
        look = self._rebuilt if ctx.key is ctx.query else self._absorbed
        out = look(q_nope, q_rope, seen["latent"], seen["rope"], ctx)
        return self.o_proj(ctx.tap(self, "context", join(out)))

    def _rebuilt(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, ctx: Context) -> Tensor:
        """Every head's keys and values from the latents: the cheaper way for many queries."""
        heads = split(self.kv_up_proj(latent[:, 0]), self.n_heads)
        k_nope, v = heads.split((self.nope_dim, heads.shape[-1] - self.nope_dim), -1)
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, rope.expand(-1, self.n_heads, -1, -1)), -1)
        return self.mix(q, k, v, ctx, Scoring(self.scale))

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, ctx: Context) -> Tensor:
        """Scores and sums among the stored latents, which all heads share, so that a step rebuilds nothing of the past.

        q . (U c) = (U^T q) . c, and U leaves the sum of values likewise (DeepSeek-V2 2024, section 2.1.2).
        """
        up = self.kv_up_proj.weight.unflatten(0, (self.n_heads, -1))  # (H, nope + v, rank)
        key_up, value_up = up.split((self.nope_dim, up.shape[1] - self.nope_dim), 1)
        q = torch.cat((q_nope @ key_up, q_rope), -1)
        mixed = self.mix(q, torch.cat((latent, rope), -1), latent, ctx, Scoring(self.scale))
        return mixed @ value_up.transpose(-1, -2)


def split(x: Float[Tensor, "B T HF"], heads: int) -> Float[Tensor, "B H T F"]:
    """Separate the heads."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def join(x: Float[Tensor, "B H T F"]) -> Float[Tensor, "B T HF"]:
    """Put the heads side by side."""
    return x.transpose(1, 2).flatten(-2)
