"""What a KV cache's codec makes of a vector, number by number. NumPy, float64.

A quantised cache gives back other keys and values than it was given. Here each one passes through the codec without
any cache, before anybody uses it: the oracle still reads its whole input at once, and yet a quantised cache must agree
with it, in whatever steps it was filled.

    raw     x
    int8    d c,        d = max |x| / 127,                  c = round(x / d), at least -127 and at most 127
    int4    d (c - 8),  d = (x of the largest |x|) / -8,    c = round(x / d) + 8, at least 0 and at most 15

for each group of 32 numbers along the width of one head. d is a float16, reached through float32, and at most 65504 in
size. Where both signs share the largest |x|, it is the positive one. d = 0 gives zeros; a group with a NaN gives NaN.
"""

from __future__ import annotations

import math

import numpy as np

from qkv.config import ModelConfig
from qkv.errors import DataError
from qkv.reference.ops import Array

CODECS = ("raw", "int8", "int4")
GROUP = 32


def checked_codec(cfg: ModelConfig, codec: str) -> str:
    """The codec's name; DataError if there is none of that name, or no cache that could use it."""
    if codec not in CODECS:
        raise DataError(f"codec: unknown {codec!r}; choose one of {', '.join(CODECS)}")
    if codec != "raw" and cfg.decoder is None:
        raise DataError(f"codec: {codec!r} given, but a model without a decoder has no cache: leave it out")
    return codec


def through(codec: str, x: Array) -> Array:
    """Every vector of x (..., width), stored and read again."""
    if codec == "raw":
        return x
    out = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:-1]):
        for start in range(0, x.shape[-1], GROUP):
            group = [float(number) for number in x[place][start : start + GROUP]]
            out[place][start : start + GROUP] = _int8(group) if codec == "int8" else _int4(group)
    return out


def _int8(group: list[float]) -> list[float]:
    d = _half(max(abs(number) for number in group) / 127) if not _undefined(group) else math.nan
    return [d * _code(number, d, -127, 127) for number in group]


def _int4(group: list[float]) -> list[float]:
    d = _half(max(group, key=lambda number: (abs(number), number)) / -8) if not _undefined(group) else math.nan
    return [d * _code(number, d, -8, 7) for number in group]


def _undefined(group: list[float]) -> bool:
    return any(math.isnan(number) for number in group)


def _half(d: float) -> float:
    """The nearest float16 to the nearest float32."""
    if abs(d) >= 65504:
        return math.copysign(65504.0, d)
    return float(np.float16(np.float32(d)))


def _code(number: float, d: float, smallest: int, largest: int) -> int:
    if d == 0 or math.isnan(d):
        return 0
    if math.isinf(number):
        return largest if (number > 0) == (d > 0) else smallest
    return min(max(round(number / d), smallest), largest)  # Python rounds a half to even
