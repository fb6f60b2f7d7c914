"""What objectives know of a tokenizer: which tokens are no text, what frames a text, where words begin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from qkv.errors import DataError
from qkv.text import Tokenizer
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer, Specials
from qkv.train.batch import Bools, Ints

_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_CONTINUES = "##"  # how WordPiece goes on with one
_WORD_STARTS = ("▁", "Ġ", " ")  # how SentencePiece, byte-level BPE and tiktoken files begin a word


def ints(values: Sequence[int] | int | Ints) -> Ints:
    """As the arrays of examples are."""
    return np.asarray(values, np.int64)


@dataclass(frozen=True)
class Frame:
    """What stands around a text, and between two."""

    before: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def bare(self, tokens: Ints) -> slice:
        """Where the text lies in tokens that may be framed."""
        start = len(self.before) if tuple(tokens[: len(self.before)]) == self.before else 0
        stop = len(tokens) - len(self.after)
        framed = stop >= start and tuple(tokens[stop:]) == self.after
        return slice(start, stop if framed else len(tokens))

    def one(self, text: Ints) -> Ints:
        """before, text, after."""
        return np.concatenate([ints(self.before), text, ints(self.after)])

    def two(self, first: Ints, second: Ints) -> tuple[Ints, Ints]:
        """before, first, middle, second, after; and the segments: 1 for the second and what follows it."""
        head = np.concatenate([ints(self.before), first, ints(self.middle)])
        tail = np.concatenate([second, ints(self.after)])
        return np.concatenate([head, tail]), np.repeat(ints([0, 1]), [len(head), len(tail)])


@dataclass(frozen=True)
class Vocabulary:
    """What objectives need to know of a tokenizer."""

    size: int
    specials: Specials = field(default_factory=Specials)
    frame: Frame = field(default_factory=Frame)
    continues: Bools | None = None
    """(size,): whether the token goes on with the word before it."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """That of a tokenizer; bytes have no special tokens."""
        if not isinstance(tokenizer, PieceTokenizer):
            return cls(tokenizer.vocab_size)
        before, after = (tuple(part) for part in tokenizer.around)
        middle = after
        if isinstance(tokenizer, LibraryTokenizer):
            middle = _middle(tokenizer, before, after)
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        return cls(tokenizer.vocab_size, tokenizer.specials, Frame(before, middle, after), _continuations(pieces))

    @cached_property
    def special(self) -> Bools:
        """(size,): whether the token is none of the text."""
        given = self.specials
        roles = (given.bos, given.eos, given.unk, given.pad, given.sep, given.cls, given.mask)
        ids = {*given.controls.values(), *given.ends, *(role for role in roles if role is not None)}
        mask = np.zeros(self.size, np.bool_)
        mask[[token for token in ids if 0 <= token < self.size]] = True
        return mask

    @cached_property
    def ordinary(self) -> Ints:
        """The tokens of texts."""
        return np.flatnonzero(~self.special)

    @cached_property
    def sentinels(self) -> Ints:
        """<extra_id_0>, <extra_id_1> ... of T5."""
        found = ((_SENTINEL.fullmatch(text), token) for text, token in self.specials.controls.items())
        return ints([token for _, token in sorted((int(match[1]), token) for match, token in found if match)])

    @property
    def pad(self) -> int:
        """What padding holds; no one sees it."""
        return self.specials.pad or 0

    def starts(self) -> tuple[int, ...]:
        """What a decoder begins with."""
        given = self.specials
        first = next((token for token in (given.bos, given.pad, given.eos) if token is not None), None)
        if not given.starts and first is None:
            raise DataError("tokenizer: names no token that a decoder begins with; give one with a bos token")
        return given.starts or (first,) if first is not None else given.starts

    def words(self, tokens: Ints) -> Ints:
        """(T,): the number of the word that each token is a piece of; special tokens are words of their own."""
        if self.continues is None:
            raise DataError("whole words: this tokenizer does not say where they begin; give Example.words")
        special = self.special[tokens]
        after_special = np.concatenate([[True], special[:-1]])
        return np.cumsum(~self.continues[tokens] | special | after_special) - 1


def _middle(tokenizer: LibraryTokenizer, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    try:
        ids, _ = tokenizer.encode_pair("a", "a")
    except DataError:  # it does not say
        return after
    text = len(tokenizer.encode("a", add_special=False))
    return tuple(ids[len(before) + text : len(ids) - len(after) - text])


def _continuations(pieces: Sequence[str | bytes | None]) -> Bools | None:
    """Which pieces go on with a word, by the mark that most pieces of the vocabulary begin with; None without marks."""
    texts = [piece if isinstance(piece, str) else "" for piece in pieces]
    counts = {mark: sum(text.startswith(mark) for text in texts) for mark in (_CONTINUES, *_WORD_STARTS)}
    mark = max(counts, key=lambda one: counts[one])
    if not counts[mark]:
        return None
    marked = np.array([text.startswith(mark) for text in texts])
    return marked if mark == _CONTINUES else ~marked
