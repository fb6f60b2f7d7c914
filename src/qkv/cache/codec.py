"""How a cache stores a vector: as it is, in 8 bits a number, or in 4.

    raw     the number itself, in the model's dtype
    int8    x = d c          d = largest |x| / 127                          c = round(x / d), kept within -127..127
    int4    x = d (c - 8)    d = (the x of largest |x|, with its sign) / -8    c = round(x / d) + 8, kept within 0..15

A vector is one key, value or latent of one token and one head, (..., width). Groups of 32 neighbours (all, if the
width is smaller; the last group takes what is left) have one scale d each, as in GGUF's blocks Q8_0 and Q4_0. A group's
largest number is met within d's own rounding, and no other is off by more than d/2; only int4 has no code for +8, so
that a number near the opposite of the largest one, beyond 7.5 d, is off by up to d.

Parts, each in memory order (batch, heads, slot, length) with the length contiguous; a group never leaves its vector:

    raw     values: width numbers
    int8    codes: width int8, and scales: one float16 per group
    int4    codes: two per byte, the even index in the low four bits (a last odd one alone), and scales

Rules that make every implementation give the same bits (`nn.codec` is this file in torch):
- Arithmetic is float32, for float64 numbers float64; 16 bits are reached through float32, as processors do it.
- d becomes float16 first, and codes are made with that d; beyond float16's range it is the largest float16.
- Rounding goes to even at a half. Where both signs share the largest |x|, int4 takes the positive one.
- d = 0 (all zeros, or too small for float16) gives zeros. A group that holds a NaN is stored with d = NaN and comes
  back as NaN: what is no number must stay visible.
- A decoded number beyond float16's range comes back as the largest float16, where that is the dtype asked for.

NumPy has no bfloat16: its bits are held as uint16, here as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qkv.cache.spec import GROUP
from qkv.errors import CacheError

Array = npt.NDArray[Any]
Parts = dict[str, Array]
DType = npt.DTypeLike
"""A NumPy dtype, uint16 for bfloat16, or one of the names in `DTYPES`."""

DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
"""What a model computes in, and how NumPy holds it."""
LARGEST = 65504.0
"""The largest float16."""


def codec(name: str, dtype: DType) -> Codec:
    """The codec called `name`, for a model that computes in `dtype`."""
    made = (Raw(dtype_name(dtype)), Int8(), Int4())
    for one in made:
        if one.name == name:
            return one
    raise CacheError(f"codec: unknown {name!r}; choose one of {', '.join(one.name for one in made)}")


def dtype_name(dtype: DType) -> str:
    """`bfloat16` for that name and for uint16."""
    wanted = DTYPES["bfloat16"] if dtype == "bfloat16" else np.dtype(dtype)
    for name, held in DTYPES.items():
        if held == wanted:
            return name
    raise CacheError(f"dtype: a cache cannot hold {wanted}; choose one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Codec:
    """The union of ways to store a vector."""

    name: ClassVar[str]

    def arrays(self, width: int) -> dict[str, tuple[int, np.dtype[Any]]]:
        """What one vector occupies: part -> (length of the last axis, dtype)."""
        raise NotImplementedError(f"{type(self).__name__} must define arrays(width)")

    def nbytes(self, width: int) -> int:
        """The bytes of one vector."""
        return sum(length * dtype.itemsize for length, dtype in self.arrays(width).values())

    def encode(self, x: Array) -> Parts:
        """The parts (..., length) of vectors (..., width)."""
        raise NotImplementedError(f"{type(self).__name__} must define encode(x)")

    def decode(self, parts: Parts, width: int, dtype: DType) -> Array:
        """The vectors (..., width) in `dtype`."""
        raise NotImplementedError(f"{type(self).__name__} must define decode(parts, width, dtype)")


@dataclass(frozen=True)
class Raw(Codec):
    """The numbers themselves."""

    name = "raw"
    dtype: str
    """A name in `DTYPES`."""

    def arrays(self, width: int) -> dict[str, tuple[int, np.dtype[Any]]]:
        return {"values": (width, DTYPES[self.dtype])}

    def encode(self, x: Array) -> Parts:
        return {"values": _converted(x, self.dtype)}

    def decode(self, parts: Parts, width: int, dtype: DType) -> Array:
        return _converted(parts["values"], dtype_name(dtype))


@dataclass(frozen=True)
class Int8(Codec):
    """One signed byte a number."""

    name = "int8"

    def arrays(self, width: int) -> dict[str, tuple[int, np.dtype[Any]]]:
        return {"codes": (width, np.dtype(np.int8)), "scales": (n_groups(width), np.dtype(np.float16))}

    def encode(self, x: Array) -> Parts:
        grouped = _grouped(_widened(x))
        scales = _float16(np.abs(grouped).max(axis=-1) / 127)
        codes = _flat(np.clip(_steps(grouped, scales), -127, 127), x.shape[-1])
        return {"codes": codes.astype(np.int8), "scales": scales}

    def decode(self, parts: Parts, width: int, dtype: DType) -> Array:
        return _scaled(parts["codes"], parts["scales"], dtype_name(dtype))


@dataclass(frozen=True)
class Int4(Codec):
    """Half a byte a number."""

    name = "int4"

    def arrays(self, width: int) -> dict[str, tuple[int, np.dtype[Any]]]:
        return {"codes": ((width + 1) // 2, np.dtype(np.uint8)), "scales": (n_groups(width), np.dtype(np.float16))}

    def encode(self, x: Array) -> Parts:
        grouped = _grouped(_widened(x))
        high, low = grouped.max(axis=-1), grouped.min(axis=-1)
        # The absolute values change nothing but the sign of a zero: which of two zeros is the larger is not defined.
        scales = _float16(np.where(high >= -low, -np.abs(high), np.abs(low)) / 8)
        codes = _flat(np.clip(_steps(grouped, scales) + 8, 0, 15), x.shape[-1]).astype(np.uint8)
        even, odd = codes[..., 0::2], codes[..., 1::2]
        odd = _padded(odd, even.shape[-1])
        return {"codes": even | odd << 4, "scales": scales}

    def decode(self, parts: Parts, width: int, dtype: DType) -> Array:
        pairs = np.stack([parts["codes"] & 15, parts["codes"] >> 4], axis=-1)
        codes = _flat(pairs, width)
        return _scaled(codes.astype(np.int8) - 8, parts["scales"], dtype_name(dtype))


def n_groups(width: int) -> int:
    """How many scales a vector has."""
    return -(-width // GROUP)


def _grouped(x: Array) -> Array:
    """(..., width) -> (..., groups, numbers of a group), zeros after the end, which change no group's scale."""
    groups, width = n_groups(x.shape[-1]), x.shape[-1]
    size = min(GROUP, width)
    return _padded(x, groups * size).reshape(*x.shape[:-1], groups, size)


