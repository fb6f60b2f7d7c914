"""Position schemes, one module per member, with five hooks that all default to nothing.

- `embed(position)`: what is added to embeddings, (B, T, D).
- `table(ctx)`: what a forward computes once for all layers of equal scheme (cosines, distances, a bias).
- `turn(x, table)`: rotates queries or keys.
- `bias(q, k, table, scale)`: what joins the scaled scores, broadcastable to (B, H, Q, K).
- `values(weights, table)`: what joins the output, (B, H, Q, F).

Angles are computed in float64 from integer positions and rounded once: bfloat16 cannot even hold position 257.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qkv import config as c
from qkv.errors import DataError
from qkv.nn.context import Context
from qkv.nn.gradient import differentiated
from qkv.nn.registry import implementation, implements


class Scheme(nn.Module):
    """The hooks. `config` is the member; `sizes` the widths around it."""

    uses_weights = False
    """Whether `values` needs the attention weights, which only the eager backend has."""

    def __init__(self, config: c.Positions, sizes: c.Sizes) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes

    def check(self, length: int) -> None:
        """Refuse a row of `length` tokens that the scheme has no positions for."""

    def embed(self, position: Int[Tensor, "B T"], dtype: torch.dtype) -> Tensor | None:
        return None

    def table(self, ctx: Context) -> Any:
        return None

    def turn(self, x: Tensor, table: Any) -> Tensor:
        return x

    def bias(self, q: Tensor, k: Tensor, table: Any, scale: float) -> Tensor | None:
        return None

    def values(self, weights: Tensor, table: Any) -> Tensor | None:
        return None


@implements(c.NoPositions)
class NoPositions(Scheme):
    """Nothing at all."""


@implements(c.Sinusoidal)
class Sinusoidal(Scheme):
    """Sines and cosines of position / theta^(2i/d) (Vaswani 2017, section 3.5)."""

    config: c.Sinusoidal

    def embed(self, position: Int[Tensor, "B T"], dtype: torch.dtype) -> Float[Tensor, "B T D"]:
        wave = sinusoid(position, self.sizes.d_model, self.config.theta, self.config.layout == "pairs")
        return wave.to(dtype)


@implements(c.Learned)
class Learned(Scheme):
    """One row per position."""

    config: c.Learned

    def __init__(self, config: c.Learned, sizes: c.Sizes) -> None:
        super().__init__(config, sizes)
        self.weight = nn.Parameter(torch.empty(sizes.max_seq_len + config.offset, sizes.d_model))

    def check(self, length: int) -> None:
        if length > self.sizes.max_seq_len:
            raise DataError(
                f"positions: {length} tokens, but the model has learned {self.sizes.max_seq_len}; shorten the input"
            )

    def embed(self, position: Int[Tensor, "B T"], dtype: torch.dtype) -> Float[Tensor, "B T D"]:
        return F.embedding(position.clamp(min=0) + self.config.offset, self.weight)


@implements(c.Rotary)
class Rotary(Scheme):
    """Pairs of elements turned by position * frequency (Su 2021, equation 15)."""

    config: c.Rotary

    def __init__(self, config: c.Rotary, sizes: c.Sizes) -> None:
        super().__init__(config, sizes)
        self.width = config.width(sizes.head_dim)
        self.rule = implementation(type(config.scaling))

    def table(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B or 1, 1, T, width): both elements of a pair have the same."""
        position = ctx.query.position
        pair = torch.arange(0, self.width, 2, dtype=torch.float64, device=position.device) / self.width
        frequency, factor = self.rule(self.config.scaling, self.config.theta, pair, ctx.query.length)
        angle = position[..., None].double() * frequency
        waves = (angle.cos() * factor)[:, None], (angle.sin() * factor)[:, None]
        cos, sin = (self._both(x).to(ctx.dtype) for x in waves)
        return cos, sin

    def _both(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), -1) if self.config.layout == "halves" else x.repeat_interleave(2, -1)

    def turn(self, x: Float[Tensor, "B H T F"], table: tuple[Tensor, Tensor]) -> Float[Tensor, "B H T F"]:
        """The first `width` elements turned, the rest as they are."""
        cos, sin = (t.to(x.dtype) for t in table)
        if self.width == x.shape[-1]:
            return turned(x, cos, sin, self.config.layout == "halves")
        first, rest = x.split((self.width, x.shape[-1] - self.width), -1)
        return torch.cat((turned(first, cos, sin, self.config.layout == "halves"), rest), -1)


