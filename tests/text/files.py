"""Vocabulary files for the tests: a reader of GGUF metadata, and small vocabularies made on the spot."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from qkv.text import language_reference, model_file
from qkv.text.decoding import byte_alphabet
from qkv.text.sentencepiece import SentencePieceTokenizer

SENTENCEPIECE = Path(__file__).parent / "sentencepiece"
"""`bpe.model`, `unigram.model`, and in `golden.json` how SentencePiece was run and what it makes of some texts."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def gguf_metadata(path: Path) -> dict[str, Any]:
    """The keys and values at the start of a GGUF file."""
    data, at = path.read_bytes(), 8

    def scalar(code: str) -> Any:
        nonlocal at
        at += struct.calcsize(code)
        return struct.unpack_from(f"<{code}", data, at - struct.calcsize(code))[0]

    def text() -> str:
        nonlocal at
        length = scalar("Q")
        at += length
        return data[at - length : at].decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, length = scalar("I"), scalar("Q")
            return [value(inner) for _ in range(length)]
        return scalar(_SCALARS[kind])

    _, n_keys = scalar("Q"), scalar("Q")
    return {text(): value(scalar("I")) for _ in range(n_keys)}


def sentencepiece(name: str) -> SentencePieceTokenizer:
    """One of the two small SentencePiece models."""
    return model_file.read(SENTENCEPIECE / f"{name}.model")


def trained_bpe(specials: list[str], vocab_size: int = 600) -> Tokenizer:
    """The library's byte-level BPE, trained on a part of the language reference."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([language_reference()[:60_000]], trainer)
    return library


def tiny_gguf(**changes: Any) -> dict[str, Any]:
    """The metadata of a byte-level BPE of 256 bytes, three merges, and two control tokens."""
    texts = [*byte_alphabet(), "he", "ll", "hell", "<s>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [1] * 259 + [3, 4],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
