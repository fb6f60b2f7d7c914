"""Endless examples in a shuffled order that can be taken up again anywhere.

    for examples in Stream(shards, context=64, batch=12, seed=0):     a list of 12 examples
        ...

Example number i of the stream is a function of i, of the seed and of the shards, and of nothing else: in epoch
e = i // rows it is the row that the permutation of (seed, e) puts at i % rows (`permutation`). So each row comes
exactly once per epoch, a batch may go over the end of one, and the position is a single number: whatever the batch was,
and however it was split, `state()` and `restore()` continue as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qkv.errors import DataError
from qkv.train.batch import Example
from qkv.train.data.permutation import below, key_of, permuted
from qkv.train.data.rows import Answered, AnyWindow, Coverage, Packed, Pairs, Rows, Single, Windows
from qkv.train.data.shards import Ints, Shards


class Stream(Iterator[list[Example]]):
    """Batches of examples, without end."""

    def __init__(
        self,
        shards: Shards,
        context: int,
        batch: int,
        seed: int,
        documents: bool = False,
        *,
        ahead: int = 0,
        random: bool = False,
    ) -> None:
        """
        documents: pack whole documents into rows, with their numbers (isolated); otherwise texts are cut into windows,
            while pairs and chats have one row each.
        ahead: how many tokens more than `context` each row holds, for targets that stand later.
        random: windows from anywhere instead of epochs (nanoGPT's way): some tokens come often, some never.
        """
        _positive(context=context, batch=batch)
        self.batch, self.seed = batch, seed
        self.rows = arranged(shards, context, documents, ahead=ahead, random=random)
        self.position = 0
        """How many examples have been given."""
        self._random = random
        self._made_of = {
            "data": shards.identity,
            "context": context,
            "documents": documents,
            "ahead": ahead,
            "random": random,
            "seed": seed,
        }

    @property
    def coverage(self) -> Coverage:
        """What an epoch holds, and what it leaves out."""
        return self.rows.coverage

    @property
    def epoch(self) -> float:
        """How many times the rows have been given, in full and in part."""
        return self.position / len(self.rows)

    @property
    def latest(self) -> str:
        """What the last batch was, in words."""
        return f"examples {self.position - self.batch} to {self.position - 1} of the data"

    def __next__(self) -> list[Example]:
        return self.draw(self.batch)

    def draw(self, count: int) -> list[Example]:
        """The next examples."""
        numbers = self.numbers(np.arange(self.position, self.position + count))
        self.position += count
        return [self.rows.example(number) for number in numbers.tolist()]

    def numbers(self, places: Ints) -> Ints:
        """The row at each place of the stream."""
        size = len(self.rows)
        if self._random:
            return below(size, key_of(self.seed), places)
        found = np.empty_like(places)
        epochs = places // size
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            found[inside] = permuted(places[inside] % size, size, key_of(self.seed, epoch))
        return found

    def state(self) -> dict[str, Any]:
        """Where the stream is, and of what: JSON values."""
        return {"kind": "stream", "position": self.position, **self._made_of}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Refused if the state is of another stream."""
        self.position = _position(state, "stream", self._made_of)


class Contiguous(Iterator[list[Example]]):
    """A text read in order, in `batch` tracks side by side: row b of each step goes on where row b of the last ended.

    For models that remember what they read (Dai 2019, Transformer-XL). The tracks are equally long and cover the text;
    neighbours share `ahead` tokens, and one more where the text cannot be divided evenly. The last step of the tracks
    is as short as the text demands; then all begin again, and `begins` is True: memories are to be emptied before.
    """

    def __init__(self, shards: Shards, context: int, batch: int, *, ahead: int = 0) -> None:
        _positive(context=context, batch=batch)
        if shards.source is not None:
            raise DataError("pairs are no text to be read in order; use Stream")
        self.batch, self._context, self._ahead, self._shards = batch, context, ahead, shards
        needed = batch + ahead
        if shards.n_tokens < needed:
            raise DataError(f"batch: {batch} tracks need {needed} tokens, but the text has {shards.n_tokens}; lower it")
        self._length = -(-(shards.n_tokens + (batch - 1) * ahead) // batch)
        spare = shards.n_tokens - self._length
        self._tracks = [spare * row // max(1, batch - 1) for row in range(batch)]
        self.steps = -(-(self._length - ahead) // context)
        """In one reading of the text."""
        self.position = 0
        """How many steps have been given."""
        self._made_of = {"data": shards.identity, "context": context, "ahead": ahead, "batch": batch}

    @property
    def begins(self) -> bool:
        """Whether the next step is the first of the text."""
        return self.position % self.steps == 0

    @property
    def epoch(self) -> float:
        """How many times the text has been read, in full and in part."""
        return self.position / self.steps

    @property
    def latest(self) -> str:
        """What the last step was, in words."""
        return f"segment {(self.position - 1) % self.steps} of {self.steps} of the data"

    def __next__(self) -> list[Example]:
        start = self.position % self.steps * self._context
        stop = min(start + self._context + self._ahead, self._length)
        self.position += 1
        return [self._example(track + start, track + stop) for track in self._tracks]

    def _example(self, start: int, stop: int) -> Example:
        answers = self._shards.answers
        may = None if answers is None else answers.read(start, stop).astype(np.bool_)
        return Example(self._shards.tokens.read(start, stop), answers=may)

    def state(self) -> dict[str, Any]:
        """Where the reading is, and of what: JSON values."""
        return {"kind": "contiguous", "position": self.position, **self._made_of}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there; memories must be those of that place. Refused if the state is of another reading."""
        self.position = _position(state, "contiguous", self._made_of)


def arranged(shards: Shards, context: int, documents: bool, *, ahead: int = 0, random: bool = False) -> Rows:
    """The rows that these documents make."""
    if shards.labels is not None or shards.rejected is not None:
        if documents or random:
            raise DataError("examples with answers stand in rows of their own: leave out documents and random")
        return Answered(shards)
    if shards.source is not None:
        if documents or random:
            raise DataError("pairs stand in rows of their own: leave out documents and random")
        return Pairs(shards, context, ahead)
    if random and (documents or shards.answers is not None):
        raise DataError("random windows would cut documents: leave out random, or documents")
    if documents:
        return Packed(shards, context, ahead)
    if shards.answers is not None:
        return Single(shards, context, ahead)
    return (AnyWindow if random else Windows)(shards, context, ahead)


def every_row(shards: Shards, context: int, documents: bool = False, *, ahead: int = 0) -> Iterator[Example]:
    """Each row once, in the order of the data: to be tested on."""
    rows = arranged(shards, context, documents, ahead=ahead)
    return (rows.example(number) for number in range(len(rows)))


def _position(state: Mapping[str, Any], kind: str, made_of: Mapping[str, Any]) -> int:
    if state.get("kind") != kind or not isinstance(state.get("position"), int) or state["position"] < 0:
        raise DataError(f"data state: not of a {kind} ({str(dict(state))[:80]}); take the checkpoint of this run")
    if other := [name for name, value in made_of.items() if state.get(name) != value]:
        name = other[0]
        what = "the texts or the tokenizer changed" if name == "data" else f"{made_of[name]} is not {state.get(name)}"
        raise DataError(f"data state: {name}: {what}; go on with what the run began with, or start a new run")
    return int(state["position"])


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise DataError(f"{name}: must be at least 1, got {number}")
