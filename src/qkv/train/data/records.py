"""What sources hold: texts, pairs of texts, or chats, one record after the other, each with the place where it stands.

    format      a source's name                         a record
    text        a file                                  the whole file; or, with a separator, what stands between lines
                                                        that equal it ("" parts at blank lines)
    jsonl       a file, or `datasets:...`               the string in `field` of each line's object
    parallel    a file with tabs between columns        two columns of each line; `field="2,1"` says which is the
                                                        source and which the target (counted from 1; by default 1,2)
                `one.de::one.en`: two files             line n of the one and line n of the other
    chat        a JSONL file, or `datasets:...`         {"messages": [{"role": ..., "content": ...}, ...]}
    labelled, tagged, questions, preferences: the same  see `labels`

Files may be compressed (`files`). `datasets:NAME`, `datasets:NAME:SPLIT` or `datasets:NAME:CONFIG:SPLIT` is a dataset
that the library of that name loads. Empty lines, pairs of empty lines and documents without any text are left out; a
pair of which one side is empty is an error, for it shows that the sides have moved apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from qkv.config.training import Format
from qkv.errors import DataError
from qkv.text.chat import Message
from qkv.train.data.files import content_hash, read_lines, read_whole
from qkv.train.data.labels import Labelled, Preference, Question, Tagged, labelled, preference, question, tagged
from qkv.train.data.library import PREFIX, library_rows, rows_hash

TWO_FILES = "::"


@dataclass(frozen=True)
class Text:
    """A document."""

    where: str
    text: str

    def key(self) -> str:
        """Equal for equal records."""
        return self.text


@dataclass(frozen=True)
class Pair:
    """A text and its translation, or any other answer to it."""

    where: str
    source: str
    target: str

    def key(self) -> str:
        """Equal for pairs with the same source: all its translations stay together."""
        return plain(self.source)


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    where: str
    messages: tuple[Message, ...]

    def key(self) -> str:
        """Equal for equal records."""
        return json.dumps(self.messages, sort_keys=True, ensure_ascii=False)


Record = Text | Pair | Chat | Labelled | Tagged | Question | Preference


@dataclass(frozen=True)
class Reading:
    """How sources are read."""

    format: Format
    field: str = "text"
    separator: str | None = None
    classes: tuple[str, ...] = ()
    """The names of classes, in the order of their numbers."""

    @property
    def said(self) -> dict[str, Any]:
        """What decides how records become numbers: plain JSON values."""
        told = {"format": self.format, "field": self.field, "separator": self.separator}
        return told | ({"classes": list(self.classes)} if self.classes else {})

    def __post_init__(self) -> None:
        if self.separator is not None and self.format != "text":
            raise DataError(f"separator: documents of format {self.format!r} are parted already; leave it out")
        if self.format == "parallel":
            self.columns()

    def records(self, name: str) -> Iterator[Record]:
        """The records of one source."""
        found: Iterator[Record]
        if self.format == "text":
            found = _texts(name, self.separator)
        elif self.format == "parallel":
            found = _pairs(name, *self.columns())
        elif self.format == "chat":
            found = (_chat(where, row) for where, row in _rows(name))
        elif self.format in _LABELS:
            read = _LABELS[self.format]
            found = (read(where, row) for where, row in _rows(name))
        else:
            found = (_field(where, row, self.field) for where, row in _rows(name))
        return found

    def columns(self) -> tuple[int, int]:
        """The source's and the target's column, from 0."""
        given = "1,2" if self.field == "text" else self.field
        first, _, second = given.partition(",")
        if not (first.strip().isdecimal() and second.strip().isdecimal()) or min(int(first), int(second)) < 1:
            raise DataError(f"field: {self.field!r} names no two columns; give their numbers from 1, as '2,1'")
        return int(first) - 1, int(second) - 1


_LABELS: dict[str, Callable[[str, Mapping[str, Any]], Record]] = {
    "labelled": labelled,
    "tagged": tagged,
    "questions": question,
    "preferences": preference,
}


def source_hash(name: str, reading: Reading) -> str:
    """SHA-256 of what a source holds."""
    if name.startswith(PREFIX):
        return rows_hash(name)
    two = reading.format == "parallel" and TWO_FILES in name
    return "+".join(content_hash(one) for one in (name.split(TWO_FILES) if two else [name]))


def plain(text: str) -> str:
    """A text without what two copies of a sentence may differ in: case, and how much space stands where."""
    return " ".join(text.casefold().split())


def _texts(name: str, separator: str | None) -> Iterator[Text]:
    if name.startswith(PREFIX):
        raise DataError(f"{name}: a dataset has rows; read it with format 'jsonl' and the name of a field")
    if separator is None:
        text = read_whole(name)
        if not text.strip():
            raise DataError(f"{name}: nothing but spaces; give a file with text")
        yield Text(name, text)
        return
    start, lines = 1, list[str]()
    for number, line in read_lines(name):
        if line.strip() != separator:
            start = start if lines else number
            lines.append(line)
        elif lines:
            yield Text(f"{name}: line {start}", "\n".join(lines))
            lines = []
    if lines:
        yield Text(f"{name}: line {start}", "\n".join(lines))


def _rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a JSONL file or a dataset."""
    if name.startswith(PREFIX):
        yield from library_rows(name)
        return
    for number, line in read_lines(name):
        where = f"{name}: line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: no JSON ({error.msg} at character {error.colno}); correct it") from None
        except RecursionError:
            raise DataError(f"{where}: JSON nested too deeply; correct it") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object in braces, got {line.strip()[:40]!r}; correct it")
        yield where, row


