"""GGUF's block types: how a row of numbers is stored in few bits.

A row is cut into blocks of 32 or 256 numbers; each block holds one or two float16 scales and small integers q:
Q4_0, Q5_0, Q8_0 x = d q, Q4_1, Q5_1 x = d q + m, and the K types give each 16 or 32 numbers of a block of 256 a small
integer scale of their own. IQ4_NL looks its 16 values up in a table. F32, F16 and BF16 are plain numbers.

Raw data here is uint8 (rows, bytes of a row); BF16 comes out as its bits in uint16, like everywhere in this package.
The arithmetic is the `gguf` package's, imported when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qkv.errors import CheckpointError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class BlockType:
    """One way to store numbers."""

    number: int
    """What stands in a file."""
    name: str
    elements: int
    """Numbers per block."""
    size: int
    """Bytes per block."""

    def row_bytes(self, width: int) -> int:
        """The bytes of a row of `width` numbers; raises ValueError if blocks do not fill it."""
        if width % self.elements:
            raise ValueError(f"rows of {width} numbers are not whole blocks of {self.elements} ({self.name})")
        return width // self.elements * self.size


PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
TYPES = {
    number: BlockType(number, name, elements, size)
    for number, name, elements, size in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (20, "IQ4_NL", 32, 18),
    )
}  # fmt: skip
"""Every type that is read, by its number."""
BY_NAME = {kind.name: kind for kind in TYPES.values()}
WRITTEN = ("F32", "F16", "Q8_0", "Q4_0")
"""Every type that is written."""

_LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0, "Q4_0": 8 * 65504.0}
"""The largest number of each type: beyond it float16, of the number or of its block's scale, is infinite."""

_PIECE = 2**15  # numbers turned at a time: what lies between stays in the processor's cache, and small in memory


def type_name(number: int) -> str:
    """What a type is called, also one that is not read."""
    from gguf import GGMLQuantizationType

    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    return known.get(number, f"number {number}")


def decode(raw: Array, kind: BlockType, shape: tuple[int, ...]) -> Array:
    """Numbers of `shape` from uint8 bytes: a view for plain types, float32 for blocks."""
    if kind.name in PLAIN:
        return raw.view(PLAIN[kind.name]).reshape(shape)
    from gguf import GGMLQuantizationType, dequantize

    blocks = raw.reshape(-1, kind.size)
    step = _PIECE // kind.elements
    numbers = np.empty((len(blocks), kind.elements), np.float32)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step].reshape(1, -1)  # as one row: the library takes 16 rows at a time
        numbers[start : start + step] = dequantize(part, GGMLQuantizationType(kind.number)).reshape(-1, kind.elements)
    return numbers.reshape(shape)


def as_float(array: Array) -> Array:
    """Numbers of any width as float32; uint16 holds bfloat16's bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def as_half(array: Array) -> Array:
    """float32 as float16, to the nearest."""
    with np.errstate(over="ignore"):
        return array.astype(np.float16)


def as_bfloat16(array: Array) -> Array:
    """float32 as bfloat16, to the nearest and among two to the even one, as bits in uint16; NaN stays NaN."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(array), quiet, nearest)


def encode(name: str, array: Array, kind: BlockType) -> Array:
    """Bytes (uint8, one axis) of the tensor `name`; raises CheckpointError where the type cannot hold it."""
    numbers = np.ascontiguousarray(as_float(array))
    if kind.name == "F32":
        return numbers.reshape(-1).view(np.uint8)
    largest = np.abs(numbers).max(initial=0.0)
    if not largest <= _LARGEST[kind.name]:  # NaN compares false
        raise CheckpointError(f"{name}: holds {largest}, which {kind.name} cannot store; write F32")
    if kind.name == "F16":
        return numbers.astype(np.float16).reshape(-1).view(np.uint8)
    from gguf import GGMLQuantizationType, quantize

    blocks = numbers.reshape(-1, kind.elements)
    raw = np.empty((len(blocks), kind.size), np.uint8)
    step = _PIECE // kind.elements
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step].reshape(1, -1)
        raw[start : start + step] = quantize(part, GGMLQuantizationType(kind.number)).reshape(-1, kind.size)
    return raw.reshape(-1)
