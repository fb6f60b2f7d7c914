"""What GGUF's metadata needs besides plain keys: facts that stand in tensors, and rotary positions.

Keys here lack the architecture's name in front: `attention.head_count` stands for `llama.attention.head_count`. More
entries come from the tensors: `@shapes` (name -> shape), `@tied` (whether the head is the token table), and, if the
file has them, divisors of the rotary pairs' frequencies: `@rope_freqs`, which a llama3 rule also writes, and LongRoPE's
`@rope_long` and `@rope_short`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.checkpoint.gguf_blocks import as_float
from qkv.checkpoint.ops import Array, Op, Place
from qkv.checkpoint.template import Json, Key, Keys, Leaf, Quotient
from qkv.errors import CheckpointError

SHAPES, TIED = "@shapes", "@tied"
FREQUENCIES, LONG, SHORT = "@rope_freqs", "@rope_long", "@rope_short"
DIVISORS = {FREQUENCIES: "rope_freqs.weight", LONG: "rope_factors_long.weight", SHORT: "rope_factors_short.weight"}
"""The tensors that hold one divisor per rotary pair."""

HEADS = Key("attention.head_count")
HEAD_DIM = Key("attention.key_length", Quotient("embedding_length", "attention.head_count"))
N_LAYERS = Key("block_count")


@dataclass(frozen=True)
class Rows(Leaf):
    """The rows of a tensor: the vocabulary's size, which not every file says, and which padding may enlarge."""

    tensor: str
    key: str | None = None
    """Where readers that want a key look for it."""

    def read(self, keys: Keys) -> int:
        shapes: Mapping[str, tuple[int, ...]] = keys.get(SHAPES)
        if not shapes.get(self.tensor):
            raise CheckpointError(f"{keys.name}: tensor {self.tensor} is missing, or has no rows")
        return shapes[self.tensor][0]

    def write(self, value: Any, out: Json) -> None:
        if self.key is not None:
            out[self.key] = value


@dataclass(frozen=True)
class Has(Leaf):
    """Whether a tensor is there: biases have no key."""

    tensor: str

    def read(self, keys: Keys) -> bool:
        return self.tensor in keys.get(SHAPES)


@dataclass(frozen=True)
class Width(Leaf):
    """The width of a head; keys and values have one."""

    def read(self, keys: Keys) -> int:
        width: int = HEAD_DIM.read(keys)
        values = keys.get("attention.value_length", width)
        if values != width:
            raise CheckpointError(f"{keys.name}: heads of {width} for keys and {values} for values are not understood")
        return width

    def write(self, value: Any, out: Json) -> None:
        out["attention.key_length"] = out["attention.value_length"] = value


