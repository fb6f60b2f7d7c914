"""What every tokenizer offers, and how a saved folder names one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from qkv.errors import CheckpointError
from qkv.text.bytes import ByteTokenizer


class Tokenizer(Protocol):
    """Between text and token ids 0 to vocab_size - 1."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The text's token ids."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids."""

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of token ids, piece by piece as they arrive."""

    def to_dict(self) -> Mapping[str, Any]:
        """What `tokenizer_from` needs to make it again; plain JSON values."""


def tokenizer_from(saved: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a saved folder describes."""
    kind = saved.get("kind")
    if dict(saved) == {"kind": ByteTokenizer.kind}:
        return ByteTokenizer()
    try:
        # Both need a library that takes its time to load.
        if kind == "huggingface":
            from qkv.text import hf

            return hf.from_dict(saved)
        if kind == "sentencepiece":
            from qkv.text import sentencepiece

            return sentencepiece.from_dict(saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"tokenizer: its {kind} description is damaged ({error!r}); save it again") from None
    expected = '{"kind": "bytes"}, or the kind "huggingface" or "sentencepiece" with its vocabulary'
    raise CheckpointError(f"tokenizer: expected {expected}, got {str(dict(saved))[:200]}")
