"""From files to shards, once: `prepare` reads and tokenises what has changed, and otherwise opens what is there.

    folder/train/   folder/valid/       each a folder of shards

What a folder holds is named by a hash of everything it depends on: the tokenizer, how files are read, which records
count, and the bytes of every file. If it is the same, nothing is read but the files' bytes. If some files changed, the
tokens of the others are copied. If the tokenizer is another one, preparing is refused, and so is a folder that holds
anything else. A folder is written beside its place and takes it when it is complete.

One document is in memory at a time: a file of many gigabytes needs a separator, or to be JSONL.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qkv.checkpoint.whole_folder import whole_folder
from qkv.config.training import Format
from qkv.errors import CheckpointError, DataError
from qkv.text import Tokenizer
from qkv.train.data.encoding import COLUMNS, Encoder
from qkv.train.data.labels import Labelled, Preference, Question, Tagged, class_names
from qkv.train.data.records import Pair, Reading, Text, source_hash
from qkv.train.data.selection import Selection, Sources, Split, select
from qkv.train.data.shards import (
    FORMAT,
    MANIFEST,
    VERSION,
    Array,
    Shards,
    check_tokenizer,
    header_of,
    open_shards,
    read_manifest,
    token_type,
    tokenizer_hash,
)

SHARD = 1 << 27
"""Numbers in one file, at most."""
_BUFFER = 1 << 20


class Source(Sources, Protocol):
    """What is read of the recipe's `DataSource`."""

    @property
    def format(self) -> Format:
        """How files are read."""

    @property
    def field(self) -> str:
        """Which field of an object, or which columns of pairs."""


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    split: Split = "train",
    *,
    separator: str | None = None,
    classes: tuple[str, ...] = (),
) -> Shards:
    """The shards of one side, made if they are not there. `classes`: their names, of data that has any."""
    encoder = Encoder(tokenizer, source.format, classes)  # it may refuse, before anything is read
    reading, target = Reading(source.format, source.field, separator, classes), Path(folder) / split
    old, request = _existing(target, tokenizer), _request(source, reading, split)
    if old is not None and old.manifest is not None and old.manifest.get("request") == request:
        return old
    selection = select(source, reading, split)
    plan = _Plan.of(selection, tokenizer, request)
    if old is not None and old.identity == plan.identity:
        return old
    try:
        with whole_folder(target) as new:
            _write(new, plan, selection, encoder, old)
    except CheckpointError as error:
        # Another process may have been first.
        if not (target / MANIFEST).is_file() or read_manifest(target).get("identity") != plan.identity:
            raise DataError(str(error)) from None
    return open_shards(target, tokenizer)


def training_texts(source: Source, *, separator: str | None = None) -> Iterator[str]:
    """The texts to train on, to learn a vocabulary from: held-out ones are no part of them."""
    selection = select(source, Reading(source.format, source.field, separator), "train")
    for record in selection.everything():
        if isinstance(record, Text):
            yield record.text
        elif isinstance(record, Pair):
            yield from (record.source, record.target)
        elif isinstance(record, Labelled):
            yield from (text for text in (record.text, record.pair) if text is not None)
        elif isinstance(record, Tagged):
            yield " ".join(record.words)
        elif isinstance(record, Question):
            yield from (record.question, record.context)
        elif isinstance(record, Preference):
            yield from (record.prompt, record.chosen, record.rejected)
        else:
            contents = (message.get("content") for message in record.messages)
            yield from (content for content in contents if isinstance(content, str))


def training_classes(source: Source, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the classes of the training records; `known` if these are among them."""
    return class_names(select(source, Reading(source.format, source.field), "train").everything(), known)


def _request(source: Source, reading: Reading, split: Split) -> str:
    """A hash of what is asked for: if it is the same, so are the shards, and no record need be read to know it."""
    files = [[source_hash(name, reading) for name in names] for names in (source.train, source.valid)]
    text = json.dumps([files, reading.said, split, source.valid_share])
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class _Plan:
    """Everything that decides what the shards hold."""

    request: str
    tokenizer: str
    vocab_size: int
    reading: dict[str, Any]
    rule: dict[str, Any]
    hashes: tuple[str, ...]

    @classmethod
    def of(cls, selection: Selection, tokenizer: Tokenizer, request: str) -> _Plan:
        reading = selection.reading
        hashes = tuple(selection.content(number) for number in range(len(selection.names)))
        return cls(request, tokenizer_hash(tokenizer), tokenizer.vocab_size, reading.said, selection.rule, hashes)

    @property
    def identity(self) -> str:
        content = {name: value for name, value in asdict(self).items() if name != "request"}
        text = json.dumps([FORMAT, VERSION, content], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def manifest(self) -> dict[str, Any]:
        said = {name: value for name, value in asdict(self).items() if name != "hashes"}
        return {"format": FORMAT, "version": VERSION, "identity": self.identity, **said}


def _existing(folder: Path, tokenizer: Tokenizer) -> Shards | None:
    """What was prepared before; refused if it is not ours to replace."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file; prepare into another folder")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return None
    manifest = read_manifest(folder)
    check_tokenizer(folder, manifest, tokenizer)
    found = open_shards(folder)
    groups = manifest["columns"].values()
    ours = {MANIFEST, *(file["name"] for group in groups for file in [*group["files"], group["bounds"]])}
    if foreign := sorted(names - ours):
        raise DataError(f"{folder}: holds other files ({', '.join(foreign[:3])}); prepare into another folder")
    return found


