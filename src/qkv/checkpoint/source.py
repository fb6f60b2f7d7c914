"""Any saved model, whatever its format: which one it is, is read from its contents, never from its name.

a folder with config.json         qkv's own ("format": "qkv"), or Hugging Face's
a folder with params.json         Meta's (consolidated.NN.pth)
a file that begins with GGUF      llama.cpp's
a file with a llama2.c header     llama2.c's
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qkv.checkpoint.safetensors import Array
from qkv.config import ModelConfig
from qkv.errors import CheckpointError

Format = Literal["qkv", "hf", "meta", "gguf", "llama2c"]


@dataclass(frozen=True)
class Source:
    """What was read. Tensors are in our names; uint16 holds bfloat16."""

    format: Format
    config: ModelConfig
    tensors: Mapping[str, Array]
    family: str | None = None
    """The Hugging Face family, by which it can be written back."""
    token_ids: Mapping[str, Any] = field(default_factory=dict)
    """What a Hugging Face folder says of its control tokens, likewise."""
    tokenizer: Mapping[str, Any] | None = None
    """What a qkv folder says of its tokenizer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The keys of a GGUF file."""


def format_of(path: Path) -> Format:
    """The format of a folder or file."""
    if (path / "config.json").is_file():
        data = _config_json(path)
        if data.get("format") == "qkv" or "model_type" in data:
            return "qkv" if data.get("format") == "qkv" else "hf"
        raise CheckpointError(
            f'{path / "config.json"}: no saved model: it has neither "format": "qkv" nor a "model_type"'
        )
    if (path / "params.json").is_file():
        return "meta"
    if path.is_file():
        with path.open("rb") as file:
            return "gguf" if file.read(4) == b"GGUF" else "llama2c"
    what = "holds neither config.json nor params.json" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path}: {what}; give the folder or file of a saved model")


def read_source(path: Path) -> Source:
    """Config and tensors of any saved model; raises one CheckpointError with everything that is wrong."""
    form = format_of(path)
    if form == "qkv":
        from qkv.checkpoint import native

        saved = native.read(path)
        return Source(form, saved.config, saved.tensors, tokenizer=saved.tokenizer)
    if form == "hf":
        from qkv.checkpoint import huggingface

        config, tensors = huggingface.read_model(path)
        data = _config_json(path)
        family = huggingface.family_of(data, str(path)).name
        return Source(form, config, tensors, family, huggingface.token_ids(data))
    if form == "gguf":
        from qkv.checkpoint.gguf import read_gguf

        model = read_gguf(path)
        return Source(form, model.config, model.tensors, metadata=model.metadata)
    if form == "meta":
        from qkv.checkpoint.meta import read_meta

        return Source(form, *read_meta(path))
    from qkv.checkpoint.llama2c import read_llama2c

    return Source(form, *read_llama2c(path))


def read_config(path: Path) -> ModelConfig:
    """The config alone, where the format has it apart from the tensors."""
    form = format_of(path)
    if form == "qkv":
        from qkv.checkpoint import native

        return native.read_config(path)[0]
    if form == "hf":
        from qkv.checkpoint import huggingface

        return huggingface.read_config(_config_json(path), str(path / "config.json"))
    return read_source(path).config


def _config_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({type(error).__name__}: {error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must be a JSON object, got {type(data).__name__}")
    return data
