"""Saved models: any format that `qkv.checkpoint.source` names becomes a `TextModel`; a qkv folder is written."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Literal

import torch

from qkv.checkpoint import native
from qkv.checkpoint.pull import PACKAGES, pulled
from qkv.checkpoint.source import Source, read_source
from qkv.config.stretch import stretched
from qkv.errors import CheckpointError
from qkv.generate.runners.torch import Runtime
from qkv.model.text_model import TextModel
from qkv.model.weights import arrays, skeleton, tensor
from qkv.nn import Transformer
from qkv.text import Tokenizer, tokenizer_from


def save(model: Transformer, folder: str | PathLike[str], tokenizer: Tokenizer | None = None) -> None:
    """Write `model` as a folder that `load` reads; an older save there is replaced, anything else is refused."""
    native.write(Path(folder), model.config, arrays(model), None if tokenizer is None else tokenizer.to_dict())


def load(
    path: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rope: str | None = None,
    runtime: Runtime | None = None,
    quantize: Literal["bf16", "int8", "int4"] | None = None,
) -> TextModel:
    """A saved model of any format that `qkv.checkpoint.source` names, in evaluation mode.

    Weights are mapped from disk, and read when they are first used. They keep the file's type unless `dtype` says
    another: on a CPU a bfloat16 file runs several times faster as float32. `rope` stretches rotary positions
    (`qkv.config.stretch`: "yarn:4"), and `runtime` says how the model generates. With `quantize` it generates in the
    native engine, with weights in that format.
    """
    if quantize is not None:
        runtime = replace(runtime or Runtime(), engine="native", quantize=quantize)
    path = _located(path)
    source = read_source(path)
    config = source.config if rope is None else stretched(source.config, rope)
    model = skeleton(config)
    tensors = {name: tensor(array) for name, array in source.tensors.items()}
    if dtype is None and len({tensor.dtype for tensor in tensors.values()}) > 1:
        dtype = torch.float32  # files that mix types (GGUF) run in the widest
    model.load_state_dict(tensors, assign=True)
    tokenizer = _tokenizer_of(source, path)
    if tokenizer is not None and tokenizer.vocab_size > source.config.vocab_size:
        raise CheckpointError(
            f"{path}: its tokenizer has {tokenizer.vocab_size} tokens, its table {source.config.vocab_size} rows; "
            "they do not belong together"
        )
    return TextModel(model.to(device=device, dtype=dtype).eval(), tokenizer, source.family, runtime, source.token_ids)


def _located(path: str | PathLike[str]) -> Path:
    """A path as it is, or the place of a pulled model of that name."""
    if not Path(path).exists():
        found = pulled(str(path))
        if found is not None:
            return found
        if str(path) in PACKAGES:
            raise CheckpointError(f"{path}: not here yet; run `qkv pull {path}` first")
    return Path(path)


def _tokenizer_of(source: Source, path: Path) -> Tokenizer | None:
    """The tokenizer that lies with a model, if one does."""
    if source.tokenizer is not None:
        return tokenizer_from(source.tokenizer)
    if source.format == "gguf":
        from qkv.text import gguf

        return gguf.from_metadata(source.metadata, str(path)) if "tokenizer.ggml.model" in source.metadata else None
    if source.format == "llama2c":
        from qkv.text import llama2c

        beside = path.with_name("tokenizer.bin")
        return llama2c.read(beside) if beside.is_file() else None
    if source.format in ("hf", "meta"):
        from qkv.text.folder import has_tokenizer, read_folder

        return read_folder(path) if has_tokenizer(path) else None
    return None
