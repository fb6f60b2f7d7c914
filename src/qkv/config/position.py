"""Positions: how a model knows where a token stands.

One union, three hooks. A scheme acts on the embeddings (`sinusoidal`, `learned`), on queries and keys (`rotary`), or
on the scores (`alibi`, `t5-buckets`, `shaw`, `transformer-xl`); `none` acts nowhere. The first kind stands at
`embedding.positions`, the others at `attention.positions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from qkv.config.base import NonNegative, Positive, PositiveFloat, Problem, Tuple, Variant
from qkv.config.parameter import Parameter, Sizes, Table, under

Place = Literal["embedding", "attention"]


class Positions(Variant):
    """The union of position schemes."""

    places: ClassVar[tuple[Place, ...]]
    """Where the scheme may stand."""

    shared: bool = False
    """Whether the layers of a stack share one set of the scheme's tensors."""

    def parameters(self, sizes: Sizes) -> Table:
        """The scheme's own tensors."""
        return {}


class NoPositions(Positions):
    """No position information; a causal mask alone still lets two layers see order (Kazemnejad 2023, NoPE)."""

    kind: Literal["none"] = "none"
    shared: Literal[False] = False
    places = ("embedding", "attention")


class Sinusoidal(Positions):
    """PE(p, 2i) = sin(p / theta^(2i/d)), PE(p, 2i+1) = cos(same), added to embeddings (Vaswani 2017, section 3.5)."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    shared: Literal[False] = False
    theta: PositiveFloat = 10_000.0
    layout: Literal["pairs", "halves"] = "pairs"
    """`pairs`: sine and cosine alternate, as in the paper; `halves`: all sines, then all cosines, as in its code."""
    places = ("embedding",)


class Learned(Positions):
    """A table with one row per position, added to embeddings (Gehring 2017; GPT, BERT).

    The table has `max_seq_len + offset` rows; position p reads row p + offset (RoBERTa and BART: offset 2).
    """

    kind: Literal["learned"] = "learned"
    shared: Literal[False] = False
    offset: NonNegative = 0
    places = ("embedding",)

    def parameters(self, sizes: Sizes) -> Table:
        return {"weight": Parameter((sizes.max_seq_len + self.offset, sizes.d_model), "position_embedding")}


class RotaryScaling(Variant):
    """The union of rules that stretch rotary angles beyond the trained length."""

    reads_length: ClassVar[bool] = False
    """Whether the angles depend on the length of the row, so that what was stored for a shorter one may be wrong."""

    def regime(self, length: int) -> int:
        """Rows of one regime are turned by the same angles: a number that says which a row of `length` tokens is in."""
        return 0


class NoScaling(RotaryScaling):
    """Angles as trained."""

    kind: Literal["none"] = "none"


class LinearScaling(RotaryScaling):
    """Position interpolation: every frequency divided by `factor` (Chen 2023, arXiv 2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


class NtkScaling(RotaryScaling):
    """NTK-aware: theta' = theta * factor^(d/(d-2)): only the slowest pair is fully interpolated (bloc97 2023)."""

    kind: Literal["ntk"] = "ntk"
    factor: PositiveFloat


class DynamicNtkScaling(RotaryScaling):
    """NTK-aware with a factor that grows with the length L of the row (emozilla 2023).

    For L > L0 (`original_max_seq_len`): theta' = theta * (s*L/L0 - (s-1))^(d/(d-2)) with s = `factor`; else theta.
    """

    kind: Literal["dynamic-ntk"] = "dynamic-ntk"
    reads_length = True
    factor: PositiveFloat
    original_max_seq_len: Positive

    def regime(self, length: int) -> int:
        return length if length > self.original_max_seq_len else 0


class QwenDynamicScaling(RotaryScaling):
    """Qwen's dynamic NTK: theta' = theta * a^(d/(d-2)) with a = max(2^ceil(log2(L/L0) + 1) - 1, 1) (Qwen 2023)."""

    kind: Literal["qwen-dynamic"] = "qwen-dynamic"
    reads_length = True
    original_max_seq_len: Positive

    def regime(self, length: int) -> int:
        return max(0, math.ceil(math.log2(max(length, 1) / self.original_max_seq_len)))


class YarnScaling(RotaryScaling):
    """YaRN (Peng 2023, arXiv 2309.00071): fast pairs as trained, slow pairs interpolated, a linear ramp between.

    The ramp runs over pair indices from the pair with `beta_fast` turns inside L0 to the one with `beta_slow`; cos and
    sin are multiplied by `attention_factor`, by default m(factor, mscale) / m(factor, mscale_all_dim) where
    m(s, c) = 0.1 c ln s + 1 (and 1 in the denominator when `mscale_all_dim` is 0).
    """

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1)
    original_max_seq_len: Positive
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: PositiveFloat = 1.0
    mscale_all_dim: float = Field(default=0.0, ge=0)
    attention_factor: PositiveFloat | None = None
    truncate: bool = True
    """Whether the ramp's ends are rounded to whole pairs (down and up)."""

    def problems(self) -> Iterator[Problem]:
        if self.beta_fast <= self.beta_slow:
            yield "beta_fast", f"must exceed beta_slow ({self.beta_slow}), got {self.beta_fast}"


