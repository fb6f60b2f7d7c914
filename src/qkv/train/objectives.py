"""Objectives: what of an example the model sees, and what it must answer.

    objective         inputs                              targets
    next-token        t_1 .. t_(n-1)                      t_2 .. t_n
    answers           the same                            only those that the assistant said
    prefix            the same, its start seen by all     only those behind the start
    masked            t with 15 % hidden                  what was hidden, at its place
    span-corruption   encoder: text, spans as sentinels   decoder: each sentinel and its span
    seq2seq           encoder: source                     decoder: t_1 .. t_n; it reads start t_1 .. t_(n-1)
    classify          a text or a pair                    its class
    tag               a text                              each word's class, at its first piece
    span              question and passage                the first and the last token of the answer

`shifted` is the one place where targets move: an example of n tokens gives n - 1 inputs, each with the token after it.
Nothing is asked at the end of one document about the start of the next. Texts are framed as their tokenizer does
([CLS] A [SEP] B [SEP]); where they come framed already, that is seen. What is drawn at random (masks, spans, prefixes)
is drawn from the generator that `batch` is given, anew for every batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import numpy as np

from qkv import config as c
from qkv.config import training
from qkv.errors import DataError
from qkv.train.batch import IGNORE, Batch, Bools, Example, Ints, Row, collate
from qkv.train.vocabulary import Vocabulary, ints

# Shifting


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


# The makers


@dataclass(frozen=True)
class Maker(ABC):
    """Examples to batches."""

    ahead: ClassVar[int] = 0
    """How many tokens more than the model reads an example should have, since targets stand later."""

    vocabulary: Vocabulary
    model: c.ModelConfig

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
        room = self.model.max_seq_len - len(frame.before) - len(frame.after)
        return frame.one(text[:room])

    def alongside(self, values: Ints, filler: int) -> Ints:
        """What is known of the tokens of a text, for its framed form; `filler` for the frame."""
        frame = self.vocabulary.frame
        room = self.model.max_seq_len - len(frame.before) - len(frame.after)
        return np.pad(values[:room], (len(frame.before), len(frame.after)), constant_values=filler)

    def paired(self, first: Ints, second: Ints, *, keep_first: bool = False) -> tuple[dict[str, Ints], int]:
        """Two texts with their frame, as inputs, and where the second begins; the longer is cut until both fit."""
        frame = self.vocabulary.frame
        first, second = first[frame.bare(first)], second[frame.bare(second)]
        room = self.model.max_seq_len - len(frame.before) - len(frame.middle) - len(frame.after)
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


@dataclass(frozen=True)
class NextToken(Maker):
    """Each token from those before it, where the example lets it be a target."""

    ahead = 1
    answers: bool = False
    """Whether the example has to say which tokens these are."""

    def row(self, example: Example, random: np.random.Generator) -> Row:
        if self.answers and example.answers is None:
            raise DataError("example: marks no answers; objective 'answers' needs data of format 'chat'")
        tokens, targets = shifted(example.tokens, example.answers, example.documents)
        if example.documents is None:
            return Row({"tokens": tokens}, targets)
        return Row({"tokens": tokens, "documents": example.documents[: len(tokens)]}, targets)


@dataclass(frozen=True)
class Answers(NextToken):
    """What the assistant says, from the conversation so far."""

    answers: bool = True


@dataclass(frozen=True)
class Prefix(Maker):
    """The end of a text from its start; of a pair, the second from the first."""

    ahead = 1
    share: float = 1.0
    """The start is at most this share of the text, of which one token at least remains."""

    def row(self, example: Example, random: np.random.Generator) -> Row:
        _one_document(example)
        if example.source is not None:
            return self.translated(example.source, example.tokens)
        size = len(example.tokens)
        cut = int(random.integers(1, max(1, min(int(self.share * size), size - 1)) + 1))
        may = np.arange(size) >= cut
        tokens, targets = shifted(example.tokens, may if example.answers is None else may & example.answers)
        return Row({"tokens": tokens} | self.prefix(cut), targets)


@dataclass(frozen=True)
class Seq2Seq(Maker):
    """The target, ended by EOS, from the source."""

    def row(self, example: Example, random: np.random.Generator) -> Row:
        if example.source is None:
            raise DataError("example: has no source; objective 'seq2seq' needs data of format 'parallel'")
        return self.translated(example.source, self.with_end(example.tokens))


@dataclass(frozen=True)
class SpanCorruption(Maker):
    """Spans of a text give way to sentinels, and are written after them (Raffel 2019, 3.1.4)."""

    density: float = 0.15
    mean_length: float = 3.0

    def row(self, example: Example, random: np.random.Generator) -> Row:
        _one_document(example)
        frame, sentinels = self.vocabulary.frame, self.vocabulary.sentinels
        if not len(sentinels):
            raise DataError("tokenizer: has no sentinels <extra_id_0>, <extra_id_1> ...; span corruption needs them")
        text = example.tokens[frame.bare(example.tokens)]
        if len(text) < 2:  # nothing can be hidden
            return self.translated(self.with_end(text), self.with_end(text[:0]))
        kept, hidden = self.spans(len(text), random)
        pieces = np.split(text, np.cumsum(np.stack([kept, hidden], 1).reshape(-1))[:-1])
        source, target = list[Ints](), list[Ints]()
        for sentinel, before, span in zip(sentinels, pieces[0::2], pieces[1::2], strict=False):
            source += [before, ints([sentinel])]
            target += [ints([sentinel]), span]
        return self.translated(self.with_end(np.concatenate(source)), self.with_end(np.concatenate(target)))

    def spans(self, length: int, random: np.random.Generator) -> tuple[Ints, Ints]:
        """Lengths of what is kept and of what is hidden, in turn: as many of both, none of them empty."""
        noise = min(max(round(length * self.density), 1), length - 1)
        count = min(max(round(noise / self.mean_length), 1), noise, length - noise, len(self.vocabulary.sentinels))
        return _parts(length - noise, count, random), _parts(noise, count, random)

    def raw_length(self, context: int) -> int:
        """The longest text whose corrupted form, ended by EOS, has at most `context` tokens."""
        room, length = context - int(self.vocabulary.specials.eos is not None), context
        random = np.random.default_rng(0)  # it decides where spans are, not how many tokens are in them
        while True:
            kept, _ = self.spans(length + 1, random)
            if kept.sum() + len(kept) > room:
                return length
            length += 1


def _parts(total: int, count: int, random: np.random.Generator) -> Ints:
    """`total` in `count` parts, none empty, each way as likely."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)


