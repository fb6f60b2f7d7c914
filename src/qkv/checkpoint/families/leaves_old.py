"""Leaves for files that say one thing under several names, in a table of its own, or as a count.

`Alias` reads whichever name a release used, `Within` a nested table, `Merge` one place of ours from several of theirs,
`Choice` a template from several keys at once, `Repeat` a list from its length, `Same` a number that two keys repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qkv.checkpoint.template import Json, Keys, Leaf, fits, read, write
from qkv.errors import CheckpointError

_REQUIRED: Any = object()


@dataclass(frozen=True)
class Alias(Leaf):
    """One value under any of several names, which must agree; the first is written."""

    names: tuple[str, ...]
    default: Any = _REQUIRED

    def read(self, keys: Keys) -> Any:
        keys.read.update(self.names)
        found = {name: keys.data[name] for name in self.names if keys.data.get(name) is not None}
        if len(set(found.values())) > 1:
            said = " and ".join(f"{name} ({value!r})" for name, value in found.items())
            raise CheckpointError(f"{keys.name}: {said} name the same thing and must be equal")
        if found:
            return next(iter(found.values()))
        if self.default is _REQUIRED:
            raise CheckpointError(f"{keys.name}: key {' or '.join(map(repr, self.names))} is missing")
        return read(self.default, keys)

    def write(self, value: Any, out: Json) -> None:
        out[self.names[0]] = value


@dataclass(frozen=True)
class Ratio(Leaf):
    """One leaf divided by another: a head's width where no key gives it."""

    above: Leaf
    below: Leaf

    def read(self, keys: Keys) -> Any:
        above, below = self.above.read(keys), self.below.read(keys)
        if above % below:
            raise CheckpointError(f"{keys.name}: the number of heads ({below}) must divide the model's width ({above})")
        return above // below


@dataclass(frozen=True)
class Times(Leaf):
    """A leaf times a number: a feed-forward width that no key gives."""

    leaf: Leaf
    factor: int

    def read(self, keys: Keys) -> Any:
        return self.leaf.read(keys) * self.factor


@dataclass(frozen=True)
class Halved(Leaf):
    """Their number counts two of ours together."""

    leaf: Leaf

    def read(self, keys: Keys) -> Any:
        value = self.leaf.read(keys)
        if value % 2:
            raise CheckpointError(f"{keys.name}: the feed-forward width ({value}) counts gate and up: it must be even")
        return value // 2

    def write(self, value: Any, out: Json) -> None:
        self.leaf.write(None if value is None else 2 * value, out)


@dataclass(frozen=True)
class Whole(Leaf):
    """A number that their code takes as an integer, and ours as any number."""

    leaf: Leaf

    def read(self, keys: Keys) -> Any:
        return self.leaf.read(keys)

    def write(self, value: Any, out: Json) -> None:
        # What is not whole differs when it is read again, and is refused.
        self.leaf.write(None if value is None else int(value), out)


@dataclass(frozen=True)
class Same(Leaf):
    """A number that two keys must repeat: key-value heads in attention that has none of its own."""

    name: str
    copy: str

    def read(self, keys: Keys) -> Any:
        value = keys.get(self.name)
        again = keys.get(self.copy, value)
        if again != value:
            raise CheckpointError(f"{keys.name}: {self.copy} is {again!r}, but must equal {self.name} ({value!r})")
        return value

    def write(self, value: Any, out: Json) -> None:
        out[self.name] = out[self.copy] = value


@dataclass(frozen=True)
class Within(Leaf):
    """A template whose keys stand in a table of their own, with that table's own strictness."""

    name: str
    template: Any
    must: Json = field(default_factory=dict)
    free: tuple[str, ...] = ()

    def read(self, keys: Keys) -> Any:
        inner = Keys(keys.get(self.name, {}), f"{keys.name}: {self.name}")
        value = read(self.template, inner)
        wrong = [f"{key} is {inner.get(key, ours)!r}, but must be {ours!r}" for key, ours in self.must.items()
                 if inner.get(key, ours) != ours]  # fmt: skip
        inner.read.update(self.free)
        wrong += [f"{key} ({inner.data[key]!r}) is not understood" for key in inner.unread()]
        if wrong:
            raise CheckpointError(f"{inner.name}: {'; '.join(wrong)}")
        return value

    def write(self, value: Any, out: Json) -> None:
        table = out.setdefault(self.name, {})
        table.update(self.must)
        write(self.template, value, table)


@dataclass(frozen=True)
class Merge(Leaf):
    """One table of ours from several templates."""

    templates: tuple[Any, ...]

    def read(self, keys: Keys) -> Json:
        merged: Json = {}
        for template in self.templates:
            merged |= read(template, keys)
        return merged

    def write(self, value: Any, out: Json) -> None:
        for template in self.templates:
            write(template, value, out)


@dataclass(frozen=True)
class Choice(Leaf):
    """A template chosen by several keys together; a key that a row leaves out may have any value.

    The first row that fits is read and written, so that the narrower rows come first.
    """

    defaults: Mapping[str, Any]
    rows: tuple[tuple[Mapping[str, Any], Any], ...]

    def read(self, keys: Keys) -> Any:
        said = {name: keys.get(name, default) for name, default in self.defaults.items()}
        for wanted, template in self.rows:
            if all(said[name] == value for name, value in wanted.items()):
                return read(template, keys)
        raise CheckpointError(
            f"{keys.name}: this qkv does not know "
            f"{', '.join(f'{name} {value!r}' for name, value in said.items())} together"
        )

    def write(self, value: Any, out: Json) -> None:
        for wanted, template in self.rows:
            if fits(template, value):
                out.update(wanted)
                write(template, value, out)
                return


@dataclass(frozen=True)
class Repeat(Leaf):
    """A list of equal items, of which they give the number."""

    count: Leaf
    template: Any

    def read(self, keys: Keys) -> list[Any]:
        return [read(self.template, keys) for _ in range(self.count.read(keys))]

    def write(self, value: Any, out: Json) -> None:
        self.count.write(len(value), out)
        for item in value:
            write(self.template, item, out)
