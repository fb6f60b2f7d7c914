"""Records as tokens.

A text stands between the tokens that begin and end a text, where the tokenizer has them: BOS only if its files put one
there, EOS always, so that a model learns where texts end. [CLS], [SEP] and padding belong to rows and not to texts:
objectives add them. The byte tokenizer has none of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qkv.config.training import Format
from qkv.errors import CheckpointError, DataError
from qkv.text import ByteTokenizer, Tokenizer
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer
from qkv.train.data.answers import AnswerMarker
from qkv.train.data.labels import Labelled, Preference, Question, Tagged, class_number
from qkv.train.data.records import Chat, Pair, Record

Row = dict[str, list[Any]]
"""One document: its numbers in each column."""

COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("tokens",),
    "jsonl": ("tokens",),
    "parallel": ("source", "tokens"),
    "chat": ("tokens", "answers"),
    "labelled": ("source", "tokens", "labels"),
    "tagged": ("tokens", "words", "labels"),
    "questions": ("source", "tokens", "labels"),
    "preferences": ("source", "tokens", "rejected"),
}


def text_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a whole text, with those that begin and end it."""
    if not isinstance(tokenizer, PieceTokenizer):
        return tokenizer.encode(text)
    tokens, specials = tokenizer.encode(text, add_special=False), tokenizer.specials
    before = [] if specials.bos is None or specials.bos not in tokenizer.around[0] else [specials.bos]
    return [*before, *tokens, *([] if specials.eos is None else [specials.eos])]


def placed(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of a text without any around it, and where each stands: its first character, and the one behind it."""
    if isinstance(tokenizer, ByteTokenizer):
        sizes = [len(character.encode()) for character in text]
        return tokenizer.encode(text), [(at, at + 1) for at, size in enumerate(sizes) for _ in range(size)]
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.encode_with_places(text)
    raise DataError("tokenizer: does not say where its tokens stand; take one with a tokenizer.json, or bytes")


class Encoder:
    """Turns records of one format into documents."""

    def __init__(self, tokenizer: Tokenizer, form: Format, classes: Sequence[str] = ()) -> None:
        self.tokenizer, self.classes = tokenizer, classes
        self._paired: bool | None = None
        self._marker: AnswerMarker | None = None
        if form == "chat":
            if not isinstance(tokenizer, PieceTokenizer) or tokenizer.specials.chat_template is None:
                raise DataError("format 'chat' needs a tokenizer with a chat template: take that of a chat model")
            self._marker = AnswerMarker(tokenizer)

    def rows(self, record: Record) -> Iterator[Row]:
        """The documents of a record; none if it holds nothing to train on."""
        if isinstance(record, Pair):
            source, target = (text_tokens(self.tokenizer, text) for text in (record.source, record.target))
            yield {"source": source, "tokens": target}
        elif isinstance(record, Chat):
            yield from self._spoken(record)
        elif isinstance(record, Labelled):
            yield self._labelled(record)
        elif isinstance(record, Tagged):
            yield self._tagged(record)
        elif isinstance(record, Question):
            yield self._question(record)
        elif isinstance(record, Preference):
            yield self._preference(record)
        elif record.text.strip():
            yield {"tokens": text_tokens(self.tokenizer, record.text)}

    def _labelled(self, record: Labelled) -> Row:
        paired = record.pair is not None
        if self._paired is not None and self._paired != paired:
            has = "a text_pair" if paired else "no text_pair"
            raise DataError(f"{record.where}: has {has}, unlike the lines before; give one in all lines, or in none")
        self._paired = paired
        label = [class_number(record.where, record.label, self.classes)]
        first = text_tokens(self.tokenizer, record.text)
        if record.pair is None:
            return {"source": [], "tokens": first, "labels": label}
        return {"source": first, "tokens": text_tokens(self.tokenizer, record.pair), "labels": label}

    def _tagged(self, record: Tagged) -> Row:
        """A token belongs to the word in which its last character stands; spaces belong to none."""
        tokens, places = placed(self.tokenizer, " ".join(record.words))
        owner = [-1] * sum(len(word) + 1 for word in record.words)
        at = 0
        for number, word in enumerate(record.words):
            owner[at : at + len(word)] = [number] * len(word)
            at += len(word) + 1
        labels = [class_number(record.where, label, self.classes) for label in record.labels]
        return {"tokens": tokens, "words": [owner[stop - 1] if stop else -1 for _, stop in places], "labels": labels}

    def _question(self, record: Question) -> Row:
        tokens, places = placed(self.tokenizer, record.context)
        asked = text_tokens(self.tokenizer, record.question)
        if record.answer is None:
            return {"source": asked, "tokens": tokens, "labels": [-1, -1]}
        start, stop = record.start, record.start + len(record.answer)
        inside = [at for at, (first, last) in enumerate(places) if first < stop and last > start]
        if not inside:
            raise DataError(f"{record.where}: the answer {record.answer[:40]!r} has no tokens; correct it")
        return {"source": asked, "tokens": tokens, "labels": [inside[0], inside[-1]]}

    def _preference(self, record: Preference) -> Row:
        """Answers end; prompts do not, for the answer goes on where they end."""
        chosen, rejected = (self._alone(text) for text in (record.chosen, record.rejected))
        prompt = text_tokens(self.tokenizer, record.prompt)
        if isinstance(self.tokenizer, PieceTokenizer) and self.tokenizer.specials.eos is not None:
            prompt, eos = prompt[:-1], [self.tokenizer.specials.eos]
            chosen, rejected = chosen + eos, rejected + eos
        return {"source": prompt, "tokens": chosen, "rejected": rejected}

    def _alone(self, text: str) -> list[int]:
        """The tokens of a text without any around it."""
        if isinstance(self.tokenizer, PieceTokenizer):
            return self.tokenizer.encode(text, add_special=False)
        return self.tokenizer.encode(text)

    def _spoken(self, record: Chat) -> Iterator[Row]:
        if self._marker is None:
            raise AssertionError("a chat where the format is none")
        try:
            for spoken in self._marker.examples(record.messages):
                yield {"tokens": spoken.tokens, "answers": spoken.answers}
        except (DataError, CheckpointError) as error:
            raise DataError(f"{record.where}: {error}") from None