@dataclass(frozen=True)
class Masked(Maker):
    """Hidden tokens from both sides (Devlin 2018, 3.1): of those chosen 80 % masked, 10 % random, 10 % as they are."""

    share: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_word: bool = False
    next_sentence: bool = False
    """Rows are pairs: a text's start, and its end or, half of the time, that of another text of the batch."""

    def raw_length(self, context: int) -> int:
        frame = self.vocabulary.frame
        around = len(frame.before) + len(frame.after) + (len(frame.middle) if self.next_sentence else 0)
        return max(1, context - around)

    def batch(self, examples: Sequence[Example], random: np.random.Generator) -> Batch:
        """One row per example; with `next_sentence`, `pairs` says whether the row goes on as the text did (0)."""
        if not self.next_sentence:
            return super().batch(examples, random)
        if len(examples) < 2:
            raise DataError("batch: next_sentence takes other ends from the batch; give at least 2 examples")
        texts = [example.tokens[self.vocabulary.frame.bare(example.tokens)] for example in examples]
        if min(len(text) for text in texts) < 2:
            raise DataError("example: a text of fewer than 2 tokens has no start and end; leave it out")
        halves = [np.split(text, [int(random.integers(1, len(text)))]) for text in texts]
        other = random.random(len(texts)) < 0.5
        rows = []
        for index, (first, second) in enumerate(halves):
            if other[index]:
                second = halves[(index + int(random.integers(1, len(texts)))) % len(texts)][1]
            inputs, _ = self.paired(first, second)
            rows.append(self.hidden(inputs, None, random))
        return collate(rows, self.vocabulary.pad, pairs=other.astype(np.int64))

    def row(self, example: Example, random: np.random.Generator) -> Row:
        tokens, words = example.tokens, example.words
        if example.documents is not None:  # packed texts come with what stands between them
            return self.hidden({"tokens": tokens, "documents": example.documents}, words, random)
        text = self.vocabulary.frame.bare(tokens)
        words = None if words is None else self.alongside(words[text], -1)
        return self.hidden({"tokens": self.framed(tokens[text])}, words, random)

    def hidden(self, inputs: dict[str, Ints], words: Ints | None, random: np.random.Generator) -> Row:
        """The row with some of its tokens hidden."""
        mask, tokens = self.vocabulary.specials.mask, inputs["tokens"].copy()
        if mask is None:
            raise DataError("tokenizer: has no mask token; masked objectives need one")
        targets = np.full_like(tokens, IGNORE)
        chosen = self.choose(tokens, words, random)
        targets[chosen] = tokens[chosen]
        draw = random.random(len(chosen))
        ordinary = self.vocabulary.ordinary
        others = ordinary[random.integers(0, len(ordinary), len(chosen))]
        unmasked = np.where(draw < self.mask + self.random, others, tokens[chosen])
        tokens[chosen] = np.where(draw < self.mask, mask, unmasked)
        return Row(inputs | {"tokens": tokens}, targets)

    def choose(self, tokens: Ints, words: Ints | None, random: np.random.Generator) -> Ints:
        """Indices of `share` of the tokens that are no special ones, at least one; whole words while they fit."""
        candidates = np.flatnonzero(~self.vocabulary.special[tokens])
        if not len(candidates):
            return candidates
        count = max(1, round(self.share * len(candidates)))
        if not self.whole_word:
            return np.sort(random.choice(candidates, count, replace=False))
        numbers = self.vocabulary.words(tokens) if words is None else words
        _, word = np.unique(numbers[candidates], return_inverse=True)
        sizes, taken, left = np.bincount(word), [], count
        order = random.permutation(len(sizes))
        for number in order:
            if sizes[number] <= left:
                taken.append(number)
                left -= sizes[number]
        return candidates[np.isin(word, taken or [order[sizes[order].argmin()]])]


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


def _one_document(example: Example) -> None:
    if example.documents is not None:
        raise DataError("example: several documents in one row; leave data.documents out for this objective")


def _labels(example: Example, what: str) -> Ints:
    if example.labels is None:
        raise DataError(f"example: has no labels; this objective needs {what}")
    return ints(example.labels)


_MAKERS: dict[type[training.Objective], type[Maker]] = {
    training.NextToken: NextToken,
    training.Answers: Answers,
    training.PrefixLM: Prefix,
    training.Seq2Seq: Seq2Seq,
    training.SpanCorruption: SpanCorruption,
    training.Masked: Masked,
    training.Classify: Classify,
    training.Tag: Tag,
    training.FindSpan: FindSpan,
}


def make(objective: training.Objective, vocabulary: Vocabulary, model: c.ModelConfig) -> Maker:
    """The maker that an objective's config describes; fields of the same name are its settings."""
    maker, said = _MAKERS[type(objective)], type(objective).model_fields
    settings = {one.name: getattr(objective, one.name) for one in fields(maker) if one.name in said}
    return maker(vocabulary, model, **settings)
