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
    dpo               prompt and answer, two rows each    the chosen answer, then the rejected one

What they share is in `maker`, and those whose answers are no tokens are in `decisions`. What is drawn at random (masks,
spans, prefixes) is drawn from the generator that `batch` is given, anew for every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from qkv import config as c
from qkv.config import training
from qkv.errors import DataError
from qkv.train.batch import IGNORE, Batch, Bools, Example, Ints, Row, collate
from qkv.train.decisions import Classify, FindSpan, Prefer, Tag
from qkv.train.maker import Maker, one_document, shifted
from qkv.train.vocabulary import Vocabulary, ints


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
        one_document(example)
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
        one_document(example)
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
        if len(examples) < self.least:
            raise DataError("batch: next_sentence takes other ends from the batch; give at least 2 examples")
        texts = [self.halves(example, random) for example in examples]
        other = random.random(len(texts)) < 0.5
        rows = []
        for index, (first, second) in enumerate(texts):
            if other[index]:
                second = texts[(index + int(random.integers(1, len(texts)))) % len(texts)][1]
            inputs, start = self.paired(first.tokens, second.tokens)
            may = self.both_may(first, second, start, len(inputs["tokens"]))
            rows.append(self.hidden(inputs, None, may, random))
        return collate(rows, self.vocabulary.pad, pairs=other.astype(np.int64))

    @property
    def least(self) -> int:
        return 2 if self.next_sentence else 1

    def halves(self, example: Example, random: np.random.Generator) -> tuple[Example, Example]:
        """A text's start and its end."""
        one_document(example)
        text = self.vocabulary.frame.bare(example.tokens)
        tokens = example.tokens[text]
        if len(tokens) < 2:
            raise DataError("example: a text of fewer than 2 tokens has no start and end; leave it out")
        cut = int(random.integers(1, len(tokens)))
        may = None if example.answers is None else example.answers[text]
        start = Example(tokens[:cut], answers=None if may is None else may[:cut])
        return start, Example(tokens[cut:], answers=None if may is None else may[cut:])

    def both_may(self, first: Example, second: Example, start: int, length: int) -> Bools | None:
        """(length,): which tokens of a framed pair may be asked, the second of which begins at `start`."""
        if first.answers is None and second.answers is None:
            return None
        frame, may = self.vocabulary.frame, np.ones(length, np.bool_)
        places = ((first, len(frame.before), start - len(frame.middle)), (second, start, length - len(frame.after)))
        for text, begin, end in places:
            if text.answers is not None:
                may[begin:end] = text.answers[: end - begin]
        return may

    def row(self, example: Example, random: np.random.Generator) -> Row:
        tokens, words, may = example.tokens, example.words, example.answers
        if example.documents is not None:  # packed texts come with what stands between them
            return self.hidden({"tokens": tokens, "documents": example.documents}, words, may, random)
        text = self.vocabulary.frame.bare(tokens)
        words = None if words is None else self.alongside(words[text], -1)
        may = None if may is None else self.alongside(may[text].astype(np.int64), 0).astype(np.bool_)
        return self.hidden({"tokens": self.framed(tokens[text])}, words, may, random)

    def hidden(
        self, inputs: dict[str, Ints], words: Ints | None, may: Bools | None, random: np.random.Generator
    ) -> Row:
        """The row with some of its tokens hidden."""
        mask, tokens = self.vocabulary.specials.mask, inputs["tokens"].copy()
        if mask is None:
            raise DataError("tokenizer: has no mask token; masked objectives need one")
        targets = np.full_like(tokens, IGNORE)
        chosen = self.choose(tokens, words, may, random)
        targets[chosen] = tokens[chosen]
        draw = random.random(len(chosen))
        ordinary = self.vocabulary.ordinary
        others = ordinary[random.integers(0, len(ordinary), len(chosen))]
        unmasked = np.where(draw < self.mask + self.random, others, tokens[chosen])
        tokens[chosen] = np.where(draw < self.mask, mask, unmasked)
        return Row(inputs | {"tokens": tokens}, targets)

    def choose(self, tokens: Ints, words: Ints | None, may: Bools | None, random: np.random.Generator) -> Ints:
        """Indices of `share` of the tokens that may be asked and are no special ones, at least one of them; whole words
        while they fit."""
        asked = ~self.vocabulary.special[tokens]
        candidates = np.flatnonzero(asked if may is None else asked & may)
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
    training.Prefer: Prefer,
}


def make(
    objective: training.Objective, vocabulary: Vocabulary, model: c.ModelConfig, context: int | None = None
) -> Maker:
    """The maker that an objective's config describes; fields of the same name are its settings."""
    maker, said = _MAKERS[type(objective)], type(objective).model_fields
    settings = {one.name: getattr(objective, one.name) for one in fields(maker) if one.name in said}
    return maker(vocabulary, model, context=context, **settings)
