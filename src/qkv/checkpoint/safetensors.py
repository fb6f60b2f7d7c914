"""Safetensors files as mapped arrays, whole folders of them, and writing them.

The library checks a file (header, length), but its NumPy reader copies and has no bfloat16; so the arrays are mapped
here, and bfloat16 is given as its bits in uint16. Nothing is read before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from qkv.errors import CheckpointError

Array = npt.NDArray[Any]
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_OTHERS = {"I64": np.int64, "I32": np.int32, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}  # buffers, not weights
_WRITTEN = {np.dtype(dtype).name: tag for tag, dtype in DTYPES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class File(Mapping[str, Array]):
    """One safetensors file: name -> array, mapped copy-on-write when asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self._entries = path, _header(path)

    def __getitem__(self, name: str) -> Array:
        entry = self._entries[name]
        dtype = DTYPES.get(entry["dtype"]) or _OTHERS.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"{self.path}: {name} has dtype {entry['dtype']}; this qkv reads {', '.join(DTYPES)}")
        if 0 in entry["shape"]:
            return np.empty(entry["shape"], dtype)
        shape = tuple(entry["shape"])
        if not shape:
            return np.memmap(self.path, dtype=dtype, mode="c", offset=entry["start"], shape=(1,)).reshape(())
        return np.memmap(self.path, dtype=dtype, mode="c", offset=entry["start"], shape=shape)

    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype's tag and the shape of every tensor, without mapping any."""
        return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in self._entries.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def tag_of(array: Array) -> str:
    """The dtype's tag in the file; one that has none is named as NumPy does."""
    return _WRITTEN.get(array.dtype.name, array.dtype.name)


def _header(path: Path) -> dict[str, Any]:
    """Each tensor's dtype, shape and place in the file, counted from its start."""
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; copy the whole folder again") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or cut short ({error}); copy it again") from None
    header.pop("__metadata__", None)
    return {name: entry | {"start": 8 + length + entry["data_offsets"][0]} for name, entry in header.items()}


def read_folder(folder: Path) -> dict[str, Array]:
    """The tensors of a folder: those that its index names, or of its single file. Stray files are not looked at."""
    if not (folder / INDEX).is_file():
        return dict(File(folder / SINGLE))
    try:
        where = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / INDEX}: not an index of tensors ({error})") from None
    files = {name: File(folder / name) for name in sorted(set(where.values()))}
    stale = [f"{name} is not in {file}" for name, file in where.items() if name not in files[file]]
    held = [f"{name} is in {file}, but not in the index" for file in files for name in files[file] if name not in where]
    if stale or held:
        raise CheckpointError(f"{folder / INDEX}: does not fit its files: {'; '.join([*stale, *held][:8])}")
    return {name: files[file][name] for name, file in where.items()}


def write(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Write one file; uint16 is bfloat16."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in tensors.items():
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": _WRITTEN[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).data if array.size else b"")
