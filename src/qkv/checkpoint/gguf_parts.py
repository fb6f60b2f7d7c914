"""A GGUF model in several files, as `gguf-split` and the `gguf` package write them.

    model-00001-of-00003.gguf, model-00002-of-00003.gguf, ...

`split.count` says how many there are, `split.no` which one a file is (from 0), `split.tensors.count` how many tensors
all of them hold. The first has the metadata. Any of them stands for the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkv.checkpoint.gguf_blocks import Array
from qkv.checkpoint.gguf_file import Entry, File
from qkv.errors import CheckpointError

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_SPLIT = ("split.no", "split.count", "split.tensors.count")


class Parts(Mapping[str, Array]):
    """Several files as one: `metadata`, `entries`, and name -> array."""

    def __init__(self, path: Path, files: list[File]) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {k: v for k, v in files[0].metadata.items() if k not in _SPLIT}
        self.entries: dict[str, Entry] = {name: entry for file in files for name, entry in file.entries.items()}
        self._home = {name: file for file in files for name in file.entries}

    def raw(self, name: str) -> Array:
        """A tensor's bytes."""
        return self._home[name].raw(name)

    def __getitem__(self, name: str) -> Array:
        return self._home[name][name]

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def open_gguf(path: Path) -> File | Parts:
    """The file at `path`, with its other parts if it is one of several; a missing one is named."""
    file = File(path)
    count = file.metadata.get("split.count", 1)
    if count in (0, 1):
        return file
    named = _NAME.fullmatch(path.name)
    if not isinstance(count, int) or named is None or int(named[3]) != count:
        raise CheckpointError(f"{path}: is one part of {count}, which are found by their names; call them "
                              f"NAME-00001-of-{count:05}.gguf and so on, as they were written")  # fmt: skip
    paths = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [one.name for one in paths if not one.is_file()]:
        raise CheckpointError(f"{path}: its other parts {', '.join(missing)} are missing; copy them beside it")
    files = [file if one == path else File(one) for one in paths]
    if problems := list(_problems(files)):
        raise CheckpointError(f"{path}: its parts do not belong together: {'; '.join(problems[:8])}")
    return Parts(path, files)


def _problems(files: list[File]) -> Iterator[str]:
    """What shows that files are not the parts of one model."""
    seen: dict[str, str] = {}
    for number, file in enumerate(files):
        found = (file.metadata.get("split.no"), file.metadata.get("split.count"))
        if found != (number, len(files)):
            yield f"{file.path.name} says that it is number {found[0]} of {found[1]}, counted from 0"
        for name in file.entries:
            if name in seen:
                yield f"{name} is in {seen[name]} and in {file.path.name}"
            seen[name] = file.path.name
    total = files[0].metadata.get("split.tensors.count", len(seen))
    if total != len(seen):
        yield f"they hold {len(seen)} tensors, but should hold {total}"
