"""Checkpoint maps as data: which of their tensors is which of ours, through which operations. Both directions, strict.

A rule names templates: `{i}` is a layer (or a cluster of tokens), `{e}` an expert. It stands for every layer in which
the config has our tensor, so a stack of unlike layers needs nothing special: a rule for experts applies where experts
are. Every one of our tensors must be made by exactly one rule, every one of theirs must be used, and whatever is wrong
comes in one message.

    Rule("h.{i}.attn.c_attn.weight", ("decoder.layers.{i}.attention.q_proj.weight", ... k, v), Transpose(), Split())
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qkv.checkpoint.ops import Array, Op, Place
from qkv.config import Block, ModelConfig
from qkv.errors import CheckpointError

Tensors = Mapping[str, Array]


@dataclass(frozen=True, init=False)
class Rule:
    """Their tensors, ours, and the operations between them (in the direction from theirs to ours)."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    """With `{c}` in the only name: as many as the config has, from 0 on."""
    ops: tuple[Op, ...]
    unless: str | None
    """One of our tensors: where the config has it, another rule speaks of these."""

    def __init__(
        self, theirs: str | tuple[str, ...], ours: str | tuple[str, ...], *ops: Op, unless: str | None = None
    ) -> None:
        object.__setattr__(self, "theirs", (theirs,) if isinstance(theirs, str) else theirs)
        object.__setattr__(self, "ours", (ours,) if isinstance(ours, str) else ours)
        object.__setattr__(self, "ops", ops)
        object.__setattr__(self, "unless", unless)

    @property
    def exact(self) -> bool:
        """Whether a round trip gives back every bit."""
        return all(op.exact for op in self.ops)


@dataclass(frozen=True)
class Ignored:
    """Their tensors that carry nothing to learn, or nothing for the part of the model that is read."""

    pattern: str
    """A regular expression for the whole name."""
    why: str
    told: bool = False
    """Whether the user is warned: what is left out is a part of their model."""


@dataclass(frozen=True)
class Tied:
    """Their two names of a tensor that the config ties; files hold either, or both, equal. `{i}` is any number."""

    copy: str
    of: str

    def original(self, name: str) -> str | None:
        """The original of which this name is the copy."""
        found = _pattern(self.copy).fullmatch(name)
        return None if found is None else self.of.replace("{i}", found.groupdict().get("i", ""))


@dataclass(frozen=True)
class Spelling:
    """Another way in which files write names: what the pattern finds in a name is replaced (`re.sub`)."""

    pattern: str
    ours: str
    """The family's own way, which its rules know and which is written."""


@dataclass(frozen=True)
class Fallback:
    """A tensor that files may leave out because it equals another one."""

    name: str
    of: str


@dataclass(frozen=True)
class Application:
    """One rule at one place."""

    rule: Rule
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    place: Place


def applications(config: ModelConfig, rules: tuple[Rule, ...]) -> Iterator[Application]:
    """Every rule at every place where the config has its first tensor."""
    shapes = {name: parameter.shape for name, parameter in config.shapes().items()}
    for rule in rules:
        first = _pattern(rule.ours[0].replace("{c}", "0"))
        for name in shapes:
            found = first.fullmatch(name)
            if found is None:
                continue
            layer = found.groupdict().get("i")
            ours = tuple(template.replace("{i}", layer or "") for template in rule.ours)
            if "{c}" in ours[0]:
                counted = (ours[0].replace("{c}", str(index)) for index in itertools.count())
                ours = tuple(itertools.takewhile(shapes.__contains__, counted))
            replaced = rule.unless is not None and rule.unless.replace("{i}", layer or "") in shapes
            if all(our in shapes for our in ours) and not replaced:
                place = Place(config, _block(config, name, layer), tuple(shapes[our] for our in ours))
                yield Application(rule, _their_names(rule, layer, place), ours, place)


def _their_names(rule: Rule, layer: str | None, place: Place) -> tuple[str, ...]:
    names = [template.replace("{i}", layer or "") for template in rule.theirs]
    experts = range(place.shapes[0][0])
    return tuple(n.replace("{e}", str(e)) for n in names for e in (experts if "{e}" in n else range(1)))


def _pattern(template: str) -> re.Pattern[str]:
    """The names that a template stands for."""
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)"))


def _block(config: ModelConfig, name: str, layer: str | None) -> Block | None:
    stack = config.stacks.get(name.partition(".")[0])
    return None if layer is None or stack is None else stack.block(int(layer))


