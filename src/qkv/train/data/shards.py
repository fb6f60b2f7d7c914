"""Tokenised text on disk, mapped into memory: what `prepare` writes and streams read.

    manifest.json        what was tokenised, with which tokenizer, how many tokens of which type, a hash of every file
    tokens-00000.bin     a header of 24 bytes, then the tokens one after the other: uint16 if the vocabulary has at most
    tokens-00001.bin     65,536 tokens, else uint32; a file holds at most 2^27, and a document may go over its end
    tokens-bounds.bin    the header, then int64: where each document begins, and at last where the last one ends

A folder has one such group of files per column: `tokens` always; `source` for pairs, whose `tokens` are the targets;
`answers` (uint8, 1 where the model speaks) for chats; `labels` and `words` (int32) where there are classes. All numbers
are little-endian.

The header is b"QKVSHARD" and the first 16 bytes of the hash that names this preparation: a file that belongs to
another one is refused, and so is one whose length differs from the manifest's. `verify` compares every byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qkv.errors import DataError
from qkv.text import Tokenizer

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

MANIFEST, FORMAT, VERSION = "manifest.json", "qkv-shards", 1
"""The version changes whenever the same files would give other tokens, so that old shards are refused."""
MAGIC, HEADER = b"QKVSHARD", 24
_BLOCK = 1 << 24


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 of all that a tokenizer is."""
    text = json.dumps(tokenizer.to_dict(), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest of the two types that holds every token."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True)
class Column:
    """One sequence of numbers in several pieces, and the documents in it."""

    pieces: tuple[Array, ...]
    starts: Ints
    """Where each piece begins, and where the last ends."""
    bounds: Ints
    """Where each document begins, and where the last ends."""

    @classmethod
    def of(cls, pieces: Sequence[Array], bounds: Ints) -> Column:
        """A column of pieces that follow each other."""
        return cls(tuple(pieces), np.cumsum([0, *map(len, pieces)]), bounds)

    @property
    def lengths(self) -> Ints:
        """How long each document is."""
        return np.diff(self.bounds)

    def read(self, start: int, stop: int) -> Array:
        """The numbers from `start` to `stop`, in memory; int64."""
        found = np.empty(max(0, stop - start), dtype=np.int64)
        at = int(np.searchsorted(self.starts, start, side="right")) - 1
        done = start
        while done < stop:
            first, end = int(self.starts[at]), min(stop, int(self.starts[at + 1]))
            found[done - start : end - start] = self.pieces[at][done - first : end - first]
            done, at = end, at + 1
        return found

    def document(self, number: int) -> Array:
        """The numbers of one document."""
        return self.read(int(self.bounds[number]), int(self.bounds[number + 1]))


@dataclass(frozen=True)
class Shards:
    """Tokenised documents."""

    tokens: Column
    vocab_size: int
    identity: str
    """Differs whenever the content does."""
    source: Column | None = None
    answers: Column | None = None
    labels: Column | None = None
    words: Column | None = None
    rejected: Column | None = None
    manifest: Mapping[str, Any] | None = None
    """None for what never was on disk."""

    @property
    def n_documents(self) -> int:
        """How many there are."""
        return len(self.tokens.bounds) - 1

    @property
    def n_tokens(self) -> int:
        """How many `tokens` all documents have together; sources are not counted."""
        return int(self.tokens.bounds[-1])


def in_memory(
    documents: Sequence[Sequence[int]],
    vocab_size: int,
    *,
    sources: Sequence[Sequence[int]] | None = None,
    answers: Sequence[Sequence[bool]] | None = None,
) -> Shards:
    """Documents of tokens without any file: made-up tasks, and tests."""
    given = {"tokens": documents, "source": sources, "answers": answers}
    columns: dict[str, Column] = {}
    digest = hashlib.sha256(str(vocab_size).encode())
    for name, rows in given.items():
        if rows is None:
            continue
        if len(rows) != len(documents):
            raise DataError(f"{name}: {len(rows)} rows for {len(documents)} documents; give one for each")
        flat = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows] or [np.empty(0, np.int64)])
        if flat.size and not 0 <= flat.min() <= flat.max() < vocab_size:
            raise DataError(f"{name}: tokens {flat.min()} to {flat.max()}, but the vocabulary has {vocab_size}")
        columns[name] = Column.of([flat], np.cumsum([0, *map(len, rows)]).astype(np.int64))
        digest.update(name.encode() + columns[name].bounds.tobytes() + flat.tobytes())
    identity = digest.hexdigest()
    return Shards(columns["tokens"], vocab_size, identity, columns.get("source"), columns.get("answers"))