def _field(where: str, row: Mapping[str, Any], field: str) -> Text:
    if field not in row:
        given = ", ".join(list(row)[:8]) or "none"
        raise DataError(f"{where}: no field {field!r}, but {given}; name the field that holds the text")
    if not isinstance(row[field], str):
        raise DataError(f"{where}: field {field!r} is {str(row[field])[:40]!r}, no text; correct it")
    return Text(where, _characters(where, row[field]))


def _characters(where: str, text: str) -> str:
    """JSON can spell halves of characters, which no UTF-8 text holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: half a character (a lone surrogate); correct it") from None
    return text


def _chat(where: str, row: Mapping[str, Any]) -> Chat:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: no "messages": [{{"role": ..., "content": ...}}, ...]; correct it')
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: messages[{number}] is no object with a role; correct it")
        if not message.keys() & {"content", "tool_calls"}:
            raise DataError(f"{where}: messages[{number}] has no content; correct it")
    _characters(where, json.dumps(messages, ensure_ascii=False))
    return Chat(where, tuple(messages))


def _pairs(name: str, source: int, target: int) -> Iterator[Pair]:
    if name.startswith(PREFIX):
        raise DataError(f"{name}: pairs are read from files; save the dataset as a file with tabs between columns")
    parts = name.split(TWO_FILES)
    if len(parts) > 2:
        raise DataError(f"{name}: {len(parts)} files; parallel text is two, as SOURCE{TWO_FILES}TARGET")
    found = _two_files(*parts) if len(parts) == 2 else _columns(name, source, target)
    for where, first, second in found:
        first, second = first.strip(), second.strip()
        if not first and not second:
            continue
        if not first or not second:
            side = "source" if not first else "target"
            raise DataError(f"{where}: the {side} is empty; correct or remove the line")
        yield Pair(where, first, second)


def _columns(name: str, source: int, target: int) -> Iterator[tuple[str, str, str]]:
    for number, line in read_lines(name):
        if not line.strip():
            continue
        cells = line.split("\t")
        where = f"{name}: line {number}"
        if len(cells) <= max(source, target):
            hint = "" if len(cells) > 1 else f"; for two files of one language each give SOURCE{TWO_FILES}TARGET"
            needed = max(source, target) + 1
            raise DataError(f"{where}: {len(cells)} columns between tabs, but column {needed} is asked for{hint}")
        yield where, cells[source], cells[target]


def _two_files(first: str, second: str) -> Iterator[tuple[str, str, str]]:
    for one, other in zip_longest(read_lines(first), read_lines(second)):
        if one is None or other is None:
            shorter, longer = (first, second) if one is None else (second, first)
            number = (one or other)[0]
            raise DataError(f"{shorter}: ends before line {number}, but {longer} goes on; the lines must correspond")
        yield f"{first}: line {one[0]}", one[1], other[1]
