"""A model with its tokenizer to disk, in the formats that are written."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.checkpoint import huggingface, native
from qkv.checkpoint.gguf import write_gguf
from qkv.errors import CheckpointError
from qkv.model.weights import arrays
from qkv.nn import Transformer
from qkv.text import Tokenizer
from qkv.text.folder import write_folder as write_tokenizer
from qkv.text.gguf_export import metadata_of
from qkv.text.pieces import PieceTokenizer


@dataclass(frozen=True)
class Origin:
    """What is known of a model beside its weights."""

    tokenizer: Tokenizer | None
    family: str | None
    """What its files called it."""
    token_ids: Mapping[str, Any]
    """And its control tokens."""


def save_as(path: Path, format: str, model: Transformer, origin: Origin) -> None:
    """Write it; what cannot take its tokenizer along says so."""
    if format == "qkv":
        tokenizer = None if origin.tokenizer is None else origin.tokenizer.to_dict()
        native.write(path, model.config, arrays(model), tokenizer)
    elif format == "hf":
        _save_hf(path, model, origin)
    elif format == "gguf":
        _save_gguf(path, model, origin.tokenizer)
    else:
        raise CheckpointError(f"format: {format!r} is not written; choose qkv, hf or gguf")


def _save_hf(path: Path, model: Transformer, origin: Origin) -> None:
    kept = [origin.tokenizer is None]

    def beside(new: Path) -> None:
        kept[0] = origin.tokenizer is None or write_tokenizer(new, origin.tokenizer)

    tokens = origin.token_ids or _special_ids(origin.tokenizer)
    huggingface.write_folder(path, model.config, arrays(model), origin.family, also=beside, tokens=tokens)
    if not kept[0]:
        warnings.warn(f"{path}: written without its tokenizer, which a folder cannot take from here", stacklevel=4)


def _special_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What a config.json says of the tokenizer's control tokens."""
    if not isinstance(tokenizer, PieceTokenizer):
        return {}
    specials = tokenizer.specials
    ends = sorted(specials.ends)
    ids = {"bos": specials.bos, "eos": ends if len(ends) > 1 else specials.eos, "pad": specials.pad}
    return {f"{role}_token_id": token for role, token in ids.items() if token is not None}


def _save_gguf(path: Path, model: Transformer, tokenizer: Tokenizer | None) -> None:
    if path.exists():  # the tensors may be mapped from it
        raise CheckpointError(f"{path}: exists already; choose another file to save into")
    metadata: dict[str, Any] = {}
    if tokenizer is not None:
        try:
            metadata = metadata_of(tokenizer, model.config.vocab_size)
        except CheckpointError as error:
            warnings.warn(f"{path}: written without its tokenizer: {error}", stacklevel=4)
    write_gguf(path, model.config, arrays(model), metadata=metadata)
