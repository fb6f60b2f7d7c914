"""Which records of the training files are trained on, and which are held out to be tested on.

With files of its own for that (`valid`) every record of a file counts. Without them a share of the training files is
held out:

    text                the end: so many of the last characters of all files, one after the other
    jsonl, chat         the records whose hashes are smallest: the same record is always on the same side, copies of it
                        too, wherever it stands and whatever is added
    parallel            likewise by the source, with all its translations

Pairs to train on are also kept apart from those that are held out (`pairs`), and each stands once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from typing import Any, Literal, Protocol

from qkv.errors import DataError
from qkv.train.data.pairs import Apart, Digest, digest
from qkv.train.data.records import Pair, Reading, Record, Text, source_hash

Split = Literal["train", "valid"]


class Sources(Protocol):
    """What is read of the recipe's `DataSource`."""

    @property
    def train(self) -> tuple[str, ...]:
        """Names of sources."""

    @property
    def valid(self) -> tuple[str, ...]:
        """Names of sources."""

    @property
    def valid_share(self) -> float:
        """How much is held out where `valid` is empty."""


@dataclass(frozen=True)
class Selection:
    """Sources, and which of their records count."""

    names: tuple[str, ...]
    reading: Reading
    rule: dict[str, Any] = field(default_factory=dict)
    """Everything besides the file itself on which the records of a file depend; plain JSON values."""
    cuts: tuple[int, ...] = ()
    """Of texts of which the end is held out: how many characters of each file are before that end."""
    passes: Apart | None = None

    def records(self, number: int) -> Iterator[Record]:
        """Those of one source that count. Pairs are kept apart as they come, so call it once for each, in order."""
        found = self.reading.records(self.names[number])
        if self.cuts:
            found = self._this_side(found, self.cuts[number])
        elif "largest" in self.rule:
            wanted, largest = self.rule["split"] == "valid", bytes.fromhex(self.rule["largest"])
            found = (record for record in found if (digest(record.key()) <= largest) == wanted)
        passes = self.passes
        return found if passes is None else (one for one in found if not isinstance(one, Pair) or passes(one))

    def everything(self) -> Iterator[Record]:
        """The records of all sources."""
        for number in range(len(self.names)):
            yield from self.records(number)

    def content(self, number: int) -> str:
        """A hash of the file, and of it alone; with the cut, if one goes through it."""
        cut = f"@{self.cuts[number]}" if self.cuts else ""
        return source_hash(self.names[number], self.reading) + cut

    def _this_side(self, records: Iterable[Record], cut: int) -> Iterator[Record]:
        held_out = self.rule["split"] == "valid"
        for record in records:
            if isinstance(record, Text):
                edge, cut = min(cut, len(record.text)), max(0, cut - len(record.text))
                text = record.text[edge:] if held_out else record.text[:edge]
                if text:
                    yield replace(record, text=text)


def select(source: Sources, reading: Reading, split: Split) -> Selection:
    """The records of one side."""
    if source.valid:
        found = Selection(source.train if split == "train" else source.valid, reading, {"split": split})
    elif source.valid_share == 0:
        if split == "valid":
            raise DataError("valid: no files and valid_share = 0, so nothing is held out; give either")
        found = Selection(source.train, reading, {"split": split})
    elif reading.format == "text":
        found = _cut_text(source, reading, split)
    else:
        largest = _largest(Selection(source.train, reading), source.valid_share)
        found = Selection(source.train, reading, {"split": split, "largest": largest.hex()})
    return _apart(source, found, split) if reading.format == "parallel" else found


def _cut_text(source: Sources, reading: Reading, split: Split) -> Selection:
    sizes = [sum(len(one.text) for one in reading.records(name) if isinstance(one, Text)) for name in source.train]
    left = sum(sizes) - round(sum(sizes) * source.valid_share)
    cuts = []
    for size in sizes:
        cuts.append(min(size, left))
        left -= cuts[-1]
    return Selection(source.train, reading, {"split": split, "share": source.valid_share}, tuple(cuts))


def _largest(everything: Selection, share: float) -> Digest:
    """The largest of the hashes that are held out: of at least one record, and never of all."""
    keys = [digest(record.key()) for record in everything.everything()]
    different = len(set(keys))
    if different < 2:
        where = everything.names[0]
        raise DataError(f"{where}: {different} different records are too few to hold some out; give `valid` files")
    last = max(keys)
    return max(key for key in nsmallest(max(1, round(share * len(keys))), keys) if key < last)


def _apart(source: Sources, found: Selection, split: Split) -> Selection:
    """Pairs that stand once; those to train on without what is held out."""
    names = source.train + source.valid
    # Whether a pair came before depends on all the others.
    rule = {**found.rule, "files": [source_hash(name, found.reading) for name in names]}
    if split == "valid" or (not source.valid and source.valid_share == 0):
        return replace(found, rule=rule, passes=Apart())
    held_out = select(source, found.reading, "valid").everything()
    return replace(found, rule=rule, passes=Apart(pair for pair in held_out if isinstance(pair, Pair)))