def turned(x: Float[Tensor, "B H T F"], cos: Tensor, sin: Tensor, halves: bool) -> Float[Tensor, "B H T F"]:
    """Each pair (a, b) as (a cos - b sin, b cos + a sin)."""
    if differentiated(x):
        result: Tensor = _Turned.apply(x, cos, sin, halves)
        return result
    return x * cos + _quarter(x, halves) * sin


def _quarter(x: Tensor, halves: bool) -> Tensor:
    """Each pair turned by 90 degrees: (-b, a)."""
    if halves:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


class _Turned(torch.autograd.Function):
    """The same; the gradient is turned back. Half the time of differentiating the formula operation by operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
        ctx.halves = halves
        ctx.save_for_backward(cos, sin)
        return _quarter(x, halves).mul_(sin).add_(x * cos)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.addcmul(_quarter(g, ctx.halves).mul_(-sin), g, cos), None, None, None


@implements(c.Alibi)
class Alibi(Scheme):
    """-slope * distance (Press 2021)."""

    config: c.Alibi

    def table(self, ctx: Context) -> Float[Tensor, "B H Q K"]:
        slopes = alibi_slopes(self.sizes.n_heads, self.config.max_bias).to(ctx.query.position.device)
        if not self.config.rounded:
            return (-slopes[:, None, None] * _distance(ctx).abs()[:, None]).to(ctx.dtype)
        query, key = (slopes.bfloat16()[:, None] * at.position[:, None].bfloat16() for at in (ctx.query, ctx.key))
        return -(query.double()[..., :, None] - key.double()[..., None, :]).abs().to(ctx.dtype)

    def bias(self, q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tensor:
        return table.to(q.dtype) * scale if self.config.scaled else table.to(q.dtype)


@implements(c.T5Buckets)
class T5Buckets(Scheme):
    """A learned bias per head and bucket of the distance (Raffel 2020)."""

    config: c.T5Buckets

    def __init__(self, config: c.T5Buckets, sizes: c.Sizes) -> None:
        super().__init__(config, sizes)
        self.weight = nn.Parameter(torch.empty(config.n_buckets, sizes.n_heads))

    def table(self, ctx: Context) -> Int[Tensor, "B Q K"] | Float[Tensor, "B H Q K"]:
        """The buckets; of layers that share this scheme their bias at once."""
        buckets = t5_bucket(-_distance(ctx), self.config)
        return self._bias(buckets) if self.config.shared else buckets

    def bias(self, q: Tensor, k: Tensor, table: Tensor, scale: float) -> Float[Tensor, "B H Q K"]:
        return table if self.config.shared else self._bias(table)

    def _bias(self, buckets: Int[Tensor, "B Q K"]) -> Float[Tensor, "B H Q K"]:
        return F.embedding(buckets, self.weight).permute(0, 3, 1, 2).contiguous()


@implements(c.Shaw)
class Shaw(Scheme):
    """Learned vectors for clipped distances, on keys and values (Shaw 2018)."""

    config: c.Shaw

    def __init__(self, config: c.Shaw, sizes: c.Sizes) -> None:
        super().__init__(config, sizes)
        rows = 2 * config.max_distance + 1
        self.key = nn.Parameter(torch.empty(rows, sizes.head_dim))
        self.value = nn.Parameter(torch.empty(rows, sizes.head_dim)) if config.values else None
        self.uses_weights = config.values

    def table(self, ctx: Context) -> Int[Tensor, "B 1 Q K"]:
        limit = self.config.max_distance
        return (-_distance(ctx)).clamp(-limit, limit).add(limit)[:, None]

    def bias(self, q: Tensor, k: Tensor, table: Tensor, scale: float) -> Float[Tensor, "B H Q K"]:
        by_row = q @ self.key.T * scale  # (B, H, Q, rows): each query meets each vector once
        return by_row.gather(-1, table.expand(*by_row.shape[:2], *table.shape[-2:]))

    def values(self, weights: Tensor, table: Tensor) -> Tensor | None:
        if self.value is None:
            return None
        by_row = weights.new_zeros(*weights.shape[:-1], self.value.shape[0])
        return by_row.scatter_add(-1, table.expand_as(weights), weights) @ self.value


@implements(c.TransformerXL)
class TransformerXL(Scheme):
    """Content and distance scored apart, each with a bias of its own (Dai 2019, section 3.3)."""

    config: c.TransformerXL

    def __init__(self, config: c.TransformerXL, sizes: c.Sizes) -> None:
        super().__init__(config, sizes)
        self.u = nn.Parameter(torch.empty(sizes.n_heads, sizes.head_dim))
        self.v = nn.Parameter(torch.empty(sizes.n_heads, sizes.head_dim))
        self.r_proj = nn.Linear(sizes.d_model, sizes.n_heads * sizes.head_dim, bias=False)

    def table(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """The sinusoids of all distances (R, D), and which of them each pair has (B or 1, 1, Q, K)."""
        distance = _distance(ctx).clamp(min=0)
        if self.config.clamp is not None:
            distance = distance.clamp(max=self.config.clamp)
        every = torch.arange(ctx.farthest, device=distance.device)
        distance = distance.clamp(max=ctx.farthest - 1)  # only a slot without a key is farther
        return sinusoid(every, self.sizes.d_model, self.config.theta, pairs=False), distance[:, None]

    def bias(self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor], scale: float) -> Float[Tensor, "B H Q K"]:
        wave, distance = table
        heads = self.r_proj(wave.to(q.dtype)).unflatten(-1, (q.shape[1], -1)).transpose(0, 1)  # (H, R, F)
        by_distance = (q + self.v[:, None]) @ heads.transpose(-1, -2)  # (B, H, Q, R)
        relative = by_distance.gather(-1, distance.expand(*q.shape[:2], *distance.shape[-2:]))
        content = self.u[:, None] @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)  # (B, H, 1, K)
        return (relative + content) * scale


def _distance(ctx: Context) -> Int[Tensor, "B Q K"]:
    """Query position - key position."""
    return ctx.query.position[..., :, None] - ctx.key.position[..., None, :]


def sinusoid(position: Tensor, width: int, theta: float, pairs: bool) -> Tensor:
    """(..., width) float64: sines and cosines of position * theta^(-2i/width), alternating or in halves."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=position.device) / width
    angle = position[..., None].double() * theta**-exponent
    waves = (angle.sin(), angle.cos())
    return torch.stack(waves, -1).flatten(-2) if pairs else torch.cat(waves, -1)


def alibi_slopes(n_heads: int, max_bias: float) -> Float[Tensor, " H"]:
    """2^(-max_bias (h+1)/P) for the P heads of the largest power of two; then every other slope of 2P."""
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-max_bias * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-max_bias * (2 * h + 1) / (2 * power)) for h in range(n_heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)


def t5_bucket(distance: Int[Tensor, "*shape"], config: c.T5Buckets) -> Int[Tensor, "*shape"]:
    """The bucket of each distance key - query."""
    buckets = config.n_buckets
    if config.bidirectional:
        buckets //= 2
        start, distance = (distance > 0) * buckets, distance.abs()
    else:
        start, distance = torch.zeros_like(distance), (-distance).clamp(min=0)
    exact = buckets // 2
    # float32 as in the published code: the bucket of a distance on a border depends on it.
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(config.max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return start + torch.where(distance < exact, distance, far)
