"""A cache as one forward pass of the torch model meets it.

`Memory` turns the step that the cache worked out on the host into tensors: coordinates of queries and of the keys of
each group of layers, indices to write to.

Arrays are NumPy memory that torch uses without a copy, or tensors on a device. No
value is read back from a device, and a decode step concatenates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from qkv.cache.cache import Cache, Step
from qkv.cache.codec import DTYPES
from qkv.cache.step import GroupStep, View, Write
from qkv.cache.store import HostStore, Store
from qkv.config import Coordinates
from qkv.nn.codec import decode, encode

Streams = dict[str, Tensor]
"""By name, (B, heads, T, width)."""

NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Memory:
    """One step of a cache, for one stack of layers."""

    def __init__(self, cache: Cache, step: Step, device: torch.device) -> None:
        self.cache, self.step, self.device = cache, step, device
        self.query = self._query(step)
        pairs = zip(cache.groups, step.groups, strict=True)
        self.groups = [_Group(self, layout.names, one, self._keys(one)) for layout, one in pairs]
        self.cross: _Group | None = None

    def _query(self, step: Step) -> Coordinates:
        """Where the new tokens stand; fields (B or 1, T)."""
        chunk = step.chunk
        length = np.broadcast_to(chunk.after[: len(chunk.position), None], chunk.position.shape)
        is_global = None if step.marks is None else self._marked(step.marks, chunk.position)
        prefix = None if step.prefix_length is None else self._up(step.prefix_length[:, None])
        return Coordinates(self._up(chunk.position), None, is_global, prefix, self._up(length))

    def _keys(self, one: GroupStep) -> Coordinates:
        """Where the keys stand that a group's layers look at: stored ones, new ones, or both."""
        if one.view is None:
            return self.query
        stands = one.view.positions
        if one.mode == "both":
            rows = max(len(stands), len(self.step.chunk.position))
            new = self.step.chunk.position
            stands = np.concatenate([np.broadcast_to(x, (rows, x.shape[1])) for x in (stands, new)], 1)
        is_global = None if self.step.marks is None else self._marked(self.step.marks, stands)
        return Coordinates(self._up(stands), None, is_global)

    def _marked(self, marks: npt.NDArray[np.bool_], stands: npt.NDArray[np.int64]) -> Tensor:
        """Which of the positions (B or 1, K) are global."""
        there = np.broadcast_to(stands, (len(marks), stands.shape[1]))
        return self._up(np.take_along_axis(marks, there.clip(0), 1) & (there >= 0))

    def _up(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device, non_blocking=True)

    @property
    def longest(self) -> int:
        """How many tokens the longest row has with these."""
        return int(self.step.chunk.after.max())

    @property
    def fresh(self) -> bool:
        """Whether nothing was stored before, and the layers look at the new tokens alone."""
        return all(one.mode == "new" for one in self.step.groups)

    def take_source(self, position: Int[Tensor, "B S"]) -> Coordinates:
        """Make room for a source whose tokens stand at `position`; where its keys stand."""
        one = self.cache.take_source(position.cpu().numpy())
        return self._cross(one)

    def stored_source(self) -> Coordinates:
        """Where the keys of the stored source stand."""
        assert self.cache.source is not None
        return self._cross(self.cache.source.seen())

    def _cross(self, one: GroupStep) -> Coordinates:
        keys = Coordinates(self._up(one.view.positions if one.view is not None else one.write.slots[None]))
        assert self.cache.source is not None
        self.cross = _Group(self, self.cache.source.names, one, keys)
        return keys

    def group(self, name: str) -> _Group:
        """The group of the attention of that name."""
        number = self.cache.group_of.get(name)
        group = self.cross if number is None else self.groups[number]
        assert group is not None
        return group


