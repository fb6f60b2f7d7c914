"""Rows of tokens: how documents are laid out for a model that reads `context` tokens at a time.

    Windows       the documents as one long text, cut every `context` tokens; a row may begin inside a document
    AnyWindow     the same text, one row for every place where a row can begin
    Packed        several whole documents per row, each with its number, so that a model keeps them apart
    Single        one document per row
    Pairs         one source and one target per row
    Answered      one example with its labels per row; objectives cut what is too long

`ahead` is how many tokens more a row has than the model reads: 1 where the targets stand one token later, so that every
row gives `context` targets, and every token of a text but the first is a target exactly once.

Nothing is lost silently. The last window ends where the text ends; of what it repeats of the window before, nothing is
a target again (`Example.answers`). A document that is longer than a row is cut into several (a chat, too), counted in
`cut`. A pair that is too long is left out, for half of it would teach something wrong, and counted in `left_out`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qkv.errors import DataError
from qkv.train.batch import Example
from qkv.train.data.shards import Column, Ints, Shards


@dataclass(frozen=True)
class Coverage:
    """What rows hold of the documents."""

    rows: int
    tokens: int
    """In all rows together, those that are repeated included."""
    cut: int = 0
    """Documents that stand in several rows because they are too long for one."""
    left_out: int = 0
    """Documents that are in no row."""


class Rows(Protocol):
    """Rows with numbers."""

    coverage: Coverage

    def __len__(self) -> int:
        """How many there are."""

    def example(self, number: int) -> Example:
        """One of them, read from the shards."""


class Windows:
    """The text cut every `context` tokens."""

    def __init__(self, shards: Shards, context: int, ahead: int) -> None:
        self._tokens, self._context, self._size = shards.tokens, context, context + ahead
        _check_length(shards, self._size)
        self._last = shards.n_tokens - self._size
        rows = -(-(shards.n_tokens - ahead) // context)
        self.coverage = Coverage(rows, rows * self._size)

    def __len__(self) -> int:
        return self.coverage.rows

    def example(self, number: int) -> Example:
        """The window's tokens."""
        due = number * self._context
        start = min(due, self._last)
        tokens = self._tokens.read(start, start + self._size)
        if start == due:
            return Example(tokens)
        return Example(tokens, answers=np.arange(self._size) >= due - start + self._size - self._context)


class AnyWindow:
    """A window for every place where one can begin."""

    def __init__(self, shards: Shards, context: int, ahead: int) -> None:
        self._tokens, self._size = shards.tokens, context + ahead
        _check_length(shards, self._size)
        rows = shards.n_tokens - self._size + 1
        self.coverage = Coverage(rows, rows * self._size)

    def __len__(self) -> int:
        return self.coverage.rows

    def example(self, number: int) -> Example:
        """The tokens from that place on."""
        return Example(self._tokens.read(number, number + self._size))


class Packed:
    """Several documents per row."""

    def __init__(self, shards: Shards, context: int, ahead: int) -> None:
        self._pieces = _Pieces(shards, context, ahead)
        row_of = best_fit(self._pieces.lengths, context + ahead)
        self._order = np.argsort(row_of, kind="stable")
        self._edges = np.concatenate([[0], np.cumsum(np.bincount(row_of))])
        self.coverage = self._pieces.coverage(len(self._edges) - 1)

    def __len__(self) -> int:
        return self.coverage.rows

    def example(self, number: int) -> Example:
        """The documents of a row, numbered from 0."""
        members = self._order[self._edges[number] : self._edges[number + 1]]
        parts = [self._pieces.example(int(piece)) for piece in members]
        documents = np.repeat(np.arange(len(parts)), [len(part.tokens) for part in parts])
        marked = [part.answers for part in parts if part.answers is not None]
        answers = np.concatenate(marked) if marked else None
        return Example(np.concatenate([part.tokens for part in parts]), documents=documents, answers=answers)


