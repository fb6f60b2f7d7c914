"""Sources as records, and what is wrong in them, by line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qkv.errors import DataError
from qkv.train.data import Chat, Pair, Reading, Text
from qkv.train.data.records import source_hash

from .toys import written


def said(name: str, reading: Reading) -> list[Any]:
    """The records without their places."""
    found: list[Any] = []
    for record in reading.records(name):
        if isinstance(record, Text):
            found.append(record.text)
        elif isinstance(record, Pair):
            found.append((record.source, record.target))
        else:
            found.append(list(record.messages))
    return found


def test_a_file_is_a_document(tmp_path: Path) -> None:
    name = written(tmp_path, "a.txt", "one\n\ntwo\n")
    assert list(Reading("text").records(name)) == [Text(name, "one\n\ntwo\n")]


def test_separators_part_documents(tmp_path: Path) -> None:
    name = written(tmp_path, "a.txt", "\n\none\nmore\n \n\ntwo\n<end>\n<end>\nthree")
    found = list(Reading("text", separator="").records(name))
    assert [one.text for one in found if isinstance(one, Text)] == ["one\nmore", "two\n<end>\n<end>\nthree"]
    assert [one.where for one in found] == [f"{name}: line 3", f"{name}: line 7"]
    assert said(name, Reading("text", separator="<end>")) == ["\n\none\nmore\n \n\ntwo", "three"]


def test_jsonl_gives_one_field(tmp_path: Path) -> None:
    name = written(tmp_path, "a.jsonl", '{"text": "a", "title": "t"}\n\n{"title": "é\\n", "text": "b"}\n')
    assert said(name, Reading("jsonl")) == ["a", "b"]
    assert said(name, Reading("jsonl", "title")) == ["t", "é\n"]
    assert [one.where for one in Reading("jsonl").records(name)] == [f"{name}: line 1", f"{name}: line 3"]


def test_pairs_come_from_columns(tmp_path: Path) -> None:
    name = written(tmp_path, "a.tsv", "\ufeffHi.\tHallo!\tCC-BY\n\nRun!\tLauf! \n\n")
    assert said(name, Reading("parallel")) == [("Hi.", "Hallo!"), ("Run!", "Lauf!")]
    assert said(name, Reading("parallel", "2,1")) == [("Hallo!", "Hi."), ("Lauf!", "Run!")]


def test_pairs_come_from_two_files(tmp_path: Path) -> None:
    first, second = written(tmp_path, "a.de", "eins\n\nzwei\n"), written(tmp_path, "a.en", "one\n \ntwo")
    both = f"{first}::{second}"
    assert said(both, Reading("parallel")) == [("eins", "one"), ("zwei", "two")]
    hashes = {source_hash(name, Reading("parallel")) for name in (both, f"{second}::{first}", first)}
    assert len(hashes) == 3


def test_chats_are_lists_of_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    name = written(tmp_path, "a.jsonl", json.dumps({"messages": messages, "id": 7}))
    assert list(Reading("chat").records(name)) == [Chat(f"{name}: line 1", tuple(messages))]


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        ("jsonl", '{"text": "a"}\n{"text": \n', r"line 2: no JSON \(Expecting value at character"),
        ("jsonl", '{"text": "a"} {"text": "b"}', r"line 1: no JSON \(Extra data at character 15\)"),
        ("jsonl", '\n["a"]', r"line 2: expected an object in braces, got '\[\"a\"\]'"),
        ("jsonl", '{"title": "a", "body": "b"}', "line 1: no field 'text', but title, body; name the field"),
        ("jsonl", "{}", "line 1: no field 'text', but none"),
        ("jsonl", '{"text": 7}', "line 1: field 'text' is '7', no text"),
        ("jsonl", '{"text": null}', "line 1: field 'text' is 'None', no text"),
        ("jsonl", '{"text": "\\ud83d"}', "line 1: half a character"),
        ("jsonl", "[" * 100_000, "line 1: JSON nested too deeply"),
        ("text", " \n\n", "nothing but spaces"),
        ("parallel", "a\tb\nc\n", "line 2: 1 columns between tabs, but column 2 is asked for; for two files"),
        ("parallel", "a\tb\nc\t \n", "line 2: the target is empty"),
        ("parallel", "a\tb\n\tc\n", "line 2: the source is empty"),
        ("chat", '{"text": "a"}', 'line 1: no "messages"'),
        ("chat", '{"messages": []}', 'line 1: no "messages"'),
        ("chat", '{"messages": ["a"]}', r"line 1: messages\[0\] is no object with a role"),
        ("chat", '{"messages": [{"content": "a"}]}', r"line 1: messages\[0\] is no object with a role"),
        ("chat", '{"messages": [{"role": "user"}]}', r"line 1: messages\[0\] has no content"),
        ("chat", '{"messages": [{"role": "user", "content": "\\ud83d"}]}', "line 1: half a character"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, form: Any, text: str, message: str) -> None:
    name = written(tmp_path, "a.txt", text)
    with pytest.raises(DataError, match=message) as caught:
        list(Reading(form).records(name))
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)


def test_files_of_different_length_are_refused(tmp_path: Path) -> None:
    first, second = written(tmp_path, "a.de", "eins\nzwei\n"), written(tmp_path, "a.en", "one\n")
    with pytest.raises(DataError, match=r"a.en: ends before line 2, but .*a.de goes on"):
        list(Reading("parallel").records(f"{first}::{second}"))
    with pytest.raises(DataError, match=r"a.en: ends before line 2"):
        list(Reading("parallel").records(f"{second}::{first}"))
    with pytest.raises(DataError, match="3 files; parallel text is two"):
        list(Reading("parallel").records(f"{first}::{second}::{first}"))


@pytest.mark.parametrize("field", ["1", "0,1", "de,en", "1,2,3", "-1,2"])
def test_columns_are_two_numbers(field: str) -> None:
    with pytest.raises(DataError, match="names no two columns"):
        Reading("parallel", field)


def test_only_texts_have_separators() -> None:
    with pytest.raises(DataError, match="parted already"):
        Reading("jsonl", separator="")


# The library `datasets`, which a module of that name stands for


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*names: str, split: str) -> list[dict[str, Any]]:
        asked.append((*names, split))
        if names[0] == "unknown":
            raise FileNotFoundError("Dataset 'unknown' doesn't exist\non the Hub")
        return [] if split == "none" else [{"text": f"{split} {number}", "n": number} for number in range(2)]

    module = ModuleType("datasets")
    vars(module)["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_a_dataset_is_read_row_by_row(library: list[tuple[Any, ...]]) -> None:
    found = list(Reading("jsonl").records("datasets:owner/name"))
    assert found == [Text("datasets:owner/name: row 1", "train 0"), Text("datasets:owner/name: row 2", "train 1")]
    assert said("datasets:owner/name:test", Reading("jsonl")) == ["test 0", "test 1"]
    assert said("datasets:owner/name:small:test", Reading("jsonl")) == ["test 0", "test 1"]
    assert library == [("owner/name", "train"), ("owner/name", "test"), ("owner/name", "small", "test")]


def test_a_dataset_has_a_hash_of_its_rows(library: list[tuple[Any, ...]]) -> None:
    first, again, other = (source_hash(f"datasets:a:{split}", Reading("jsonl")) for split in ("x", "x", "y"))
    assert first == again != other


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("datasets:unknown", "jsonl", r"cannot load it \(Dataset 'unknown' doesn't exist on the Hub\)"),
        ("datasets:a:none", "jsonl", "has no rows"),
        ("datasets:", "jsonl", "expected datasets:NAME"),
        ("datasets:a:b:c:d", "jsonl", "expected datasets:NAME"),
        ("datasets:a:", "jsonl", "expected datasets:NAME"),
        ("datasets:a", "text", "read it with format 'jsonl'"),
        ("datasets:a", "parallel", "pairs are read from files"),
        ("datasets:a", "chat", 'row 1: no "messages"'),
    ],
)
def test_what_is_wrong_with_a_dataset(library: list[tuple[Any, ...]], name: str, form: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(Reading(form).records(name))


def test_a_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        list(Reading("jsonl").records("datasets:a"))


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    # The third line is broken; the first two have been given by then.
    name = written(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": "b"}\n{\n')
    records: Iterator[Any] = Reading("jsonl").records(name)
    assert [next(records).text, next(records).text] == ["a", "b"]
    with pytest.raises(DataError, match="line 3"):
        next(records)