class _Group:
    """The layers that keep the same tokens."""

    def __init__(self, memory: Memory, names: Sequence[str], step: GroupStep, keys: Coordinates) -> None:
        cache, device = memory.cache, memory.device
        self.codec, self.mode, self.keys, self.later = cache.codec, step.mode, keys, memory.step.later
        self.filled = not len(step.write.tokens)
        """Whether there is nothing to write: a source that is stored already."""
        self.widths = {name: {s: width for s, (_, width) in cache.streams(name).items()} for name in names}
        # As tensors from here on: a compiled layer cannot make them of NumPy memory.
        self.arrays = {
            (name, stream): {part: tensor(array) for part, array in cache.parts(name, stream).items()}
            for name in names
            for stream in self.widths[name]
        }
        self.write, self.view = _Indices(step.write, device), step.view
        pages = None if step.view is None else step.view.pages
        self.pages = None if pages is None else torch.from_numpy(pages).to(device)

    def append(self, name: str, streams: Streams) -> Streams:
        """Store the new tokens' streams; what the queries look at, each (B, heads, K, width)."""
        return {stream: self._append(name, stream, x) for stream, x in streams.items()}

    def stored(self, name: str, dtype: torch.dtype) -> Streams:
        """What is stored."""
        return {stream: self._read(name, stream, width, dtype) for stream, width in self.widths[name].items()}

    def _append(self, name: str, stream: str, x: Tensor) -> Tensor:
        width, codec = x.shape[-1], self.codec
        new = encode(codec, x)
        # New keys, too, are seen as they will be read later; old ones are read before they are overwritten.
        own = None if self.mode == "stored" else decode(codec, new, width, x.dtype)
        if own is not None and self.mode == "both":
            own = torch.cat((self._read(name, stream, width, x.dtype), own), 2)
        if self.mode == "both":  # what is overwritten must survive, should a later layer fail
            self.later.append(lambda: self._put(name, stream, new))
        else:
            self._put(name, stream, new)
        return self._read(name, stream, width, x.dtype) if own is None else own

    def _put(self, name: str, stream: str, new: Streams) -> None:
        for part, array in self.arrays[name, stream].items():
            self.write.put(array, new[part])

    def _read(self, name: str, stream: str, width: int, dtype: torch.dtype) -> Tensor:
        view = self.view
        assert view is not None
        parts = {part: self._look(array, view) for part, array in self.arrays[name, stream].items()}
        return decode(self.codec, parts, width, dtype)

    def _look(self, array: Tensor, view: View) -> Tensor:
        """(B, heads, K, length): the slots of the view."""
        if self.pages is None:
            return array[:, :, : view.slots]
        return array[self.pages].transpose(1, 2).flatten(2, 3)


class _Indices:
    """Where a group's new tokens go, as tensors."""

    def __init__(self, write: Write, device: torch.device) -> None:
        self.tokens, self.slots = _index(write.tokens, device), _index(write.slots, device)
        self.rows = None if write.rows is None else _index(write.rows, device)
        self.lines = None if write.lines is None else _index(write.lines, device)

    def put(self, array: Tensor, x: Tensor) -> None:
        """Write the tokens of x (B, heads, T, length) into `array` (lines, heads, slots, length)."""
        if self.rows is None:
            new = x if len(self.tokens) == x.shape[2] else x[:, :, self.tokens]
            array.index_copy_(2, self.slots, new)
        else:
            array[self.lines, :, self.slots] = x[self.rows, :, self.tokens]


def _index(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def tensor(array: Any) -> Tensor:
    """The same memory as torch sees it."""
    if isinstance(array, Tensor):
        return array
    whole = torch.from_numpy(array)
    return whole.view(torch.bfloat16) if array.dtype == np.uint16 else whole


def store_for(parameter: Tensor) -> Store:
    """Where the cache of a model with this parameter lies."""
    if parameter.dtype not in NAMES:
        raise TypeError(f"a cache holds floating-point numbers, not {parameter.dtype}")
    name = NAMES[parameter.dtype]
    return HostStore(name) if parameter.device.type == "cpu" else DeviceStore(name, parameter.device)


class DeviceStore:
    """Tensors on a device."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
        return self.from_numpy(np.zeros((0,), dtype)).new_zeros(shape)

    def take(self, array: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        return array[torch.from_numpy(rows).to(self.device)]

    def copy(self, array: Tensor) -> Tensor:
        return array.clone()

    def move(self, array: Tensor, targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64]) -> None:
        array[torch.from_numpy(targets).to(self.device)] = array[torch.from_numpy(sources).to(self.device)]

    def nbytes(self, array: Tensor) -> int:
        return array.numel() * array.element_size()

    def to_numpy(self, array: Tensor) -> npt.NDArray[Any]:
        whole = array.cpu()
        result: npt.NDArray[Any] = (whole.view(torch.uint16) if whole.dtype == torch.bfloat16 else whole).numpy()
        return result

    def from_numpy(self, array: npt.NDArray[Any]) -> Tensor:
        return tensor(array.copy()).to(self.device)


assert set(NAMES.values()) == set(DTYPES)
