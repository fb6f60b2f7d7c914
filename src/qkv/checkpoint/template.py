"""Their config.json as data: our config tree with their keys at its leaves.

A template is a nested dict in the form of `ModelConfig.to_dict()`. A leaf is a plain value, or a `Leaf` that knows
which of their keys it reads and writes. Reading replaces every leaf by its value; writing walks template and config
together and hands each leaf its part. A config that a template cannot express is noticed, because what was written is
read again and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qkv.errors import CheckpointError

Json = dict[str, Any]
_REQUIRED: Any = object()


class Keys:
    """Their config.json, which remembers what was read."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data, self.name = data, name
        self.read: set[str] = set()

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of a key; a missing one takes the default, as does null, or is an error."""
        self.read.add(key)
        if key in self.data and (self.data[key] is not None or default is _REQUIRED):
            return self.data[key]
        if default is _REQUIRED:
            raise CheckpointError(f"{self.name}: key {key!r} is missing")
        return default.read(self) if isinstance(default, Leaf) else default

    def unread(self) -> list[str]:
        """The keys that nobody asked for."""
        return sorted(self.data.keys() - self.read)


class Leaf:
    """A place in the template that reads and writes keys."""

    def read(self, keys: Keys) -> Any:
        """Our value from their keys."""
        raise NotImplementedError(f"{type(self).__name__} must define read")

    def write(self, value: Any, out: Json) -> None:
        """Their keys from our value; a leaf that only derives its value writes nothing."""


@dataclass(frozen=True)
class Key(Leaf):
    """One key, with its value as it is or translated."""

    name: str
    default: Any = _REQUIRED
    values: Mapping[Any, Any] | None = None
    """Their value to ours; the first of several with the same meaning is written."""

    def read(self, keys: Keys) -> Any:
        value = keys.get(self.name, self.default)
        if self.values is None or (keys.data.get(self.name) is None and self.default is not _REQUIRED):
            return value  # a default is said in our words
        if value not in self.values:
            known = ", ".join(map(repr, self.values))
            raise CheckpointError(f"{keys.name}: {self.name} is {value!r}; this qkv knows {known}")
        return self.values[value]

    def write(self, value: Any, out: Json) -> None:
        if self.values is None:
            out[self.name] = value
            return
        theirs = [key for key, ours in self.values.items() if ours == value]
        if not theirs:
            raise CheckpointError(f"{self.name}: their format has no word for {value!r}; save in qkv's own format")
        out[self.name] = theirs[0]


@dataclass(frozen=True)
class Quotient(Leaf):
    """One key divided by another: a head's width where no key gives it."""

    above: str
    below: str

    def read(self, keys: Keys) -> Any:
        above, below = keys.get(self.above), keys.get(self.below)
        if not all(isinstance(number, int) and number > 0 for number in (above, below)) or above % below:
            raise CheckpointError(f"{keys.name}: {self.below} ({below!r}) must divide {self.above} ({above!r})")
        return above // below


@dataclass(frozen=True)
class Product(Leaf):
    """A key times a number: GPT-2's feed-forward width where no key gives it."""

    name: str
    times: int

    def read(self, keys: Keys) -> Any:
        return keys.get(self.name) * self.times


@dataclass(frozen=True)
class Case(Leaf):
    """A template chosen by the value of a key; `otherwise` where the value is none of these."""

    name: str
    cases: Mapping[Any, Any]
    default: Any = _REQUIRED
    otherwise: Any = _REQUIRED

    def _chosen(self, value: Any, where: str) -> Any:
        if value in self.cases:
            return self.cases[value]
        if self.otherwise is _REQUIRED:
            raise CheckpointError(
                f"{where}: {self.name} is {value!r}; this qkv knows {', '.join(map(repr, self.cases))}"
            )
        return self.otherwise

    def read(self, keys: Keys) -> Any:
        return read(self._chosen(keys.get(self.name, self.default), keys.name), keys)

    def write(self, value: Any, out: Json) -> None:
        for theirs, template in self.cases.items():
            if fits(template, value):
                out[self.name] = theirs
                write(template, value, out)
                return
        if self.otherwise is not _REQUIRED:
            write(self.otherwise, value, out)


@dataclass(frozen=True)
class Family:
    """A kind of published model: how its config.json and its tensors are ours."""

    name: str
    model_types: tuple[str, ...]
    """What `model_type` may say."""
    architecture: str
    """What is written as `architectures`, and the head that the template describes."""
    template: Json
    rules: tuple[Any, ...]
    must: Json = field(default_factory=dict)
    """Keys that must have this value, if they are there: what the family could be told and we do not do."""
    free: tuple[str, ...] = ()
    """Keys that say nothing about the computation."""
    ignored: tuple[Any, ...] = ()
    tied: tuple[Any, ...] = ()
    spellings: tuple[Any, ...] = ()
    """Other ways in which published files write the tensors' names (`rules.Spelling`, `rules.Fallback`)."""
    where: Json = field(default_factory=dict)
    """Keys whose values choose this family before a later one with the same `model_type` and architecture."""
    also: tuple[str, ...] = ()
    """Other words that `architectures` has for the same model."""
    optional: str | None = None
    """A tensor of theirs; a folder without it is read as the family `instead`."""
    instead: str | None = None
    """The family that a model read as this one is saved as where this one cannot say it."""
    inside: str | None = None
    """The key whose table speaks of this model, in the config.json of a model with more parts; only read."""
    beside: tuple[str, ...] = ()
    """The keys beside that table that speak of the other parts."""
    defaults: Json = field(default_factory=dict)
    """What keys mean that are missing, where the template itself demands them."""


def read(template: Any, keys: Keys) -> Any:
    """The template with every leaf replaced by its value; entries that are None are left out."""
    if isinstance(template, Leaf):
        return template.read(keys)
    if isinstance(template, Mapping):
        filled = {name: read(value, keys) for name, value in template.items()}
        return {name: value for name, value in filled.items() if value is not None}
    if isinstance(template, list | tuple):
        return [read(item, keys) for item in template]
    return template


def write(template: Any, value: Any, out: Json) -> None:
    """Hand every leaf its part of `value`."""
    if isinstance(template, Leaf):
        template.write(value, out)
    elif isinstance(template, Mapping) and isinstance(value, Mapping):
        for name, part in template.items():
            write(part, value.get(name), out)
    elif isinstance(template, list | tuple) and isinstance(value, list):
        for part, item in zip(template, value, strict=False):
            write(part, item, out)


def fits(template: Any, value: Any) -> bool:
    """Whether the plain values of the template are those of `value`; leaves fit anything."""
    if isinstance(template, Leaf):
        return True
    if isinstance(template, Mapping):
        return isinstance(value, Mapping) and all(fits(part, value.get(name)) for name, part in template.items())
    if isinstance(template, list | tuple):
        return isinstance(value, list) and len(value) == len(template) and all(map(fits, template, value))
    return bool(template == value)
