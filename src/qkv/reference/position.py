"""Positions: what each scheme adds to embeddings, turns, adds to scores, or adds to values. NumPy, float64.

A scheme is a class with five hooks; the base class does nothing in each of them, and a member overrides the one or two
that it is about. Shapes: q (T, H, F), k (S, H, F), attention weights (H, T, S); query and key are `Coordinates` whose
fields have shape (T,) and (S,).

    embed       (T, d_model), added to the token vectors          sinusoidal, learned
    turn        x -> x of the same shape, for q and for k         rotary
    relative    (H, T, S), added to q . k before the scale        shaw, transformer-xl
    bias        (H, T, S), added to the scores after the scale    alibi, t5-buckets
    values      (T, H, F), added to the weighted sum of values    shaw
"""

from __future__ import annotations

import math

import numpy as np

from qkv.config import (
    Alibi,
    Coordinates,
    DynamicNtkScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoPositions,
    NoScaling,
    NtkScaling,
    Positions,
    QwenDynamicScaling,
    Rotary,
    Shaw,
    Sinusoidal,
    T5Buckets,
    TransformerXL,
    YarnScaling,
)
from qkv.errors import DataError
from qkv.reference.ops import Array, Ints, Weights, below, linear
from qkv.reference.registry import function_of, register


class Scheme:
    """No position information: the base of all schemes, and the oracle of `none`."""

    def __init__(self, config: Positions, weights: Weights) -> None:
        self.weights = weights

    def embed(self, position: Ints, d_model: int) -> Array:
        """What is added to the token vectors: (T, d_model)."""
        return np.zeros((len(position), d_model))

    def turn(self, x: Array, at: Coordinates) -> Array:
        """Queries or keys (T, H, F), turned by where they stand."""
        return x

    def relative(self, q: Array, k: Array, query: Coordinates, key: Coordinates) -> Array:
        """What is added to q . k before the scale: (H, T, S)."""
        return np.zeros((q.shape[1], len(q), len(k)))

    def bias(self, n_heads: int, query: Coordinates, key: Coordinates) -> Array:
        """What is added to the scaled scores: (H, T, S)."""
        return np.zeros((n_heads, len(query.position), len(key.position)))

    def values(self, weights: Array, query: Coordinates, key: Coordinates, width: int) -> Array:
        """What is added to the mixed values, from the attention weights (H, T, S): (T, H, width)."""
        return np.zeros((weights.shape[1], weights.shape[0], width))


def scheme(config: Positions, weights: Weights) -> Scheme:
    """The scheme that `config` asks for, with its tensors."""
    made: Scheme = function_of(config)(config, weights)
    return made


class SinusoidalScheme(Scheme):
    """PE(p, 2i) = sin(p w_i), PE(p, 2i+1) = cos(p w_i), w_i = theta^(-2i/d); pair 0 is the fastest (Vaswani 2017)."""

    def __init__(self, config: Sinusoidal, weights: Weights) -> None:
        self.config = config

    def embed(self, position: Ints, d_model: int) -> Array:
        table = np.zeros((len(position), d_model))
        half = d_model // 2
        for t, p in enumerate(position):
            for i in range(half):
                angle = p * self.config.theta ** (-2 * i / d_model)
                sine, cosine = (2 * i, 2 * i + 1) if self.config.layout == "pairs" else (i, i + half)
                table[t, sine], table[t, cosine] = math.sin(angle), math.cos(angle)
        return table


class LearnedScheme(Scheme):
    """Row position + offset of a table (Gehring 2017)."""

    def __init__(self, config: Learned, weights: Weights) -> None:
        self.offset, self.table = config.offset, weights["weight"]

    def embed(self, position: Ints, d_model: int) -> Array:
        last = len(self.table) - self.offset - 1
        if position.max(initial=-1) > last:
            raise DataError(
                f"position {position.max()} lies beyond the learned table, which ends at {last}: "
                f"give shorter rows, or build the model with a larger max_seq_len"
            )
        return np.array([self.table[max(p, 0) + self.offset] for p in position])


