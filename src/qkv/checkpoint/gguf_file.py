"""GGUF files: metadata and tensors by name, mapped from disk; and writing them.

    "GGUF", version (2 or 3), number of tensors, number of metadata entries
    metadata: name, type, value; a value may be an array
    tensors: name, widths (innermost first), block type, offset
    padding to `general.alignment` (32), then every tensor's data, each padded

Numbers are little-endian; a string is a 64-bit length and UTF-8. Opening a file reads this header only, and arrays
of strings (a tokenizer's vocabulary) are passed over and decoded when they are used.
The `gguf` package's own reader makes an object of every string and takes seconds.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from qkv.checkpoint.gguf_blocks import TYPES, Array, BlockType, decode, encode, type_name
from qkv.errors import CheckpointError

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LENGTH, _WORD = struct.Struct("<Q"), struct.Struct("<I")
_MOST_AXES = 8


class Strings(Sequence[str]):
    """An array of strings, decoded when one of them is first used."""

    def __init__(self, region: Array, count: int, where: str) -> None:
        self._region, self._count, self._where = region, count, where
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if self._decoded is None:
            data, place, found = self._region.tobytes(), 0, []
            try:
                for _ in range(self._count):
                    start = place + 8
                    place = start + _LENGTH.unpack_from(data, place)[0]
                    found.append(data[start:place].decode())
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self._where}: string {len(found)} is not UTF-8 ({error.reason})") from None
            self._decoded = found
        return self._decoded[index]


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    shape: tuple[int, ...]
    """Outermost first, as NumPy has it."""
    number: int
    """Its block type."""
    start: int
    """Where its data begin, counted from the start of the file."""

    @property
    def kind(self) -> BlockType | None:
        """Its block type, if it is one that is read."""
        return TYPES.get(self.number)

    @property
    def size(self) -> int:
        """Bytes of its data."""
        assert self.kind is not None
        return math.prod(self.shape[:-1]) * self.kind.row_bytes(self.shape[-1] if self.shape else 1)


class File(Mapping[str, Array]):
    """A GGUF file: its `metadata`, and name -> array.

    Plain types are mapped copy-on-write (BF16 as its bits in uint16); blocks become float32 at every look.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _mapped(path)
        header = _Header(self._bytes, path)
        self.version = header.version
        self.metadata: dict[str, Any] = header.metadata
        self.entries: dict[str, Entry] = header.entries

    def raw(self, name: str) -> Array:
        """A tensor's bytes."""
        entry = self.entries[name]
        return self._bytes[entry.start : entry.start + entry.size]

    def __getitem__(self, name: str) -> Array:
        entry = self.entries[name]
        if entry.kind is None:
            known = ", ".join(kind.name for kind in TYPES.values())
            raise CheckpointError(f"{self.path}: {name} has type {type_name(entry.number)}; this qkv reads {known}")
        return decode(self.raw(name), entry.kind, entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # a mapping's own would look the tensor up, and turn its blocks

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _mapped(path: Path) -> Array:
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: is empty; copy it again")
        return np.asarray(np.memmap(path, np.uint8, "c"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; give the path of a .gguf file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give the path of a .gguf file") from None


class _Header:
    """Everything before the data, read from front to back; nothing is believed before it is checked."""

    def __init__(self, data: Array, path: Path) -> None:
        self._data, self._view, self._path = data, memoryview(data.data), path
        self._place = 0
        if self._take(4, "the magic number").tobytes() != MAGIC:
            raise CheckpointError(f"{path}: not a GGUF file: it does not begin with 'GGUF'")
        self.version = self._number(_WORD, "the version")
        if self.version not in VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big") in VERSIONS
            what = "big-endian" if swapped else f"version {self.version}"
            raise CheckpointError(f"{path}: is {what}; this qkv reads little-endian versions 2 and 3; convert it again")
        n_tensors = self._number(_LENGTH, "the number of tensors")
        n_entries = self._number(_LENGTH, "the number of metadata entries")
        self.metadata = self._metadata(n_entries)
        infos = [self._tensor(index) for index in range(self._possible(n_tensors, 24, "tensors"))]
        self.entries = self._entries(infos)

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index in range(self._possible(count, 13, "metadata entries")):
            name = self._string(f"metadata entry {index}")
            if name in found:
                raise CheckpointError(f"{self._path}: metadata {name!r} stands twice")
            found[name] = self._value(self._number(_WORD, name), name)
        return found

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self._string(name)
        if kind == _ARRAY:
            inner = self._number(_WORD, name)
            return self._array(inner, self._number(_LENGTH, name), name)
        (value,) = self._numbers(kind, 1, name)
        # The shortest decimal that float32 holds as this number: 1e-05, where float64 would say 9.999999747378752e-06.
        return float(str(value)) if kind == 6 else value.item()

    def _array(self, inner: int, count: int, name: str) -> Strings | Array:
        if inner != _STRING:
            return self._numbers(inner, count, name)
        first, place, end = self._place, self._place, len(self._data)
        unpack, view = _LENGTH.unpack_from, self._view
        for _ in range(self._possible(count, 8, f"strings of {name}")):
            if place + 8 > end:
                place += 8
                break
            place += 8 + unpack(view, place)[0]
        return Strings(self._take(place - first, name), count, f"{self._path}: {name}")

    def _numbers(self, kind: int, count: int, name: str) -> Array:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: metadata {name!r} has the unknown value type {kind}")
        raw = self._take(count * _SCALARS[kind].itemsize, name)
        return raw != 0 if kind == 7 else raw.view(_SCALARS[kind]).copy()  # the copy lies on a whole address

    def _tensor(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(f"tensor {index}")
        axes = self._number(_WORD, name)
        if axes > _MOST_AXES:
            raise CheckpointError(f"{self._path}: damaged: tensor {name} has {axes} axes")
        widths = tuple(self._number(_LENGTH, name) for _ in range(axes))
        return name, widths[::-1], self._number(_WORD, name), self._number(_LENGTH, name)

    def _entries(self, infos: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, Entry]:
        """The tensors with their places, all of which lie inside the file."""
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}; it must be a power of two from 8")
        begin = -(-self._place // alignment) * alignment
        entries: dict[str, Entry] = {}
        problems = []
        for name, shape, number, offset in infos:
            if name in entries:
                problems.append(f"tensor {name} stands twice")
            entries[name] = entry = Entry(shape, number, begin + offset)
            if offset % alignment:
                problems.append(f"tensor {name} begins at {offset}, which is no multiple of {alignment}")
            elif entry.kind is not None:
                problems += self._misplaced(name, entry)
        if problems:
            shown = [*problems[:8], *([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])]
            raise CheckpointError(f"{self._path}: damaged or cut short: {'; '.join(shown)}; copy it again")
        return entries

    def _misplaced(self, name: str, entry: Entry) -> Iterator[str]:
        try:
            end = entry.start + entry.size
        except ValueError as error:
            yield f"tensor {name}: {error}"
            return
        if end > len(self._data):
            yield f"tensor {name} ends at byte {end} of {len(self._data)}"

    def _string(self, name: str) -> str:
        raw = self._take(self._number(_LENGTH, name), name).tobytes()
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: damaged: {name} is not UTF-8 ({error.reason})") from None

    def _number(self, form: struct.Struct, name: str) -> int:
        value: int = form.unpack(self._take(form.size, name).tobytes())[0]
        return value

    def _possible(self, count: int, smallest: int, what: str) -> int:
        """A count of things of which each takes some bytes: more than there is room for is damage."""
        if count * smallest > len(self._data) - self._place:
            raise CheckpointError(f"{self._path}: damaged or cut short: it claims {count} {what}; copy it again")
        return count

    def _take(self, size: int, name: str) -> Array:
        end = self._place + size
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path}: damaged or cut short: {name} ends at byte {end} of {len(self._data)}; copy it again"
            )
        taken = self._data[self._place : end]
        self._place = end
        return taken


def write_file(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Array, BlockType]]) -> None:
    """Write a file of version 3, all or nothing; tensors are turned into their block type one at a time."""
    header = [MAGIC, _WORD.pack(3), _LENGTH.pack(len(tensors)), _LENGTH.pack(len(metadata))]
    header += [_packed_string(name) + _packed(value, name) for name, value in metadata.items()]
    offset = 0
    for name, (array, kind) in tensors.items():
        widths = array.shape[::-1]
        header += [_packed_string(name), _WORD.pack(len(widths)), *map(_LENGTH.pack, widths)]
        header += [_WORD.pack(kind.number), _LENGTH.pack(offset)]
        size = math.prod(array.shape[:-1]) * kind.row_bytes(array.shape[-1] if array.shape else 1)
        offset += size + -size % ALIGNMENT
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with new.open("wb") as file:
            file.write(b"".join(header))
            file.write(bytes(-file.tell() % ALIGNMENT))
            for name, (array, kind) in tensors.items():
                file.write(encode(name, array, kind).data)
                file.write(bytes(-file.tell() % ALIGNMENT))
        new.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    finally:
        new.unlink(missing_ok=True)


