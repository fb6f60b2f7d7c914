"""Sources and tokenizers for these tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from qkv.config.training import Format
from qkv.text import ByteTokenizer
from qkv.train.data import Shards, in_memory


@dataclass(frozen=True)
class Source:
    """What `prepare` reads of a recipe's data."""

    train: tuple[str, ...]
    valid: tuple[str, ...] = ()
    format: Format = "text"
    field: str = "text"
    valid_share: float = 0.0


class Counting(ByteTokenizer):
    """Bytes, and how many characters have been encoded in how many calls."""

    def __init__(self) -> None:
        self.calls = self.characters = 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        self.characters += len(text)
        return super().encode(text)


class Shifted(ByteTokenizer):
    """Another tokenizer: it names itself otherwise."""

    def to_dict(self) -> dict[str, str]:
        return {"kind": "shifted"}


class Wide(ByteTokenizer):
    """Tokens that do not fit into 16 bits."""

    vocab_size = 70_000

    def encode(self, text: str) -> list[int]:
        return [69_000 + token for token in super().encode(text)]


def written(folder: Path, name: str, text: str | bytes) -> str:
    """A new file's name."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def texts(shards: Shards, column: str = "tokens") -> list[str]:
    """The documents of byte tokens."""
    found = {"tokens": shards.tokens, "source": shards.source}[column]
    assert found is not None
    return [bytes(found.document(number).tolist()).decode() for number in range(shards.n_documents)]


def numbered(*lengths: int) -> Shards:
    """Documents of these lengths whose tokens are 0, 1, 2 ... throughout."""
    edges = np.cumsum([0, *lengths])
    documents: list[Sequence[int]] = [range(a, b) for a, b in pairwise(edges)]
    return in_memory(documents, max(1, int(edges[-1])))


def plain(rows: Sequence[Any]) -> list[list[int]]:
    """The tokens of examples."""
    return [row.tokens.tolist() for row in rows]
