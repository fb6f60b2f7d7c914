"""SentencePiece files that are written are read again, also by a Hugging Face folder's rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv.text import gguf, model_file
from qkv.text.folder import read_folder
from qkv.text.gguf_export import PROBES, metadata_of
from qkv.text.model_file_writer import to_model
from qkv.text.sentencepiece import SentencePieceTokenizer

from .files import gguf_metadata, sentencepiece


def from_gguf(name: str) -> SentencePieceTokenizer:
    """A small vocabulary as a GGUF file gives it."""
    tokenizer = gguf.from_metadata(metadata_of(sentencepiece(name)))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def written(tokenizer: SentencePieceTokenizer, path: Path) -> Path:
    data = to_model(tokenizer)
    assert data is not None
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_a_vocabulary_comes_back(name: str, tmp_path: Path) -> None:
    made = from_gguf(name)
    again = model_file.read(written(made, tmp_path / "tokenizer.model"))
    assert vars(again.pieces) == vars(made.pieces) | {"kinds": [int(kind) for kind in made.pieces.kinds]}
    assert again.specials == made.specials
    assert again.around == made.around
    assert all(again.encode(text) == made.encode(text) for text in PROBES)


def test_it_is_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    made = from_gguf("bpe")
    written(made, tmp_path / "tokenizer.model")
    settings = {
        **made.specials.names(),
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": "{{ bos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    again = read_folder(tmp_path)
    assert again.specials.chat_template == "{{ bos_token }}"
    assert all(again.encode(text) == made.encode(text) for text in PROBES)


@pytest.mark.data
def test_a_published_vocabulary_comes_back(data: Path, tmp_path: Path) -> None:
    published = gguf_metadata(data / "tokenizers" / "ggml-vocab-llama-spm.gguf")
    made = gguf.from_metadata(published)
    assert isinstance(made, SentencePieceTokenizer)
    again = model_file.read(written(made, tmp_path / "m.model"))
    assert all(again.encode(text) == made.encode(text) for text in PROBES)
    assert again.specials == made.specials


@pytest.mark.parametrize("key", ["space_after_control", "space_before_space"])
def test_spaces_that_the_format_cannot_put_have_no_file(key: str) -> None:
    metadata = metadata_of(sentencepiece("bpe")) | {f"tokenizer.qkv.{key}": False}
    tokenizer = gguf.from_metadata(metadata)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert to_model(tokenizer) is None