class Llama3Scaling(RotaryScaling):
    """Llama 3.1's rule by wavelength w = 2 pi / frequency (Llama team 2024, arXiv 2407.21783).

    w < L0/`high_freq_factor`: unchanged; w > L0/`low_freq_factor`: divided by `factor`; between: blended linearly in
    L0/w.
    """

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: Positive = 8192

    def problems(self) -> Iterator[Problem]:
        if self.high_freq_factor <= self.low_freq_factor:
            yield (
                "high_freq_factor",
                f"must exceed low_freq_factor ({self.low_freq_factor}), got {self.high_freq_factor}",
            )


class LongRopeScaling(RotaryScaling):
    """LongRoPE (Ding 2024, arXiv 2402.13753): each pair's frequency divided by its own searched factor.

    Rows longer than L0 use `long_factor`, others `short_factor`; cos and sin are multiplied by `attention_factor`, by
    default sqrt(1 + ln(factor) / ln(L0)), where `factor` is the extended length over L0.
    """

    kind: Literal["longrope"] = "longrope"
    reads_length = True
    short_factor: Tuple[PositiveFloat]
    long_factor: Tuple[PositiveFloat]
    factor: PositiveFloat
    original_max_seq_len: Positive
    attention_factor: PositiveFloat | None = None

    def regime(self, length: int) -> int:
        return int(length > self.original_max_seq_len)

    def problems(self) -> Iterator[Problem]:
        if len(self.short_factor) != len(self.long_factor):
            yield "long_factor", f"needs {len(self.short_factor)} values like short_factor, got {len(self.long_factor)}"
        if self.attention_factor is None and self.factor < 1:
            yield "factor", f"must be at least 1 unless attention_factor is given, got {self.factor}"
        if self.attention_factor is None and self.original_max_seq_len == 1:
            yield "original_max_seq_len", "must be at least 2 unless attention_factor is given: its logarithm divides"


RotaryScaling.members = (
    NoScaling,
    LinearScaling,
    NtkScaling,
    DynamicNtkScaling,
    QwenDynamicScaling,
    YarnScaling,
    Llama3Scaling,
    LongRopeScaling,
)


class Rotary(Positions):
    """Each pair of a query or key turned by position * theta^(-2i/d) (Su 2021, RoFormer, equation 15)."""

    kind: Literal["rotary"] = "rotary"
    shared: Literal[False] = False
    theta: float = Field(default=10_000.0, gt=1)
    fraction: float = Field(default=1.0, gt=0, le=1)
    """The part of each head that turns, from its start (GPT-NeoX 0.25, ChatGLM 0.5)."""
    layout: Literal["halves", "pairs"] = "halves"
    """Which elements form pair i: i and i + d/2 (`halves`: Llama in Hugging Face's order), or 2i, 2i + 1 (`pairs`)."""
    scaling: RotaryScaling = NoScaling()
    places = ("attention",)

    def width(self, head_dim: int) -> int:
        """How many elements of each head turn."""
        return round(head_dim * self.fraction)

    def misfits(self, head_dim: int) -> Iterator[Problem]:
        """What does not fit a head of this width."""
        width = self.width(head_dim)
        if width % 2 or not width:
            yield "fraction", f"turns {width} of {head_dim} elements, but pairs need a positive even number"
        scaling = self.scaling
        if width == 2 and isinstance(scaling, NtkScaling | DynamicNtkScaling | QwenDynamicScaling):
            yield "scaling", f"{scaling.kind!r} has the exponent d/(d-2): it needs more than 2 turned elements"
        if isinstance(scaling, LongRopeScaling) and len(scaling.short_factor) != width // 2:
            yield "scaling.short_factor", f"needs one value per pair ({width // 2}), got {len(scaling.short_factor)}"