class RotaryScheme(Scheme):
    """Pair i of a query or key turned by position * w_i radians, w_i = theta^(-2i/d) (Su 2021, equation 15)."""

    def __init__(self, config: Rotary, weights: Weights) -> None:
        self.config = config

    def turn(self, x: Array, at: Coordinates) -> Array:
        width = self.config.width(x.shape[-1])  # the other elements of the head stay
        turned = x.copy()
        for t in range(len(x)):
            frequencies, factor = rotary_frequencies(self.config, width, int(at.length[t]))
            for i, frequency in enumerate(frequencies):
                a, b = (i, i + width // 2) if self.config.layout == "halves" else (2 * i, 2 * i + 1)
                cos, sin = (factor * f(at.position[t] * frequency) for f in (math.cos, math.sin))
                turned[t, :, a] = x[t, :, a] * cos - x[t, :, b] * sin
                turned[t, :, b] = x[t, :, a] * sin + x[t, :, b] * cos
        return turned


def rotary_frequencies(config: Rotary, width: int, length: int) -> tuple[list[float], float]:
    """The frequency of each of width/2 pairs in a row of `length` positions, and the factor of cosine and sine."""
    found: tuple[list[float], float] = function_of(config.scaling)(config.scaling, config.theta, width, length)
    return found


def _frequencies(theta: float, width: int) -> list[float]:
    return [theta ** (-2 * i / width) for i in range(width // 2)]


def _stretched(theta: float, alpha: float, width: int) -> list[float]:
    """NTK-aware: a base so much larger that the slowest pair is slower by alpha, and pair 0 stays at frequency 1."""
    return _frequencies(theta * alpha ** (width / (width - 2)), width)


def _no_scaling(config: NoScaling, theta: float, width: int, length: int) -> tuple[list[float], float]:
    return _frequencies(theta, width), 1.0


def _linear(config: LinearScaling, theta: float, width: int, length: int) -> tuple[list[float], float]:
    return [w / config.factor for w in _frequencies(theta, width)], 1.0


def _ntk(config: NtkScaling, theta: float, width: int, length: int) -> tuple[list[float], float]:
    return _stretched(theta, config.factor, width), 1.0


def _dynamic_ntk(config: DynamicNtkScaling, theta: float, width: int, length: int) -> tuple[list[float], float]:
    if length <= config.original_max_seq_len:
        return _frequencies(theta, width), 1.0
    s = config.factor
    return _stretched(theta, s * length / config.original_max_seq_len - (s - 1), width), 1.0


def _qwen_dynamic(config: QwenDynamicScaling, theta: float, width: int, length: int) -> tuple[list[float], float]:
    doublings = math.ceil(math.log2(max(length, 1) / config.original_max_seq_len) + 1)
    return _stretched(theta, max(2.0**doublings - 1, 1.0), width), 1.0


def _yarn(config: YarnScaling, theta: float, width: int, length: int) -> tuple[list[float], float]:
    def pair_with(turns: float) -> float:
        """The pair, as a real number, that makes so many turns inside the original length."""
        return width * math.log(config.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = (min(max(end, 0), width - 1) for end in (low, high))
    if low == high:
        high += 0.001
    frequencies = []
    for i, w in enumerate(_frequencies(theta, width)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)  # 0: fast, as trained; 1: slow, interpolated
        frequencies.append(w / config.factor * ramp + w * (1 - ramp))
    return frequencies, config.attention_factor or _yarn_m(config, config.mscale) / _yarn_m(
        config, config.mscale_all_dim
    )


def _yarn_m(config: YarnScaling, mscale: float) -> float:
    return 0.1 * mscale * math.log(config.factor) + 1


def _llama3(config: Llama3Scaling, theta: float, width: int, length: int) -> tuple[list[float], float]:
    frequencies = []
    for w in _frequencies(theta, width):
        turns = config.original_max_seq_len * w / (2 * math.pi)  # L0 over the wavelength
        if turns > config.high_freq_factor:
            frequencies.append(w)
        elif turns < config.low_freq_factor:
            frequencies.append(w / config.factor)
        else:
            kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
            frequencies.append(kept * w + (1 - kept) * w / config.factor)
    return frequencies, 1.0


def _longrope(config: LongRopeScaling, theta: float, width: int, length: int) -> tuple[list[float], float]:
    factors = config.long_factor if length > config.original_max_seq_len else config.short_factor
    factor = config.attention_factor or math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_seq_len))
    return [w / f for w, f in zip(_frequencies(theta, width), factors, strict=True)], factor


class AlibiScheme(Scheme):
    """Scores fall by slope_h per position of distance (Press 2021)."""

    def __init__(self, config: Alibi, weights: Weights) -> None:
        self.config = config

    def relative(self, q: Array, k: Array, query: Coordinates, key: Coordinates) -> Array:
        if self.config.scaled:
            return self._falls(q.shape[1], query, key)
        return super().relative(q, k, query, key)

    def bias(self, n_heads: int, query: Coordinates, key: Coordinates) -> Array:
        if self.config.scaled:
            return super().bias(n_heads, query, key)
        return self._falls(n_heads, query, key)

    def _falls(self, n_heads: int, query: Coordinates, key: Coordinates) -> Array:
        falls = []
        for slope in alibi_slopes(n_heads, self.config.max_bias):
            heights = [[self._height(slope, int(p)) for p in at.position] for at in (query, key)]
            falls.append([[-abs(here - there) for there in heights[1]] for here in heights[0]])
        return np.array(falls).reshape(n_heads, len(query.position), len(key.position))

    def _height(self, slope: float, position: int) -> float:
        if self.config.rounded:
            return bfloat16(bfloat16(slope) * bfloat16(position))
        return slope * position


def bfloat16(x: float) -> float:
    """The nearest number with 8 significant binary digits; of two equally near ones the one that ends in 0."""
    digits, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(digits, 8)), exponent - 8)


