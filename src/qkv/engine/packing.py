"""Weights as the runtime reads them: blocks of 16 output rows, whose numbers alternate; one load serves 16 sums.

    fp32   [block][k][16] float32
    bf16   [block][k][16] uint16
    int8   [block][group] of 32 k: 16 scales (float16), then [8][16][4] codes               w = scale * code
    int4   the same: 16 scales, 16 minima, then [4][16][4] bytes, the lower halves for      w = scale * code + minimum
           the first 16 k of the group and the upper halves for the others

Rows are padded to whole blocks and columns of codes to whole groups, with zeros. Codes are symmetric in int8 (largest
magnitude: 127) and between the group's least and largest weight in int4, as GGUF's Q8_0 and Q4_1 are.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

ROWS, GROUP = 16, 32

Format = Literal["fp32", "bf16", "int8", "int4"]
FORMATS: tuple[Format, ...] = get_args(Format)
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def quantised(form: Format) -> bool:
    """Whether the format's products need their input as codes."""
    return form in ("int8", "int4")


def packed_bytes(rows: int, columns: int, form: Format) -> int:
    """The size of a packed matrix."""
    groups = -(-columns // GROUP)
    block = {"fp32": columns * 64, "bf16": columns * 32, "int8": groups * 544, "int4": groups * 320}[form]
    return -(-rows // ROWS) * block


def pack(weight: Floats, form: Format) -> Bytes:
    """A matrix (N, K) in a format, flat."""
    if form == "fp32":
        return _flat(_blocks(weight).transpose(0, 2, 1))
    if form == "bf16":
        return _flat(_blocks(_bf16(weight)).transpose(0, 2, 1))
    scales, codes = (_int8 if form == "int8" else _int4)(weight)
    parts = [_flat(part).reshape(*part.shape[:2], -1) for part in (scales, codes)]
    return np.ascontiguousarray(np.concatenate(parts, -1)).reshape(-1)


def unpack(packed: Bytes, rows: int, columns: int, form: Format) -> Floats:
    """The matrix that a packed one stands for, (N, K): what the products multiply with."""
    blocks, groups = -(-rows // ROWS), -(-columns // GROUP)
    if form in ("fp32", "bf16"):
        raw = packed.view(np.float32 if form == "fp32" else np.uint16).reshape(blocks, columns, ROWS).transpose(0, 2, 1)
        wide = raw if form == "fp32" else (raw.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(wide.reshape(-1, columns)[:rows])
    whole = packed.reshape(blocks, groups, -1)
    scale = _halves(whole[..., :32])
    if form == "int8":
        codes = whole[..., 32:].view(np.int8).reshape(blocks, groups, 8, ROWS, 4)
        values = codes.transpose(0, 1, 3, 2, 4).reshape(blocks, groups, ROWS, GROUP) * scale[..., None]
    else:
        two = whole[..., 64:].reshape(blocks, groups, 4, ROWS, 4).transpose(0, 1, 3, 2, 4)
        two = two.reshape(blocks, groups, ROWS, GROUP // 2)
        codes = np.concatenate([two & 15, two >> 4], -1)
        values = codes * scale[..., None] + _halves(whole[..., 32:64])[..., None]
    grown: Floats = values.transpose(0, 2, 1, 3).reshape(-1, groups * GROUP)[:rows, :columns].astype(np.float32)
    return np.ascontiguousarray(grown)


def _flat(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _halves(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _blocks(weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(blocks, 16, K)."""
    padded = np.pad(weight, ((0, -weight.shape[0] % ROWS), (0, 0)))
    return padded.reshape(-1, ROWS, weight.shape[1])


def _bf16(weight: Floats) -> npt.NDArray[np.uint16]:
    """The upper halves, rounded to even."""
    bits = np.ascontiguousarray(weight).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _groups(weight: Floats) -> Floats:
    """(blocks, groups, 16, 32)."""
    padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % GROUP)))
    return _blocks(padded).reshape(-1, ROWS, padded.shape[1] // GROUP, GROUP).transpose(0, 2, 1, 3)


def _int8(weight: Floats) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    groups = _groups(weight)
    scale = (np.abs(groups).max(-1) / 127).astype(np.float16)
    codes = np.clip(_divided(groups, scale), -127, 127).astype(np.int8)
    return scale, codes.reshape(*codes.shape[:3], 8, 4).transpose(0, 1, 3, 2, 4)


def _int4(weight: Floats) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    groups = _groups(weight)
    least = groups.min(-1).astype(np.float16)
    scale = ((groups.max(-1) - groups.min(-1)) / 15).astype(np.float16)
    codes = np.clip(_divided(groups - least.astype(np.float32)[..., None], scale), 0, 15).astype(np.uint8)
    two = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scale, least], -1), two.reshape(*two.shape[:3], 4, 4).transpose(0, 1, 3, 2, 4)


def _divided(values: Floats, scale: npt.NDArray[np.float16]) -> Floats:
    """Rounded quotients by the scale as it is stored; 0 where it is 0."""
    wide = scale.astype(np.float32)[..., None]
    return np.rint(np.divide(values, wide, out=np.zeros_like(values), where=wide != 0))
