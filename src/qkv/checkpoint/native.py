"""qkv's own folder.

    config.json          {"format": "qkv", "version": 1, "model": <ModelConfig>, "tokenizer": {"kind": ...}}
    model.safetensors    every tensor of `ModelConfig.shapes()` by its name; a tied tensor stands once

Reading is strict: the file must hold exactly the tensors of the config. Arrays are mapped, copy-on-write: nothing is
read before it is used, and changing them changes no file. Writing is all or nothing: a new folder is made beside the
target and takes its place when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qkv.config import ModelConfig
from qkv.errors import CheckpointError, ConfigError

Tensors = dict[str, npt.NDArray[Any]]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FORMAT, _VERSION = "qkv", 1
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}  # NumPy has no bfloat16


@dataclass(frozen=True)
class Native:
    """What a folder holds."""

    config: ModelConfig
    tokenizer: Mapping[str, Any] | None
    tensors: Tensors


def write(folder: Path, config: ModelConfig, tensors: Tensors, tokenizer: Mapping[str, Any] | None) -> None:
    """Save a model; an older save at `folder` is replaced."""
    folder = folder.resolve()
    check_target(folder)
    _check(folder / WEIGHTS, config, {name: (array.dtype.name, array.shape) for name, array in tensors.items()})
    description = {"format": _FORMAT, "version": _VERSION, "model": config.to_dict()}
    if tokenizer is not None:
        description["tokenizer"] = dict(tokenizer)
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{what}") for what in ("new", "old"))
    try:
        new.mkdir(parents=True)
        (new / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
        save_file(tensors, new / WEIGHTS)
        (new / WEIGHTS).chmod((new / CONFIG).stat().st_mode)  # the library makes it private
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def check_target(folder: Path) -> None:
    """Refuse to replace anything but an older save."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; choose another folder to save into")
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in (CONFIG, WEIGHTS))
    if foreign:
        raise CheckpointError(f"{folder}: holds other files ({', '.join(foreign[:3])}); choose another folder")
    if (folder / CONFIG).exists():
        _description(folder)


def is_native(folder: Path) -> bool:
    """Whether `folder` claims to be one of ours."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> tuple[ModelConfig, Mapping[str, Any] | None]:
    """The model's config, and what the folder says of its tokenizer."""
    path, description = folder / CONFIG, _description(folder)
    unknown = sorted(description.keys() - {"format", "version", "model", "tokenizer"})
    if unknown:
        raise CheckpointError(f"{path}: unknown field {', '.join(unknown)}")
    if not isinstance(description.get("model"), dict):
        raise CheckpointError(f"{path}: field 'model' must be the model's config")
    try:
        config = ModelConfig.from_dict(description["model"])
    except ConfigError as error:
        hint = "; a kind of your own must be registered first: import its file" if "unknown kind" in str(error) else ""
        raise CheckpointError(f"{path}: {error}{hint}") from None
    return config, description.get("tokenizer")


def read(folder: Path) -> Native:
    """A saved model; raises one CheckpointError with everything that is wrong."""
    config, tokenizer = read_config(folder)
    path = folder / WEIGHTS
    layout = _layout(path)
    _check(path, config, {name: (_dtype_name(entry["dtype"]), tuple(entry["shape"])) for name, entry in layout.items()})
    return Native(config, tokenizer, {name: _mapped(path, entry) for name, entry in layout.items()})


def _description(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a folder that qkv saved") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise CheckpointError(f'{path}: not a model that qkv saved: it lacks "format": {_FORMAT!r}')
    if description.get("version") != _VERSION:
        found = description.get("version")
        raise CheckpointError(f"{path}: version {found!r}, but this qkv reads version {_VERSION}; upgrade qkv")
    return description


def _layout(path: Path) -> dict[str, Any]:
    """Each tensor's dtype, shape and place in the file, counted from its start."""
    # The library checks the header and the file's length, but its NumPy reader copies; so the arrays are mapped here.
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; save the model again") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged or cut short ({error}); save or copy it again") from None
    header.pop("__metadata__", None)
    return {name: entry | {"start": 8 + length + entry["data_offsets"][0]} for name, entry in header.items()}


def _dtype_name(tag: str) -> str:
    return np.dtype(_DTYPES[tag]).name if tag in _DTYPES else tag


def _mapped(path: Path, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    shape = tuple(entry["shape"])
    return np.memmap(path, dtype=_DTYPES[entry["dtype"]], mode="c", offset=entry["start"], shape=shape)


def _check(path: Path, config: ModelConfig, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Every tensor of the config, no other, in its shape, of a float type."""
    expected = {name: parameter.shape for name, parameter in config.shapes().items()}
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    allowed = {np.dtype(dtype).name for dtype in _DTYPES.values()}
    for name, (dtype, shape) in found.items():
        if name in expected and shape != expected[name]:
            problems.append(f"{name} has shape {shape} instead of {expected[name]}")
        if dtype not in allowed:
            problems.append(f"{name} has dtype {dtype} instead of one of {', '.join(sorted(allowed))}")
    if problems:
        raise CheckpointError(f"{path}: does not fit its config: {'; '.join(problems)}")
