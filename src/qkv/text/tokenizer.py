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
    if dict(saved) != {"kind": ByteTokenizer.kind}:
        raise CheckpointError(f'tokenizer: expected {{"kind": "bytes"}}, got {dict(saved)}')
    return ByteTokenizer()
