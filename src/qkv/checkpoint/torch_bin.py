"""PyTorch's `.bin` files: pickled tensors, read without running any code that a file may hold.

    pytorch_model.bin              one file: {name: tensor}
    pytorch_model.bin.index.json   {"weight_map": {name: file}} of several

Published models older than safetensors have only these. `torch.load(weights_only=True)` refuses every pickle that asks
for more than tensors. Files since PyTorch 1.6 are mapped, not read. bfloat16 is given as its bits in uint16.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy.typing as npt

from qkv.errors import CheckpointError

Array = npt.NDArray[Any]
# What PyTorch's reader raises on bytes that are no pickle of tensors depends on where it stumbles.
_DAMAGED = (RuntimeError, OSError, EOFError, ValueError, LookupError, AttributeError, TypeError, struct.error)
INDEX, SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"


def found(folder: Path) -> bool:
    """Whether the folder holds such files."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def read_file(path: Path) -> dict[str, Array]:
    """The tensors of one file."""
    import torch  # only here: reading any other format needs no torch

    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; copy the whole folder again") from None
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it asks for {asked[1]}" if asked else "it is damaged or of another kind"
        raise CheckpointError(f"{path}: holds more than tensors, and was not run: {why}; get safetensors") from None
    except _DAMAGED as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: damaged or cut short ({reason}); copy it again") from None
    if not isinstance(held, dict) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise CheckpointError(f"{path}: not a table of tensors by name; give a file saved from model.state_dict()")
    return {name: _array(value, torch.bfloat16, torch.uint16) for name, value in held.items()}


def _array(tensor: Any, bfloat16: Any, uint16: Any) -> Array:
    plain = tensor.detach()
    array: Array = (plain.view(uint16) if plain.dtype == bfloat16 else plain).numpy()
    return array


def read_folder(folder: Path) -> dict[str, Array]:
    """The tensors of a folder: those that its index names, or of its single file."""
    if not (folder / INDEX).is_file():
        return read_file(folder / SINGLE)
    try:
        where = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(where.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: not an index of tensors ({error})") from None
    files = {name: read_file(folder / name) for name in names}
    stale = [f"{name} is not in {file}" for name, file in where.items() if name not in files[file]]
    held = [f"{name} is in {file}, but not in the index" for file in files for name in files[file] if name not in where]
    if stale or held:
        raise CheckpointError(f"{folder / INDEX}: does not fit its files: {'; '.join([*stale, *held][:8])}")
    return {name: files[file][name] for name, file in where.items()}
