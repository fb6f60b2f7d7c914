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

import numpy.typing as npt

from qkv.checkpoint.safetensors import DTYPES, File, tag_of
from qkv.checkpoint.safetensors import write as write_file
from qkv.config import ModelConfig
from qkv.errors import CheckpointError, ConfigError

Tensors = dict[str, npt.NDArray[Any]]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FORMAT, _VERSION = "qkv", 1


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
    _check(folder / WEIGHTS, config, {name: (tag_of(array), array.shape) for name, array in tensors.items()})
    description = {"format": _FORMAT, "version": _VERSION, "model": config.to_dict()}
    if tokenizer is not None:
        description["tokenizer"] = dict(tokenizer)
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{what}") for what in ("new", "old"))
    try:
        new.mkdir(parents=True)
        (new / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
        write_file(new / WEIGHTS, tensors)
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)  # the older save stays
            raise
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
    file = File(path)
    _check(path, config, file.layout())
    return Native(config, tokenizer, dict(file))


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


def _check(path: Path, config: ModelConfig, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Every tensor of the config, no other, in its shape, of a float type."""
    expected = {name: parameter.shape for name, parameter in config.shapes().items()}
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    for name, (dtype, shape) in found.items():
        if name in expected and shape != expected[name]:
            problems.append(f"{name} has shape {shape} instead of {expected[name]}")
        if dtype not in DTYPES:
            problems.append(f"{name} has dtype {dtype} instead of one of {', '.join(DTYPES)}")
    if problems:
        raise CheckpointError(f"{path}: does not fit its config: {'; '.join(problems)}")
