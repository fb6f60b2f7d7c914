"""qkv's own folder.

    config.json          {"format": "qkv", "version": 1, "model": <ModelConfig>, "tokenizer": {"kind": ...}}
    model.safetensors    every tensor of `ModelConfig.shapes()` by its name; a tied tensor stands once
    tokenizer.json       the vocabulary, as the `tokenizers` library reads it; or
    pieces.json          that of a SentencePiece tokenizer

Reading is strict: the file must hold exactly the tensors of the config. Arrays are mapped, copy-on-write: nothing is
read before it is used, and changing them changes no file. Writing is all or nothing: a new folder is made beside the
target and takes its place when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from qkv.checkpoint.safetensors import DTYPES, File, tag_of
from qkv.checkpoint.safetensors import write as write_file
from qkv.checkpoint.whole_folder import whole_folder
from qkv.config import ModelConfig
from qkv.errors import CheckpointError, ConfigError

Tensors = dict[str, npt.NDArray[Any]]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
VOCABULARIES = {"json": "tokenizer.json", "pieces": "pieces.json"}
"""What is large in a tokenizer's description, and the file in which it stands; older folders have it in the config."""
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
    large: dict[str, Any] = {}
    if tokenizer is not None:
        files = {part: file for part, file in VOCABULARIES.items() if part in tokenizer}
        large = {file: tokenizer[part] for part, file in files.items()}
        small = {part: value for part, value in tokenizer.items() if part not in files}
        description["tokenizer"] = small | ({"files": files} if files else {})
    with whole_folder(folder) as new:
        (new / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        for file, content in large.items():
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
            (new / file).write_text(text + "\n", encoding="utf-8")
        write_file(new / WEIGHTS, tensors)


def check_target(folder: Path) -> None:
    """Refuse to replace anything but an older save."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; choose another folder to save into")
    is_save = (folder / CONFIG).is_file()
    ours = (CONFIG, WEIGHTS, *VOCABULARIES.values()) if is_save else ()
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in ours)
    if foreign:
        raise CheckpointError(f"{folder}: holds other files ({', '.join(foreign[:3])}); choose another folder")
    if is_save:
        _description(folder)


def is_native(folder: Path) -> bool:
    """Whether `folder` claims to be one of ours."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> tuple[ModelConfig, Mapping[str, Any] | None]:
    """The model's config, and what config.json says of its tokenizer (`read` adds the vocabulary)."""
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
    return Native(config, _with_vocabulary(folder, tokenizer), dict(file))


def _with_vocabulary(folder: Path, tokenizer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A tokenizer's description with what stands in files of its own."""
    if not isinstance(tokenizer, dict) or "files" not in tokenizer:
        return tokenizer
    whole = dict(tokenizer)
    files = whole.pop("files")
    if not isinstance(files, dict) or any(VOCABULARIES.get(part) != file for part, file in files.items()):
        raise CheckpointError(
            f"{folder / CONFIG}: tokenizer.files is {files!r}, which is not understood; save it again"
        )
    return whole | {part: _json(folder / file) for part, file in files.items()}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a folder that qkv saved") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None


def _description(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    description = _json(path)
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