def _write(new: Path, plan: _Plan, selection: Selection, encoder: Encoder, old: Shards | None) -> None:
    kinds: dict[str, np.dtype[Any]] = {
        "answers": np.dtype("u1"),
        "labels": np.dtype("<i4"),
        "words": np.dtype("<i4"),
    }
    columns = COLUMNS[selection.reading.format]
    header, kind = header_of(plan.identity), token_type(plan.vocab_size)
    writers = {name: _Column(new, name, kinds.get(name, kind), header) for name in columns}
    known = _reusable(plan, old)
    sources: list[dict[str, Any]] = []
    for number, (name, sha256) in enumerate(zip(selection.names, plan.hashes, strict=True)):
        documents, empty = 0, 0
        if old is not None and sha256 in known:
            first, documents, empty = known[sha256]
            for writer in writers.values():
                writer.copy(old, first, first + documents)
        else:
            for record in selection.records(number):
                rows = list(encoder.rows(record))
                for row in rows:
                    for column, writer in writers.items():
                        writer.add(row[column])
                documents, empty = documents + len(rows), empty + (not rows)
        sources.append({"name": name, "sha256": sha256, "documents": documents, "left_out": empty})
    if not sum(entry["documents"] for entry in sources):
        names = ", ".join(selection.names[:3])
        raise DataError(f"{names}: nothing to {_VERB[selection.rule['split']]}; give more text")
    groups = {name: writer.finish(plan.vocab_size) for name, writer in writers.items()}
    text = json.dumps({**plan.manifest, "sources": sources, "columns": groups}, indent=2, ensure_ascii=False)
    (new / MANIFEST).write_text(text + "\n", encoding="utf-8")


_VERB = {"train": "train on", "valid": "be tested on: the share that is held out is empty"}


_NAMES = ("identity", "request")
"""What differs whenever any file does."""


def _reusable(plan: _Plan, old: Shards | None) -> dict[str, tuple[int, int, int]]:
    """For the hash of each file whose tokens are there: its first document, how many, how many were left out."""
    manifest = {} if old is None or old.manifest is None else old.manifest
    if any(manifest.get(name) != value for name, value in plan.manifest.items() if name not in _NAMES):
        return {}
    found, first = {}, 0
    for entry in manifest["sources"]:
        found[entry["sha256"]] = first, entry["documents"], entry["left_out"]
        first += entry["documents"]
    return found


class _File:
    """A file that grows, and what the manifest says of it."""

    def __init__(self, folder: Path, name: str, header: bytes) -> None:
        self.path, self.count, self._digest = folder / name, 0, hashlib.sha256()
        self._write(header)

    def append(self, numbers: Array) -> None:
        self._write(numbers.tobytes())
        self.count += len(numbers)

    @property
    def entry(self) -> dict[str, Any]:
        return {"name": self.path.name, "count": self.count, "sha256": self._digest.hexdigest()}

    def _write(self, raw: bytes) -> None:
        self._digest.update(raw)
        with self.path.open("ab") as file:
            file.write(raw)


class _Column:
    """Writes one column."""

    def __init__(self, folder: Path, name: str, kind: np.dtype[Any], header: bytes) -> None:
        self.folder, self.name, self.kind, self.header = folder, name, kind, header
        self._buffer: list[int] = []
        self._bounds = array("q", [0])
        self._files: list[_File] = []
        self._largest = 0

    def add(self, numbers: list[int]) -> None:
        """One document."""
        self._buffer += numbers
        self._bounds.append(self._bounds[-1] + len(numbers))
        if len(self._buffer) >= _BUFFER:
            self._flush()

    def copy(self, old: Shards, first: int, last: int) -> None:
        """Documents that were tokenised before."""
        self._flush()
        columns = {
            "tokens": old.tokens,
            "source": old.source,
            "answers": old.answers,
            "labels": old.labels,
            "words": old.words,
            "rejected": old.rejected,
        }
        found = columns[self.name]
        if found is None:
            raise AssertionError(f"no {self.name} in shards that were read the same way")
        start, stop = int(found.bounds[first]), int(found.bounds[last])
        self._bounds.extend((found.bounds[first + 1 : last + 1] - start + self._bounds[-1]).tolist())
        for at in range(start, stop, _BUFFER):
            self._put(found.read(at, min(stop, at + _BUFFER)))

    def finish(self, vocab_size: int) -> dict[str, Any]:
        """What the manifest says of the column."""
        self._flush()
        if self._largest >= vocab_size and self.name in ("tokens", "source", "rejected"):
            raise DataError(f"the tokenizer gives token {self._largest}, but says that it has {vocab_size}")
        bounds = _File(self.folder, f"{self.name}-bounds.bin", self.header)
        bounds.append(np.frombuffer(self._bounds, dtype=np.int64).astype("<i8"))
        return {"dtype": self.kind.str, "files": [file.entry for file in self._files], "bounds": bounds.entry}

    def _flush(self) -> None:
        if self._buffer:
            self._put(np.array(self._buffer, dtype=np.int64))
            self._buffer = []

    def _put(self, numbers: Array) -> None:
        """Append to the last file, and begin new ones where it is full."""
        self._largest = max(self._largest, int(numbers.max()))
        while len(numbers):
            if not self._files or self._files[-1].count == SHARD:
                self._files.append(_File(self.folder, f"{self.name}-{len(self._files):05}.bin", self.header))
            room = SHARD - self._files[-1].count
            self._files[-1].append(numbers[:room].astype(self.kind))
            numbers = numbers[room:]