def to_ours(
    config: ModelConfig,
    rules: tuple[Rule, ...],
    theirs: Tensors,
    *,
    ignored: tuple[Ignored, ...] = (),
    tied: tuple[Tied, ...] = (),
) -> dict[str, Array]:
    """Our tensors from theirs. Raises one CheckpointError that lists everything missing, unknown or misshapen."""
    shapes = {name: parameter.shape for name, parameter in config.shapes().items()}
    ours: dict[str, Array] = {}
    used: set[str] = set()
    problems: list[str] = []
    made = list(applications(config, rules))
    theirs = _with_originals(theirs, {name for one in made for name in one.theirs}, tied)
    for one in made:
        lacking = [name for name in one.theirs if name not in theirs]
        used.update(one.theirs)
        if lacking:
            problems += [f"{name} is missing" for name in lacking]
            continue
        parts = [theirs[name] for name in one.theirs]
        try:
            for op in one.rule.ops:
                parts = op.forward(parts, one.place)
        except ValueError as error:
            problems.append(f"{one.theirs[0]} has shape {theirs[one.theirs[0]].shape}, which does not fit ({error})")
            continue
        for name, part in zip(one.ours, parts, strict=True):
            assert name not in ours, f"two rules make {name}"
            if part.dtype.kind != "f" and part.dtype != np.uint16:  # uint16 is bfloat16
                problems.append(f"{one.theirs[0]} has dtype {part.dtype}, which no weight has")
            if part.shape != shapes[name]:
                problems.append(f"{one.theirs[0]} gives shape {part.shape}, but the config has {shapes[name]}")
            ours[name] = part
    uncovered = [name for name in shapes if name not in ours and not problems]
    assert not uncovered, f"no rule makes {uncovered}"
    problems += _unused(theirs, used, ignored, tied)
    if problems:
        raise CheckpointError(f"the tensors do not fit the config: {'; '.join(sorted(set(problems)))}")
    return ours


def _with_originals(theirs: Tensors, named: set[str], tied: tuple[Tied, ...]) -> Tensors:
    """Their tensors, with the original of each copy that the file has instead of it."""
    copies = {name: _original(name, tied) for name in theirs if name not in named}
    found = {of: theirs[name] for name, of in copies.items() if of is not None and of not in theirs and of in named}
    return {**theirs, **found}


def _original(name: str, tied: Iterable[Tied]) -> str | None:
    return next((of for pair in tied if (of := pair.original(name)) is not None), None)


def _unused(theirs: Tensors, used: set[str], ignored: tuple[Ignored, ...], tied: tuple[Tied, ...]) -> Iterator[str]:
    """What is wrong with each of their tensors that no rule used; the user is told of parts that are left out."""
    left_out: dict[Ignored, list[str]] = {}
    for name in theirs:
        if name in used:
            continue
        rule = next((rule for rule in ignored if re.fullmatch(rule.pattern, name)), None)
        if rule is not None:
            left_out.setdefault(rule, []).append(name)
            continue
        original = _original(name, tied)
        if original is None or original not in theirs:
            yield f"{name} is not understood" if original is None else f"{name} is tied to {original}, which is missing"
        elif not np.array_equal(theirs[name], theirs[original]):
            yield f"{name} is tied to {original} by the config, but differs from it"
    for rule, names in left_out.items():
        if rule.told:
            warnings.warn(f"{len(names)} tensors ({names[0]} and so on) are not loaded: {rule.why}", stacklevel=2)


def to_theirs(config: ModelConfig, rules: tuple[Rule, ...], ours: Tensors) -> dict[str, Array]:
    """Their tensors from ours, by the inverse of every rule."""
    theirs: dict[str, Array] = {}
    covered: set[str] = set()
    for one in applications(config, rules):
        parts = [ours[name] for name in one.ours]
        for op in reversed(one.rule.ops):
            parts = op.inverse(parts, one.place)
        theirs |= dict(zip(one.theirs, parts, strict=True))
        covered.update(one.ours)
    left = sorted(set(ours) - covered)
    if left:
        raise CheckpointError(f"this format has no place for {', '.join(left)}; save in qkv's own format")
    return theirs


def respelled(theirs: Tensors, ways: tuple[Spelling | Fallback, ...]) -> dict[str, Array]:
    """Their tensors under the names that the family's rules know, with what the file left out filled in."""
    written: dict[str, str] = {}
    for name in theirs:
        known = name
        for way in ways:
            if isinstance(way, Spelling):
                known = re.sub(way.pattern, way.ours, known)
        if known in written:
            raise CheckpointError(f"{written[known]} and {name} are two names of one tensor; remove one of them")
        written[known] = name
    for way in ways:
        if isinstance(way, Fallback) and way.name not in written and way.of in written:
            written[way.name] = written[way.of]
    return {known: theirs[name] for known, name in written.items()}
