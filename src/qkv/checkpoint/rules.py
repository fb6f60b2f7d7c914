"""Checkpoint maps as data: which of their tensors is which of ours, through which operations. Both directions, strict.

A rule names templates: `{i}` is a layer, `{e}` an expert. It stands for every layer in which the config has our
tensor, so a stack of unlike layers needs nothing special: a rule for experts applies where experts are. Every one of
our tensors must be made by exactly one rule, every one of theirs must be used, and whatever is wrong comes in one
message.

    Rule("h.{i}.attn.c_attn.weight", ("decoder.layers.{i}.attention.q_proj.weight", ... k, v), Transpose(), Split())
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
    """Their tensors that carry nothing to learn."""

    pattern: str
    """A regular expression for the whole name."""
    why: str


@dataclass(frozen=True)
class Tied:
    """Their second name of a tensor that the config ties; files may hold it, equal, or leave it out."""

    copy: str
    of: str


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
        first = re.compile(re.escape(rule.ours[0]).replace(r"\{i\}", r"(?P<i>\d+)"))
        for name in shapes:
            found = first.fullmatch(name)
            if found is None:
                continue
            layer = found.groupdict().get("i")
            ours = tuple(template.replace("{i}", layer or "") for template in rule.ours)
            replaced = rule.unless is not None and rule.unless.replace("{i}", layer or "") in shapes
            if all(our in shapes for our in ours) and not replaced:
                place = Place(config, _block(config, name, layer), tuple(shapes[our] for our in ours))
                yield Application(rule, _their_names(rule, layer, place), ours, place)


def _their_names(rule: Rule, layer: str | None, place: Place) -> tuple[str, ...]:
    names = [template.replace("{i}", layer or "") for template in rule.theirs]
    experts = range(place.shapes[0][0])
    return tuple(n.replace("{e}", str(e)) for n in names for e in (experts if "{e}" in n else range(1)))


def _block(config: ModelConfig, name: str, layer: str | None) -> Block | None:
    if layer is None:
        return None
    return config.stacks[name.partition(".")[0]].block(int(layer))


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
    for one in applications(config, rules):
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


def _unused(theirs: Tensors, used: set[str], ignored: tuple[Ignored, ...], tied: tuple[Tied, ...]) -> Iterator[str]:
    """What is wrong with each of their tensors that no rule used."""
    copies = {pair.copy: pair.of for pair in tied}
    for name in theirs:
        if name in used or any(re.fullmatch(rule.pattern, name) for rule in ignored):
            continue
        original = copies.get(name)
        if original is None:
            yield f"{name} is not understood"
        elif original in theirs and not np.array_equal(theirs[name], theirs[original]):
            yield f"{name} is tied to {original} by the config, but differs from it"


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
