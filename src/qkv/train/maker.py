"""What all objectives share: how targets are shifted, and how texts and pairs of texts become rows.

`shifted` is the one place where targets move: an example of n tokens gives n - 1 inputs, each with the token after it.
Nothing is asked at the end of one document about the start of the next. Texts are framed as their tokenizer does
([CLS] A [SEP] B [SEP]); where they come framed already, that is seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from qkv import config as c
from qkv.errors import DataError
from qkv.train.batch import IGNORE, Batch, Bools, Example, Ints, Row, collate
from qkv.train.vocabulary import Vocabulary, ints


def shifted(tokens: Ints, may: Bools | None = None, documents: Ints | None = None) -> tuple[Ints, Ints]:
    """Inputs and targets, both (n - 1,): what follows each token, if it `may` be asked and begins no new document."""
    if len(tokens) < 2:  # a row without a target; the model needs a token
        return tokens, np.full_like(tokens, IGNORE)
    targets = tokens[1:].copy()
    if may is not None:
        targets[~may[1:]] = IGNORE
    if documents is not None:
        targets[documents[1:] != documents[:-1]] = IGNORE
    return tokens[:-1], targets


@dataclass(frozen=True)
class Maker(ABC):
    """Examples to batches."""

    ahead: ClassVar[int] = 0
    """How many tokens more than the model reads an example should have, since targets stand later."""

    vocabulary: Vocabulary
    model: c.ModelConfig
    context: int | None = field(default=None, kw_only=True)
    """How many tokens a row has at most, where this class frames texts; by default what the model takes."""

    @property
    def least(self) -> int:
        """How many examples a batch needs."""
        return 1

    @property
    def longest(self) -> int:
        """How many tokens a framed row has at most."""
        return self.model.max_seq_len if self.context is None else self.context

    def raw_length(self, context: int) -> int:
        """How long examples should be so that rows have `context` tokens, `ahead` not counted."""
        return context

    def batch(self, examples: Sequence[Example], random: np.random.Generator) -> Batch:
        """One row per example, in order."""
        return collate([self.row(example, random) for example in examples], self.vocabulary.pad)

    @abstractmethod
    def row(self, example: Example, random: np.random.Generator) -> Row:
        """What the model sees of an example, and what it must answer."""

    @property
    def both(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return len(self.model.stacks) == 2

    @cached_property
    def reads_prefix(self) -> bool:
        """Whether some attention sees a prefix as a whole."""
        blocks = [block for stack in self.model.stacks.values() for block in stack.blocks]
        return any("prefix_length" in block.attention.pattern.fields for block in blocks)

    def translated(self, source: Ints, target: Ints) -> Row:
        """The target from the source: encoder and decoder, or one decoder that reads source and target in a row."""
        if self.both:
            starts = self.vocabulary.starts()
            sizes = range(min(len(starts), len(target)), -1, -1)
            there = next(size for size in sizes if starts[len(starts) - size :] == tuple(target[:size]))
            whole = np.concatenate([ints(starts), target[there:]])
            tokens, targets = shifted(whole, np.arange(len(whole)) >= len(starts))
            return Row({"tokens": tokens, "source": source}, targets)
        whole = np.concatenate([source, target])
        tokens, targets = shifted(whole, np.arange(len(whole)) >= len(source))
        return Row({"tokens": tokens} | self.prefix(len(source)), targets)

    def prefix(self, length: int) -> dict[str, Ints]:
        """The argument that says how long the prefix is, for models that read it."""
        return {"prefix_length": ints(length)} if self.reads_prefix else {}

    def framed(self, text: Ints) -> Ints:
        """One text with its frame, cut to what the model takes."""
        frame = self.vocabulary.frame
        room = self.longest - len(frame.before) - len(frame.after)
        return frame.one(text[:room])

    def alongside(self, values: Ints, filler: int) -> Ints:
        """What is known of the tokens of a text, for its framed form; `filler` for the frame."""
        frame = self.vocabulary.frame
        room = self.longest - len(frame.before) - len(frame.after)
        return np.pad(values[:room], (len(frame.before), len(frame.after)), constant_values=filler)

    def paired(self, first: Ints, second: Ints, *, keep_first: bool = False) -> tuple[dict[str, Ints], int]:
        """Two texts with their frame, as inputs, and where the second begins; the longer is cut until both fit."""
        frame = self.vocabulary.frame
        first, second = first[frame.bare(first)], second[frame.bare(second)]
        room = self.longest - len(frame.before) - len(frame.middle) - len(frame.after)
        left = len(first) if keep_first else max(room // 2, room - len(second))
        first = first[: min(left, room)]
        second = second[: room - len(first)]
        tokens, segments = frame.two(first, second)
        inputs = {"tokens": tokens} | ({"segments": segments} if self.model.embedding.n_segments > 1 else {})
        return inputs, len(frame.before) + len(first) + len(frame.middle)

    def with_end(self, tokens: Ints) -> Ints:
        """The tokens, ended by EOS once."""
        eos = self.vocabulary.specials.eos
        return tokens if eos is None or tuple(tokens[-1:]) == (eos,) else np.append(tokens, eos)


def one_document(example: Example) -> None:
    """Refuse a row of several."""
    if example.documents is not None:
        raise DataError("example: several documents in one row; leave data.documents out for this objective")
