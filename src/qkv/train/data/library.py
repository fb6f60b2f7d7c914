"""Datasets that the library `datasets` (Hugging Face) loads, row by row; it is asked for only here.

`datasets:NAME`, `datasets:NAME:SPLIT`, `datasets:NAME:CONFIG:SPLIT`; without a split it is "train". NAME may be a
folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from qkv.errors import DataError

PREFIX = "datasets:"


def library_rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row and where it stands; rows are counted from 1."""
    empty = True
    for number, row in enumerate(_load(name), start=1):
        empty = False
        yield f"{name}: row {number}", row
    if empty:
        raise DataError(f"{name}: the dataset has no rows; name another split")


def rows_hash(name: str) -> str:
    """SHA-256 of all rows."""
    digest = hashlib.sha256()
    for _, row in library_rows(name):
        # What is no JSON value (a date, a picture) counts by what it says of itself.
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def _load(name: str) -> Iterable[Mapping[str, Any]]:
    dataset, *more = name.removeprefix(PREFIX).split(":")
    if not dataset or len(more) > 2 or not all(more):
        raise DataError(f"{name}: expected {PREFIX}NAME, {PREFIX}NAME:SPLIT or {PREFIX}NAME:CONFIG:SPLIT")
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise DataError(f"{name}: needs the library datasets; install it with: pip install datasets") from None
    *config, split = more or ["train"]
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(dataset, *config, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # not there, no such config or split, no network
        said = " ".join(str(error).split())[:300]
        raise DataError(f"{name}: datasets cannot load it ({said}); check the name, or give a file") from None
    return rows