def open_shards(folder: Path, tokenizer: Tokenizer | None = None) -> Shards:
    """The shards in a folder; refused if they are damaged, or made with another tokenizer than the one given."""
    manifest = read_manifest(folder)
    if tokenizer is not None:
        check_tokenizer(folder, manifest, tokenizer)
    try:
        columns = {name: _column(folder, manifest["identity"], saved) for name, saved in manifest["columns"].items()}
        return Shards(
            columns["tokens"],
            manifest["vocab_size"],
            manifest["identity"],
            columns.get("source"),
            columns.get("answers"),
            columns.get("labels"),
            columns.get("words"),
            columns.get("rejected"),
            manifest,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / MANIFEST}: damaged ({error!r}); {_REMEDY}") from None


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder of shards says of itself."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a folder that was prepared") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no JSON ({error}); {_REMEDY}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f'{path}: not written by qkv: it lacks "format": "{FORMAT}"; choose another folder')
    if manifest.get("version") != VERSION:
        raise DataError(f"{path}: version {manifest.get('version')!r}, but this qkv reads {VERSION}; {_REMEDY}")
    return manifest


def check_tokenizer(folder: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Refuse shards whose numbers mean something else to this tokenizer."""
    ours, theirs = tokenizer_hash(tokenizer), str(manifest.get("tokenizer"))
    if ours != theirs:
        raise DataError(
            f"{folder}: prepared with another tokenizer (its hash is {theirs[:12]}, yours is {ours[:12]}); "
            "prepare into another folder, or delete this one"
        )


def verify(folder: Path) -> None:
    """Read every byte and compare it with the manifest's hashes."""
    manifest = read_manifest(folder)
    open_shards(folder)
    for saved in manifest["columns"].values():
        for file in [*saved["files"], saved["bounds"]]:
            path = folder / file["name"]
            if file_hash(path) != file["sha256"]:
                raise DataError(f"{path}: changed since it was prepared (its hash differs); {_REMEDY}")


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


_REMEDY = "delete the folder and prepare it again"


def _column(folder: Path, identity: str, saved: Mapping[str, Any]) -> Column:
    kind = np.dtype(saved["dtype"])
    pieces = [_mapped(folder, identity, file, kind) for file in saved["files"]]
    bounds = np.array(_mapped(folder, identity, saved["bounds"], np.dtype("<i8")))
    total = sum(map(len, pieces))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or (np.diff(bounds) < 0).any():
        path = folder / saved["bounds"]["name"]
        raise DataError(f"{path}: its documents do not cover the {total} tokens once each; {_REMEDY}")
    return Column.of(pieces, bounds)


def _mapped(folder: Path, identity: str, file: Mapping[str, Any], kind: np.dtype[Any]) -> Array:
    path, count = folder / file["name"], int(file["count"])
    expected = HEADER + count * kind.itemsize
    try:
        size = path.stat().st_size
        with path.open("rb") as opened:
            header = opened.read(HEADER)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
    if header != header_of(identity):
        what = "belongs to another preparation" if header.startswith(MAGIC) else "is no shard of qkv"
        raise DataError(f"{path}: {what}; {_REMEDY}")
    if size != expected:
        raise DataError(f"{path}: {size} bytes, but the manifest says {expected}: cut short or changed; {_REMEDY}")
    if count == 0:  # nothing can be mapped
        return np.empty(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r", offset=HEADER, shape=(count,))


def header_of(identity: str) -> bytes:
    """What each file of a preparation begins with."""
    return MAGIC + bytes.fromhex(identity)[:16]
