"""Objectives whose answers are decisions: a class, a class for each word, a span, or which of two answers is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qkv.errors import DataError
from qkv.train.batch import IGNORE, Batch, Example, Ints, Row, collate
from qkv.train.maker import Maker
from qkv.train.vocabulary import ints


@dataclass(frozen=True)
class Classify(Maker):
    """The class of a text, or of a pair."""

    def row(self, example: Example, random: np.random.Generator) -> Row:
        label = _labels(example, "a class")
        if example.source is not None:
            return Row(self.paired(example.source, example.tokens)[0], label.reshape(()))
        text = example.tokens[self.vocabulary.frame.bare(example.tokens)]
        return Row({"tokens": self.framed(text)}, label.reshape(()))


@dataclass(frozen=True)
class Tag(Maker):
    """The class of each word, or of each token where no words are given."""

    first_piece: bool = True
    """Whether only a word's first piece is asked; otherwise all of them are, for the same class."""

    def row(self, example: Example, random: np.random.Generator) -> Row:
        labels, words = _labels(example, "classes"), example.words
        if words is not None:
            whole = np.where(words < 0, IGNORE, labels[words.clip(min=0)])
            later = np.concatenate([[False], words[1:] == words[:-1]])
            labels = np.where(later, IGNORE, whole) if self.first_piece else whole
        if len(labels) != len(example.tokens):
            raise DataError(f"example: {len(labels)} labels for {len(example.tokens)} tokens; give one for each")
        text = self.vocabulary.frame.bare(example.tokens)
        return Row({"tokens": self.framed(example.tokens[text])}, self.alongside(labels[text], IGNORE))


@dataclass(frozen=True)
class FindSpan(Maker):
    """Where the passage (`tokens`) answers the question (`source`); labels count in the passage, -1 is no answer.

    No answer is the first token of the row (Devlin 2018, 4.3). Nothing is asked where the answer was cut off.
    """

    def row(self, example: Example, random: np.random.Generator) -> Row:
        if example.source is None:
            raise DataError("example: has no question; give it as the source")
        label, text = _labels(example, "a span"), self.vocabulary.frame.bare(example.tokens)
        inputs, start = self.paired(example.source, example.tokens, keep_first=True)
        if (label < 0).all():
            return Row(inputs, np.zeros(2, np.int64))
        targets = label - text.start + start
        inside = len(inputs["tokens"]) - len(self.vocabulary.frame.after)
        return Row(inputs, targets if targets.max() < inside else np.full(2, IGNORE, np.int64))


@dataclass(frozen=True)
class Prefer(Maker):
    """Two rows per example: the prompt with the answer that was chosen, and with the one that was rejected."""

    def batch(self, examples: Sequence[Example], random: np.random.Generator) -> Batch:
        return replace(collate([row for one in examples for row in self.rows(one)], self.vocabulary.pad), in_twos=True)

    def row(self, example: Example, random: np.random.Generator) -> Row:
        return self.rows(example)[0]

    def rows(self, example: Example) -> tuple[Row, Row]:
        """What is too long loses the end of the answer, then the beginning of the prompt."""
        if example.source is None or example.rejected is None:
            raise DataError("example: has no two answers; objective 'dpo' needs data of format 'preferences'")
        answers = [answer[: max(1, self.longest // 2)] for answer in (example.tokens, example.rejected)]
        room = self.longest + self.ahead - max(map(len, answers))
        prompt = example.source[max(0, len(example.source) - max(1, room)) :]
        first, second = (self.translated(prompt, answer) for answer in answers)
        return first, second


def _labels(example: Example, what: str) -> Ints:
    if example.labels is None:
        raise DataError(f"example: has no labels; this objective needs {what}")
    return ints(example.labels)