class Single:
    """One document per row."""

    def __init__(self, shards: Shards, context: int, ahead: int) -> None:
        self._pieces = _Pieces(shards, context, ahead)
        self.coverage = self._pieces.coverage(len(self._pieces.starts))

    def __len__(self) -> int:
        return self.coverage.rows

    def example(self, number: int) -> Example:
        """The document."""
        return self._pieces.example(number)


class Pairs:
    """One pair per row: the source has at most `context` tokens, the target `ahead` more."""

    def __init__(self, shards: Shards, context: int, ahead: int) -> None:
        if shards.source is None:
            raise AssertionError("pairs of what has no sources")
        self._source, self._target = shards.source, shards.tokens
        fits = (shards.source.lengths <= context) & (shards.tokens.lengths <= context + ahead)
        self._kept = fits.nonzero()[0]
        if not len(self._kept):
            shortest = int(np.maximum(shards.source.lengths, shards.tokens.lengths - ahead).min())
            raise DataError(f"context: no pair fits into {context} tokens, the shortest needs {shortest}; raise it")
        tokens = int(shards.source.lengths[fits].sum() + shards.tokens.lengths[fits].sum())
        self.coverage = Coverage(len(self._kept), tokens, left_out=int((~fits).sum()))

    def __len__(self) -> int:
        return self.coverage.rows

    def example(self, number: int) -> Example:
        """Source and target."""
        document = int(self._kept[number])
        return Example(self._target.document(document), source=self._source.document(document))


class Answered:
    """One example with its labels per row."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        tokens = shards.n_tokens + (0 if shards.source is None else int(shards.source.bounds[-1]))
        self.coverage = Coverage(shards.n_documents, tokens)

    def __len__(self) -> int:
        return self.coverage.rows

    def example(self, number: int) -> Example:
        """The text, or both, and what is known of them."""
        shards, tokens = self._shards, self._shards.tokens.document(number)
        optional = (shards.source, shards.words, shards.labels, shards.rejected)
        source, words, labels, rejected = (None if one is None else one.document(number) for one in optional)
        if source is not None and not len(source) and rejected is None:
            source = None  # one text
        return Example(tokens, source, words=words, labels=labels, rejected=rejected)


class _Pieces:
    """Documents, those that are too long for a row in pieces that begin every `context` tokens."""

    def __init__(self, shards: Shards, context: int, ahead: int) -> None:
        self._tokens: Column = shards.tokens
        self._answers = shards.answers
        lengths = shards.tokens.lengths
        counts = np.maximum(1, -(-(lengths - ahead) // context))
        self._cut = int((counts > 1).sum())
        documents = np.repeat(np.arange(len(lengths)), counts)
        turn = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.starts: Ints = shards.tokens.bounds[documents] + turn * context
        self.lengths: Ints = np.minimum(shards.tokens.bounds[documents + 1] - self.starts, context + ahead)

    def example(self, number: int) -> Example:
        start = int(self.starts[number])
        stop = start + int(self.lengths[number])
        answers = None if self._answers is None else self._answers.read(start, stop).astype(np.bool_)
        return Example(self._tokens.read(start, stop), answers=answers)

    def coverage(self, rows: int) -> Coverage:
        return Coverage(rows, int(self.lengths.sum()), cut=self._cut)


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """The row of each piece: the longest first, each into the fullest row that still has room for it.

    Best-fit decreasing needs at most 11/9 of the fewest rows possible, and 2/3 of a row more (Dosa 2007); for documents
    it was proposed by Ding et al. 2024, arXiv 2404.10830. One step per piece: rows lie in stacks by the room they have
    left, and the bits of one integer say which stacks hold any.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
    filled, rows = 0, 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = filled >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = stacks[room].pop()
            if not stacks[room]:
                filled ^= 1 << room
        else:
            room, row, rows = capacity, rows, rows + 1
        row_of[piece] = row
        stacks[room - length].append(row)
        filled |= 1 << (room - length)
    return row_of


def _check_length(shards: Shards, size: int) -> None:
    """Refuse a text that is shorter than one row."""
    if shards.n_tokens < size:
        raise DataError(f"context: a row needs {size} tokens, but the text has {shards.n_tokens}; shorten it")