def _packed_string(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _packed(value: Any, name: str) -> bytes:
    """A value with its type in front."""
    if isinstance(value, str):
        return _WORD.pack(_STRING) + _packed_string(value)
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value) and len(value):
        return (
            _WORD.pack(_ARRAY) + _WORD.pack(_STRING) + _LENGTH.pack(len(value)) + b"".join(map(_packed_string, value))
        )
    array = np.asarray(value)
    if not isinstance(value, np.ndarray | np.generic):  # Python's numbers: 32 bits, as readers expect, if they fit
        array = array.astype(_narrow(array, name))
    kinds = [number for number, dtype in _SCALARS.items() if dtype == array.dtype]
    if not kinds or array.ndim > 1:
        raise CheckpointError(f"metadata {name!r}: GGUF cannot hold {value!r}")
    data: bytes = array.astype(_SCALARS[kinds[0]]).tobytes()
    if array.ndim == 0:
        return _WORD.pack(kinds[0]) + data
    return _WORD.pack(_ARRAY) + _WORD.pack(kinds[0]) + _LENGTH.pack(len(array)) + data


def _narrow(array: Array, name: str) -> np.dtype[Any]:
    """The type in which Python's numbers are written."""
    if array.dtype.kind in "bf":
        return np.dtype("f4") if array.dtype.kind == "f" else array.dtype
    lowest, highest = int(array.min(initial=0)), int(array.max(initial=0))
    for dtype in ("u4", "i4", "i8") if array.ndim == 0 else ("i4", "i8"):
        if np.iinfo(dtype).min <= lowest and highest <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise CheckpointError(f"metadata {name!r}: GGUF cannot hold {highest}")