def _padded(x: Array, width: int) -> Array:
    missing = width - x.shape[-1]
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _flat(grouped: Array, width: int) -> Array:
    """(..., groups, numbers of a group) -> (..., width)."""
    *batch, groups, size = grouped.shape
    return grouped.reshape(*batch, groups * size)[..., :width]


def _float16(scales: Array) -> Array:
    """Scales as they are stored; every NaN has the same bits."""
    limited = np.clip(scales, -LARGEST, LARGEST).astype(np.float32).astype(np.float16)
    return np.where(np.isnan(limited), np.float16(np.nan), limited)


def _steps(grouped: Array, scales: Array) -> Array:
    """round(x / d), and 0 where d is 0 or NaN."""
    d = scales.astype(grouped.dtype)[..., None]
    usable = np.abs(d) > 0
    with np.errstate(invalid="ignore"):  # some NaNs are reported
        return np.where(usable, np.rint(grouped / np.where(usable, d, 1)), 0)


def _scaled(steps: Array, scales: Array, name: str) -> Array:
    """d times each step: exact in float32, since a step has up to 7 bits and d 11."""
    kind = np.dtype(np.float64 if name == "float64" else np.float32)
    numbers = _grouped(steps.astype(kind)) * scales.astype(kind)[..., None]
    if name == "float16":
        numbers = np.clip(numbers, -LARGEST, LARGEST)
    return _converted(_flat(numbers, steps.shape[-1]), name)


def _widened(x: Array) -> Array:
    """In float32, or float64 if it is that already."""
    if x.dtype == DTYPES["bfloat16"]:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x if x.dtype == np.float64 else x.astype(np.float32, copy=False)


def _converted(x: Array, name: str) -> Array:
    """In the named dtype; the same array if it has it."""
    if x.dtype == DTYPES[name]:
        return x
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite; some NaNs are reported
        wide = _widened(x)
        if name == "float64":
            return wide.astype(np.float64)
        single = wide.astype(np.float32, copy=False)
        return _bfloat16(single) if name == "bfloat16" else single.astype(DTYPES[name], copy=False)


def _bfloat16(x: Array) -> Array:
    """float32 cut to its upper 16 bits, rounded to even at a half."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
