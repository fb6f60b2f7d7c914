"""Where the arrays of a cache lie: NumPy memory, which torch and native code use without a copy, or a device.

The order is (line, head, slot, width), width contiguous. bfloat16 is held as its bits in uint16.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Array = Any
"""A NumPy array, or what the store's device has in its place."""
Arrays = dict[str, Array]


@runtime_checkable
class Store(Protocol):
    """What a cache does with its arrays beside reading and writing tokens."""

    dtype: str
    """The model's number format: float64, float32, float16 or bfloat16."""

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """New memory."""

    def take(self, array: Array, rows: npt.NDArray[np.int64]) -> Array:
        """The lines `rows` of `array`, copied."""

    def copy(self, array: Array) -> Array:
        """All of it, copied."""

    def move(self, array: Array, targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64]) -> None:
        """Copy lines to other lines of the same array."""

    def nbytes(self, array: Array) -> int:
        """Its size."""

    def to_numpy(self, array: Array) -> npt.NDArray[Any]:
        """As NumPy memory, for saving."""

    def from_numpy(self, array: npt.NDArray[Any]) -> Array:
        """The inverse."""


class HostStore:
    """NumPy memory."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return np.zeros(shape, dtype)

    def take(self, array: Array, rows: npt.NDArray[np.int64]) -> Array:
        return array[rows]

    def copy(self, array: Array) -> Array:
        return array.copy()

    def move(self, array: Array, targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64]) -> None:
        array[targets] = array[sources]

    def nbytes(self, array: Array) -> int:
        return int(array.nbytes)

    def to_numpy(self, array: Array) -> npt.NDArray[Any]:
        result: npt.NDArray[Any] = array
        return result

    def from_numpy(self, array: npt.NDArray[Any]) -> Array:
        return array.copy()