@dataclass(frozen=True)
class Rotate(Leaf):
    """Our `rotary` positions. A llama3 rule stands in a file as one divisor per pair."""

    base: str = "rope.freq_base"
    theta: float = 10_000.0
    """Where the file says nothing."""
    scaled: bool = True
    """Whether the file's scaling speaks of these layers."""
    whole: bool = False
    """Whether a head must turn as a whole, because its rows come in pairs."""
    long: bool = False
    """Whether LongRoPE's two lists of factors are written: other architectures' readers do not look for them."""

    def read(self, keys: Keys) -> Json:
        head_dim = HEAD_DIM.read(keys)
        fraction = keys.get("rope.dimension_count", head_dim) / head_dim
        if self.whole and fraction != 1:
            raise CheckpointError(f"{keys.name}: rope.dimension_count must be the width of a head ({head_dim}) here")
        theta = float(keys.get(self.base, self.theta))
        scaling = self._scaling(keys, theta, round(head_dim * fraction)) if self.scaled else {"kind": "none"}
        return {"kind": "rotary", "theta": theta, "fraction": fraction, "layout": "halves", "scaling": scaling}

    def _scaling(self, keys: Keys, theta: float, width: int) -> Json:
        factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
        kind = keys.get("rope.scaling.type", "linear")
        trained = keys.get("rope.scaling.original_context_length", keys.get("context_length"))
        times = keys.get("rope.scaling.attn_factor", 1.0)
        fast, slow = keys.get("rope.scaling.yarn_beta_fast", 32.0), keys.get("rope.scaling.yarn_beta_slow", 1.0)
        divisors = {fact: keys.get(fact, None) for fact in DIVISORS}
        written = {name: keys.get(key, None) for name, key in _OURS.items()}
        found = {fact: np.asarray(held, np.float64) for fact, held in divisors.items() if held is not None}
        if found:
            beside = kind in ("none", "longrope") or (kind == "linear" and factor == 1)
            if not beside or set(found) not in ({FREQUENCIES}, {LONG, SHORT}):
                tensors = ", ".join(DIVISORS[fact] for fact in found)
                raise CheckpointError(f"{keys.name}: {tensors} beside rope.scaling.type {kind!r}: not understood")
            if FREQUENCIES in found:
                return _from_divisors(found[FREQUENCIES], theta, width, written)
            return _longrope(found[SHORT], found[LONG], keys.get("context_length"), trained, times)
        if kind == "none" or (kind == "linear" and factor == 1):
            return {"kind": "none"}
        if kind == "linear":
            return {"kind": "linear", "factor": factor}
        if kind != "yarn":
            raise CheckpointError(f"{keys.name}: rope.scaling.type is {kind!r}; this qkv knows none, linear, yarn")
        yarn = {"kind": "yarn", "factor": factor, "original_max_seq_len": trained, "beta_fast": fast, "beta_slow": slow}
        return yarn if times == 1 else yarn | {"attention_factor": times * (1 + 0.1 * math.log(factor))}

    def write(self, value: Any, out: Json) -> None:
        if value.get("kind") != "rotary":
            return  # noticed when what was written is read again
        out[self.base] = float(value["theta"])
        out["rope.dimension_count"] = round(out["attention.key_length"] * value["fraction"])
        scaling = value["scaling"]
        if not self.scaled or scaling["kind"] == "none":
            return
        if scaling["kind"] == "llama3":
            out |= {_OURS[name]: scaling[name] for name in _OURS}
            out[FREQUENCIES] = _divisors(scaling, value["theta"], out["rope.dimension_count"]).astype(np.float32)
            return
        if scaling["kind"] == "longrope":
            _write_longrope(scaling, out, self.long)
            return
        out["rope.scaling.type"] = scaling["kind"]
        out["rope.scaling.factor"] = scaling.get("factor")
        out["rope.scaling.original_context_length"] = scaling.get("original_max_seq_len")
        if scaling["kind"] == "yarn":
            out["rope.scaling.yarn_beta_fast"] = scaling["beta_fast"]
            out["rope.scaling.yarn_beta_slow"] = scaling["beta_slow"]


_OURS = {
    "factor": "qkv.rope.factor",
    "low_freq_factor": "qkv.rope.low_freq_factor",
    "high_freq_factor": "qkv.rope.high_freq_factor",
    "original_max_seq_len": "qkv.rope.original_context_length",
}
"""Keys of our own: the divisors alone do not tell these numbers apart."""


_PUBLISHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}


def _from_divisors(divisors: Array, theta: float, width: int, written: Json) -> Json:
    """The llama3 rule that makes these divisors; if none is known that does, the divisors themselves."""
    for numbers in (written, {"factor": float(divisors.max()), **_PUBLISHED}):
        rule = {"kind": "llama3", **numbers}
        known = None not in numbers.values() and numbers["low_freq_factor"] < numbers["high_freq_factor"]
        if known and len(divisors) == width // 2 and np.allclose(_divisors(rule, theta, width), divisors, rtol=1e-5):
            return rule
    return {"kind": "longrope", "short_factor": _each(divisors), "long_factor": _each(divisors), **_UNSCALED}


_UNSCALED = {"factor": 1.0, "attention_factor": 1.0, "original_max_seq_len": 1}
"""What LongRoPE says besides its factors where a file has one list of divisors, for every length."""


def _each(divisors: Array) -> list[float]:
    return [float(str(np.float32(divisor))) for divisor in divisors]


