"""`cache.codec` in torch: the same parts, bit for bit, made and read where the model runs.

    encode(codec, x) -> {part: tensor (..., length)}          decode(codec, parts, width, dtype) -> x (..., width)

What the parts are, and every rule of rounding, stands in `qkv.cache.codec`; part names and lengths are its `arrays`.
bfloat16 is itself here: NumPy's uint16 seen through `view(torch.bfloat16)`. Nothing waits for the device, and all of it
compiles into one graph. On a CPU the compiled code gives the same bits too; for a GPU the compiler may divide
approximately, so that there a number at the border of two codes can get the other one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float16, Float32, Int, Shaped
from torch import Tensor

from qkv.cache.codec import LARGEST, Codec, Int4, Int8, Raw
from qkv.cache.spec import GROUP

Parts = dict[str, Tensor]


def encode(codec: Codec, x: Float[Tensor, "*batch width"]) -> Parts:
    """The parts of vectors."""
    return _ENCODE[type(codec)](codec, x)


def decode(codec: Codec, parts: Parts, width: int, dtype: torch.dtype) -> Float[Tensor, "*batch width"]:
    """The vectors in `dtype`."""
    return _DECODE[type(codec)](parts, width, dtype)


def _encode_raw(codec: Raw, x: Tensor) -> Parts:
    return {"values": _converted(x, _DTYPES[codec.dtype])}


def _decode_raw(parts: Parts, width: int, dtype: torch.dtype) -> Tensor:
    return _converted(parts["values"], dtype)


def _encode_int8(codec: Int8, x: Tensor) -> Parts:
    steps, scales = _quantised(x, _int8_scale)
    return {"codes": steps.clamp(-127, 127).to(torch.int8), "scales": scales}


def _int8_scale(grouped: Tensor) -> Tensor:
    # In float64, because a GPU divides by a constant through its reciprocal, which costs float32 its last bit.
    return grouped.abs().amax(-1).double() / 127


def _decode_int8(parts: Parts, width: int, dtype: torch.dtype) -> Tensor:
    return _scaled(parts["codes"], parts["scales"], dtype)


def _encode_int4(codec: Int4, x: Tensor) -> Parts:
    steps, scales = _quantised(x, _int4_scale)
    codes = (steps + 8).clamp(0, 15).to(torch.uint8)
    even, odd = codes[..., 0::2], codes[..., 1::2]
    if x.shape[-1] % 2:
        odd = F.pad(odd, (0, 1))
    return {"codes": even | odd << 4, "scales": scales}


def _int4_scale(grouped: Tensor) -> Tensor:
    high, low = grouped.amax(-1), grouped.amin(-1)
    # The absolute values change nothing but the sign of a zero: which of two zeros is the larger is not defined.
    return torch.where(high >= -low, -high.abs(), low.abs()) / 8


def _decode_int4(parts: Parts, width: int, dtype: torch.dtype) -> Tensor:
    codes = torch.stack((parts["codes"] & 15, parts["codes"] >> 4), -1).flatten(-2)[..., :width]
    return _scaled(codes.to(torch.int8) - 8, parts["scales"], dtype)


def _quantised(
    x: Float[Tensor, "*batch width"], scale: Callable[[Tensor], Tensor]
) -> tuple[Float[Tensor, "*batch width"], Float16[Tensor, "*batch groups"]]:
    """round(x / d), 0 where d is 0 or NaN, and the d of each group."""
    steps, scales = [], []
    for grouped in _pieces(x if x.dtype == torch.float64 else x.float()):
        rounded = as_float16(scale(grouped))
        d = rounded.to(grouped.dtype)[..., None]
        usable = d.abs() > 0
        steps.append(torch.where(usable, torch.round(grouped / torch.where(usable, d, 1.0)), 0.0).flatten(-2))
        scales.append(rounded.half())
    return _joined(steps), _joined(scales)


def _scaled(
    steps: Int[Tensor, "*batch width"], scales: Float16[Tensor, "*batch groups"], dtype: torch.dtype
) -> Float[Tensor, "*batch width"]:
    """d times each step, which float32 holds exactly."""
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    pieces = _pieces(steps)
    scales_of = scales.split([grouped.shape[-2] for grouped in pieces], -1)
    numbers = _joined(
        [(grouped.to(kind) * d.to(kind)[..., None]).flatten(-2) for grouped, d in zip(pieces, scales_of, strict=True)]
    )
    return (numbers.clamp(-LARGEST, LARGEST) if dtype == torch.float16 else numbers).to(dtype)


def _pieces(x: Shaped[Tensor, "*batch width"]) -> list[Tensor]:
    """The whole groups (..., n, 32), and what is left (..., 1, rest), either of which there may not be.

    Apart, because the compiler for processors (PyTorch 2.13) gives the last elements the wrong group where one view
    holds them all, padded and cut again.
    """
    whole = x.shape[-1] // GROUP
    rest = x.shape[-1] - whole * GROUP
    pieces = [x[..., : whole * GROUP].unflatten(-1, (whole, GROUP))] if whole else []
    return [*pieces, x[..., whole * GROUP :].unflatten(-1, (1, rest))] if rest else pieces


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def as_float16(scales: Float[Tensor, "*batch groups"]) -> Float32[Tensor, "*batch groups"]:
    """The nearest float16, still as float32, so that `half()` after it is exact.

    The compiler drops casts between two operations that it fuses, and would go on with the scale that was not rounded.
    Hence by hand: float16 has 13 digits less than float32, and below 2^-14 it counts in steps of 2^-24.
    """
    d = scales.clamp(-LARGEST, LARGEST).float()
    bits = d.view(torch.int32)
    normal = ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)
    rounded = torch.where(d.abs() < 2.0**-14, torch.round(d * 2.0**24) * 2.0**-24, normal)
    return rounded.masked_fill(d.isnan(), float("nan"))


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same tensor if it has the dtype; float64 narrows through float32."""
    if dtype in (x.dtype, torch.float64):
        return x.to(dtype)
    return x.float().to(dtype)


_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_ENCODE: dict[type[Codec], Callable[..., Parts]] = {Raw: _encode_raw, Int8: _encode_int8, Int4: _encode_int4}
_DECODE: dict[type[Codec], Callable[..., Tensor]] = {Raw: _decode_raw, Int8: _decode_int8, Int4: _decode_int4}
