"""Records as tokens.

A text stands between the tokens that begin and end a text, where the tokenizer has them: BOS only if its files put one
there, EOS always, so that a model learns where texts end. [CLS], [SEP] and padding belong to rows and not to texts:
objectives add them. The byte tokenizer has none of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qkv.config.training import Format
from qkv.errors import CheckpointError, DataError
from qkv.text import Tokenizer
from qkv.text.pieces import PieceTokenizer
from qkv.train.data.answers import AnswerMarker
from qkv.train.data.records import Chat, Pair, Record

Row = dict[str, list[Any]]
"""One document: its numbers in each column."""

COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("tokens",),
    "jsonl": ("tokens",),
    "parallel": ("source", "tokens"),
    "chat": ("tokens", "answers"),
}


def text_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a whole text, with those that begin and end it."""
    if not isinstance(tokenizer, PieceTokenizer):
        return tokenizer.encode(text)
    tokens, specials = tokenizer.encode(text, add_special=False), tokenizer.specials
    before = [] if specials.bos is None or specials.bos not in tokenizer.around[0] else [specials.bos]
    return [*before, *tokens, *([] if specials.eos is None else [specials.eos])]


class Encoder:
    """Turns records of one format into documents."""

    def __init__(self, tokenizer: Tokenizer, form: Format) -> None:
        self.tokenizer = tokenizer
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
        elif record.text.strip():
            yield {"tokens": text_tokens(self.tokenizer, record.text)}

    def _spoken(self, record: Chat) -> Iterator[Row]:
        if self._marker is None:
            raise AssertionError("a chat where the format is none")
        try:
            for spoken in self._marker.examples(record.messages):
                yield {"tokens": spoken.tokens, "answers": spoken.answers}
        except (DataError, CheckpointError) as error:
            raise DataError(f"{record.where}: {error}") from None