def _longrope(short: Array, long: Array, whole: int, trained: int, times: float) -> Json:
    """LongRoPE's factors; `times` is by what cosines and sines are multiplied, often what follows from the lengths."""
    scaling = {"short_factor": _each(short), "long_factor": _each(long), "original_max_seq_len": trained}
    scaling |= {"kind": "longrope", "factor": whole / trained}
    usual = trained > 1 and whole >= trained and math.isclose(times, _attention_factor(scaling), rel_tol=1e-6)
    return scaling if usual else scaling | {"attention_factor": times}


def _write_longrope(scaling: Json, out: Json, long: bool) -> None:
    if scaling["short_factor"] == scaling["long_factor"] and _UNSCALED.items() <= scaling.items():
        out[FREQUENCIES] = np.asarray(scaling["short_factor"], np.float32)
    if not long:
        return
    out["rope.scaling.original_context_length"] = scaling["original_max_seq_len"]
    given = scaling.get("attention_factor")
    out["rope.scaling.attn_factor"] = float(_attention_factor(scaling) if given is None else given)
    out |= {
        fact: np.asarray(scaling[name], np.float32) for fact, name in ((LONG, "long_factor"), (SHORT, "short_factor"))
    }


def _attention_factor(scaling: Json) -> float:
    """What LongRoPE multiplies cosines and sines with unless told otherwise."""
    return math.sqrt(1 + math.log(scaling["factor"]) / math.log(scaling["original_max_seq_len"]))


def _divisors(rule: Json, theta: float, width: int) -> Array:
    """By what a llama3 rule divides the frequency of each pair (width / 2,)."""
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    turns = rule["original_max_seq_len"] * frequencies / (2 * math.pi)
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    divisors: Array = 1 / ((1 - kept) / rule["factor"] + kept)
    return divisors


@dataclass(frozen=True)
class Window(Leaf):
    """The pattern of all layers: a sliding window, or causal where the key is 0 or absent."""

    def read(self, keys: Keys) -> Json:
        window = keys.get("attention.sliding_window", 0)
        return {"kind": "sliding-window", "window": window, "sinks": 0} if window else {"kind": "causal"}

    def write(self, value: Any, out: Json) -> None:
        out["attention.sliding_window"] = value.get("window")


@dataclass(frozen=True)
class Windows(Leaf):
    """Which layers see a window (Gemma): every layer but each `period`-th, which sees all."""

    period: int
    """Where the file says nothing."""
    local: str = "local"
    whole: str = "whole"

    def read(self, keys: Keys) -> list[str]:
        n_layers, said = N_LAYERS.read(keys), keys.get("attention.sliding_window_pattern", self.period)
        if isinstance(said, np.ndarray):  # for each layer, whether it sees a window
            return [self.local if window else self.whole for window in said]
        if not isinstance(said, int) or said < 1:
            raise CheckpointError(f"{keys.name}: attention.sliding_window_pattern is {said!r}, which is not understood")
        return [self.local if (index + 1) % said else self.whole for index in range(n_layers)]

    def write(self, value: list[str], out: Json) -> None:
        usual = [self.local if (index + 1) % self.period else self.whole for index in range(len(value))]
        if value != usual:
            out["attention.sliding_window_pattern"] = np.array([word == self.local for word in value])


@dataclass(frozen=True)
class GemmaScale(Leaf):
    """1 / sqrt(head width), except in the largest model, whose scale is that of d_model / heads."""

    largest: int
    """How many layers that model has."""

    def read(self, keys: Keys) -> float | None:
        if N_LAYERS.read(keys) != self.largest:
            return None
        return float((keys.get("embedding_length") / HEADS.read(keys)) ** -0.5)


@dataclass(frozen=True)
class PlusOne(Op):
    """Gemma's norms: files hold the factor 1 + weight, rounded to float32; ours is the weight."""

    exact = False

    def forward(self, parts: list[Array], place: Place) -> list[Array]:
        return [as_float(part) - np.float32(1) for part in parts]

    def inverse(self, parts: list[Array], place: Place) -> list[Array]:
        return [as_float(part) + np.float32(1) for part in parts]
