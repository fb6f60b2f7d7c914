"""Examples with answers that are no texts, one JSON object per line.

    format        a line
    labelled      {"text": "...", "label": "spam"}                          a class for a text, or for two:
                  {"text": "...", "text_pair": "...", "label": 2}
    tagged        {"words": ["Ada", "lives"], "labels": ["B-PER", "O"]}     a class for each word
    questions     {"question": "...", "context": "...", "answer": "...", "answer_start": 17}
                                                                            where the context answers, counted in
                                                                            characters from 0; "answer": null where it
                                                                            does not
    preferences   {"prompt": "...", "chosen": "...", "rejected": "..."}     two answers, the better one first

Classes are names, or numbers from 0. `class_names` collects them: numbers mean themselves, names are sorted, so that
the same files give the same numbers; whoever has a list already (`classes.json` of a model, `id2label` of a checkpoint)
keeps its order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.errors import DataError

CLASSES = "classes.json"


@dataclass(frozen=True)
class Labelled:
    """A text, or two, and its class."""

    where: str
    text: str
    pair: str | None
    label: str | int

    def key(self) -> str:
        """Equal for equal texts."""
        return f"{self.text}\n{self.pair or ''}"


@dataclass(frozen=True)
class Tagged:
    """Words, and the class of each."""

    where: str
    words: tuple[str, ...]
    labels: tuple[str | int, ...]

    def key(self) -> str:
        """Equal for equal texts."""
        return " ".join(self.words)


@dataclass(frozen=True)
class Question:
    """A question, and where its context answers it: `start` in characters; None where it does not."""

    where: str
    question: str
    context: str
    answer: str | None
    start: int

    def key(self) -> str:
        """Equal for equal contexts, so that all questions about one stay together."""
        return self.context


@dataclass(frozen=True)
class Preference:
    """Two answers to a prompt."""

    where: str
    prompt: str
    chosen: str
    rejected: str

    def key(self) -> str:
        """Equal for equal prompts."""
        return self.prompt


def labelled(where: str, row: Mapping[str, Any]) -> Labelled:
    """A line of format `labelled`."""
    text = _text(where, row, "text")
    pair = None if row.get("text_pair") is None else _text(where, row, "text_pair")
    return Labelled(where, text, pair, _label(where, row.get("label")))


def tagged(where: str, row: Mapping[str, Any]) -> Tagged:
    """A line of format `tagged`."""
    words, labels = row.get("words"), row.get("labels")
    for name, found in (("words", words), ("labels", labels)):
        if not isinstance(found, list) or not found:
            raise DataError(f'{where}: "{name}" is {str(found)[:40]!r}, no list; give "words": [...], "labels": [...]')
    assert isinstance(words, list)
    assert isinstance(labels, list)
    if len(words) != len(labels):
        raise DataError(f"{where}: {len(labels)} labels for {len(words)} words; give one for each")
    for number, word in enumerate(words):
        if not isinstance(word, str) or not word.strip() or word != "".join(word.split()):
            raise DataError(f"{where}: words[{number}] is {word!r}, no single word; correct it")
    return Tagged(where, tuple(_whole(where, word) for word in words), tuple(_label(where, label) for label in labels))


def question(where: str, row: Mapping[str, Any]) -> Question:
    """A line of format `questions`."""
    asked, context = _text(where, row, "question"), _text(where, row, "context")
    answer, start = row.get("answer"), row.get("answer_start", -1)
    if answer is None or answer == "":
        return Question(where, asked, context, None, -1)
    if not isinstance(answer, str) or type(start) is not int:
        raise DataError(f'{where}: "answer" must be a text and "answer_start" a whole number; correct them')
    there = context[max(start, 0) : max(start, 0) + len(answer)]
    if start < 0 or there != answer:
        found = context.find(answer)
        remedy = f"it is at {found}" if found >= 0 else "it is nowhere in the context"
        raise DataError(f"{where}: the answer {answer[:40]!r} is not at answer_start {start}; {remedy}")
    return Question(where, asked, context, answer, start)


def preference(where: str, row: Mapping[str, Any]) -> Preference:
    """A line of format `preferences`."""
    prompt, chosen, rejected = (_text(where, row, name) for name in ("prompt", "chosen", "rejected"))
    if chosen == rejected:
        raise DataError(f"{where}: the chosen answer is the rejected one; remove the line")
    return Preference(where, prompt, chosen, rejected)


def _text(where: str, row: Mapping[str, Any], name: str) -> str:
    found = row.get(name)
    if not isinstance(found, str) or not found.strip():
        given = ", ".join(list(row)[:8]) or "none"
        what = f"no {name!r}" if name not in row else f"{name!r} is {str(found)[:40]!r}, no text"
        raise DataError(f"{where}: {what} (its fields: {given}); correct it")
    return _whole(where, found)


def _whole(where: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: half a character (a lone surrogate); correct it") from None
    return text


def _label(where: str, found: Any) -> str | int:
    if (type(found) is int and found >= 0) or (isinstance(found, str) and found):
        return found
    raise DataError(f"{where}: label {str(found)[:40]!r} is no class; give a name, or a number from 0")


# The names of classes


def class_names(records: Iterable[Any], known: Sequence[str] = ()) -> tuple[str, ...]:
    """The classes of all records, in the order of their numbers; `known` if it has them all."""
    numbers, names = set[int](), set[str]()
    for record in records:
        for label in record.labels if isinstance(record, Tagged) else (record.label,):
            if isinstance(label, int):
                numbers.add(label)
            else:
                names.add(label)
        if numbers and names:
            raise DataError(f"{record.where}: labels are names in some lines and numbers in others; choose one")
    if numbers:
        return tuple(known) if len(known) > max(numbers) else tuple(str(number) for number in range(max(numbers) + 1))
    return tuple(known) if names <= set(known) else tuple(sorted(names))


def class_number(where: str, label: str | int, names: Sequence[str]) -> int:
    """The number of a class."""
    if isinstance(label, int) and label < len(names):
        return label
    if label in names:
        return list(names).index(str(label))
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise DataError(f"{where}: label {label!r} is none of the classes to train on ({shown}); correct it")


def names_beside(checkpoint: str | Path) -> tuple[str, ...]:
    """What a saved model says that its classes are called; nothing if it does not."""
    for name, field in ((CLASSES, None), ("config.json", "id2label")):
        try:
            said = json.loads((Path(checkpoint) / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if field is not None:
            said = said.get(field) or {}
            said = [said[str(number)] for number in range(len(said)) if str(number) in said]
        if said:
            return tuple(map(str, said))
    return ()