def alibi_slopes(n_heads: int, max_bias: float = 8.0) -> list[float]:
    """2^(-max_bias (h+1) / H); where H is no power of two, those of the power P below, then every other one of 2P."""
    power = 1
    while power * 2 <= n_heads:
        power *= 2
    own = [2 ** (-max_bias * (h + 1) / power) for h in range(power)]
    finer = [2 ** (-max_bias * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return own + finer[: n_heads - power]


class T5Scheme(Scheme):
    """A learned bias per bucket of the distance k - q and per head (Raffel 2020)."""

    def __init__(self, config: T5Buckets, weights: Weights) -> None:
        self.config, self.table = config, weights["weight"]

    def bias(self, n_heads: int, query: Coordinates, key: Coordinates) -> Array:
        bias = np.zeros((n_heads, len(query.position), len(key.position)))
        for t, q in enumerate(query.position):
            for s, k in enumerate(key.position):
                bias[:, t, s] = self.table[t5_bucket(self.config, int(k - q))]
        return bias


def t5_bucket(config: T5Buckets, distance: int) -> int:
    """The row of the table for a key `distance` after the query (negative: before it).

    Of the n buckets of one side, the first m = n/2 hold the distances 0 to m-1. The other n - m grow so that the last
    would end at `max_distance`: d is in bucket m + j where j <= (n - m) ln(d/m) / ln(max_distance/m) < j + 1, that is
    (d/m)^(n-m) >= (max_distance/m)^j. In whole numbers that is exact, where logarithms may round below j.
    """
    n = config.n_buckets // 2 if config.bidirectional else config.n_buckets
    start = n if config.bidirectional and distance > 0 else 0
    d = abs(distance) if config.bidirectional else max(-distance, 0)
    m = n // 2
    if d < m:
        return start + d
    j = 0
    while j + 1 < n - m and d ** (n - m) * m ** (j + 1) >= config.max_distance ** (j + 1) * m ** (n - m):
        j += 1
    return start + m + j


class ShawScheme(Scheme):
    """score += q . a_c and output += sum weight b_c, c = clip(k - q, -max, max) + max (Shaw 2018, equations 3, 4)."""

    def __init__(self, config: Shaw, weights: Weights) -> None:
        self.config, self.weights = config, weights

    def _row(self, q: int, k: int) -> int:
        limit = self.config.max_distance
        return min(max(k - q, -limit), limit) + limit

    def relative(self, q: Array, k: Array, query: Coordinates, key: Coordinates) -> Array:
        terms = np.zeros((q.shape[1], len(q), len(k)))
        for t, here in enumerate(query.position):
            for s, there in enumerate(key.position):
                terms[:, t, s] = q[t] @ self.weights["key"][self._row(here, there)]
        return terms

    def values(self, weights: Array, query: Coordinates, key: Coordinates, width: int) -> Array:
        mixed = np.zeros((weights.shape[1], weights.shape[0], width))
        if self.config.values:
            for t, here in enumerate(query.position):
                for s, there in enumerate(key.position):
                    mixed[t] += np.outer(weights[:, t, s], self.weights["value"][self._row(here, there)])
        return mixed


class TransformerXLScheme(Scheme):
    """(q + u) . k + (q + v) . r_proj(R_d) = q . k + [u . k + (q + v) . r_proj(R_d)] (Dai 2019, section 3.3)."""

    def __init__(self, config: TransformerXL, weights: Weights) -> None:
        self.config, self.weights = config, weights

    def relative(self, q: Array, k: Array, query: Coordinates, key: Coordinates) -> Array:
        u, v = self.weights["u"], self.weights["v"]
        terms = np.zeros((q.shape[1], len(q), len(k)))
        for t, here in enumerate(query.position):
            for s, there in enumerate(key.position):
                projected = linear(below(self.weights, "r_proj"), self._sinusoid(int(here - there))).reshape(u.shape)
                for h in range(q.shape[1]):
                    terms[h, t, s] = u[h] @ k[s, h] + (q[t, h] + v[h]) @ projected[h]
        return terms

    def _sinusoid(self, distance: int) -> Array:
        """R_d: all sines, then all cosines. Keys after the query count as distance 0: the causal mask hides them."""
        d = max(distance, 0) if self.config.clamp is None else min(max(distance, 0), self.config.clamp)
        angles = [d * w for w in _frequencies(self.config.theta, self.weights["r_proj.weight"].shape[1])]
        return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


register(NoPositions, Scheme)
register(Sinusoidal, SinusoidalScheme)
register(Learned, LearnedScheme)
register(Rotary, RotaryScheme)
register(Alibi, AlibiScheme)
register(T5Buckets, T5Scheme)
register(Shaw, ShawScheme)
register(TransformerXL, TransformerXLScheme)

register(NoScaling, _no_scaling)
register(LinearScaling, _linear)
register(NtkScaling, _ntk)
register(DynamicNtkScaling, _dynamic_ntk)
register(QwenDynamicScaling, _qwen_dynamic)
register(YarnScaling, _yarn)
register(Llama3Scaling, _llama3)
register(LongRopeScaling, _longrope)