class Alibi(Positions):
    """score(q, k) -= slope_h * |q - k| with slope_h = 2^(-max_bias * (h+1) / H) (Press 2021, arXiv 2108.12409).

    For H heads that are not a power of two: the slopes of the power P below H, then every other slope of 2P.
    """

    kind: Literal["alibi"] = "alibi"
    shared: Literal[False] = False
    max_bias: PositiveFloat = 8.0
    scaled: bool = False
    """Whether the bias is multiplied by the attention's scale, as q . k is (Falcon-RW)."""
    rounded: bool = False
    """Whether positions, slopes and their products are bfloat16 numbers, whatever type the model has (Falcon-RW's
    code): the bias is -|r(slope * q) - r(slope * k)|, with r the rounding."""
    places = ("attention",)


class T5Buckets(Positions):
    """A learned bias per head and bucket of the distance k - q (Raffel 2020, T5, section 2.1).

    Half of the buckets hold one distance each, the other half grow logarithmically up to `max_distance`;
    `bidirectional` gives one half of all buckets to keys after the query.
    """

    kind: Literal["t5-buckets"] = "t5-buckets"
    shared: bool = True
    n_buckets: Positive = 32
    max_distance: Positive = 128
    bidirectional: bool
    places = ("attention",)

    def problems(self) -> Iterator[Problem]:
        exact = self.n_buckets // (4 if self.bidirectional else 2)
        if not exact or self.n_buckets % (4 if self.bidirectional else 2):
            yield "n_buckets", f"must be a multiple of {4 if self.bidirectional else 2}, got {self.n_buckets}"
        elif self.max_distance <= exact:
            yield "max_distance", f"must exceed the {exact} exact distances, got {self.max_distance}"

    def parameters(self, sizes: Sizes) -> Table:
        return {"weight": Parameter((self.n_buckets, sizes.n_heads), "relative_embedding", inputs=sizes.d_model)}


class Shaw(Positions):
    """Learned vectors for the clipped distance c = clip(k - q, -max_distance, max_distance) (Shaw 2018, eq. 3 and 4).

    score = q . (key + a_c) * scale and output = sum weight * (value + b_c); tables a and b are shared by the heads.
    """

    kind: Literal["shaw"] = "shaw"
    shared: bool = False
    max_distance: Positive
    values: bool = True
    """Whether values carry positions too; the paper found keys alone to be enough."""
    places = ("attention",)

    def parameters(self, sizes: Sizes) -> Table:
        row = Parameter((2 * self.max_distance + 1, sizes.head_dim), "relative_embedding")
        return {"key": row} | ({"value": row} if self.values else {})


class TransformerXL(Positions):
    """score = ((q + u) . k + (q + v) . W r_(q-k)) * scale with a sinusoid r of the distance (Dai 2019, section 3.3).

    The sinusoid has all sines first, then all cosines; distances above `clamp` count as `clamp`.
    """

    kind: Literal["transformer-xl"] = "transformer-xl"
    shared: Literal[False] = False
    theta: PositiveFloat = 10_000.0
    clamp: Positive | None = None
    places = ("attention",)

    def parameters(self, sizes: Sizes) -> Table:
        heads = Parameter((sizes.n_heads, sizes.head_dim), "relative_embedding")
        proj = {"weight": Parameter((sizes.n_heads * sizes.head_dim, sizes.d_model), "key", sizes.n_heads)}
        return {"u": heads, "v": heads} | under("r_proj", proj)


Positions.members = (NoPositions, Sinusoidal, Learned, Rotary, Alibi, T5Buckets, Shaw, TransformerXL)
