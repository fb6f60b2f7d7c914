"""What a KV cache saves: the cost of one decode step against its position, with and without one.

The teaching text ("Transformer architecture in detail", question 4, "What is a KV cache, and why does it speed up
inference?") says that n tokens take O(n^2) forward computations without a cache and O(n) with one. What it counts are
rows: a token that passes through the layers.

    step n           1 row with a cache             n rows without
    n steps          n rows                         n (n + 1) / 2 rows

That is exact, and `Step.counted` counts it. Time is another matter: a row's query meets the keys of all tokens before
it either way, so that attention alone grows as n^2 over n steps with a cache, and as n^3 without; and a step of one row
is mostly spent on reading the weights, whatever n is.

    step n           a + b n                        a + c n + d n^2        b: keys; c: rows; d: keys of every row

So rows are counted and time is measured. Exponents are slopes of log cost over log position, for a step and for all
steps so far. Every figure is a median over rounds in which all cases take turns: a machine that is busy for a while is
busy for all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from qkv.config import ModelConfig
from qkv.config.presets.llama import heads, llama
from qkv.errors import DataError, GenerationError
from qkv.generate.runner import Logits
from qkv.generate.runners.torch import Runtime, TorchRunner
from qkv.nn import Transformer

_VISIT, _MOST = 0.02, 50
"""A visit repeats a short case for so many seconds, but no more than so many times."""
_LONGEST = 2048

Tick = Callable[[str], None]
"""Is told what was just done; a measurement says beforehand how often it calls it."""


def small() -> ModelConfig:
    """A Llama that is small enough to run without a cache, and large enough that its steps are not mere overhead."""
    return llama(256, 4, heads(8, head_dim=32), d_ff=704, vocab_size=1024, max_seq_len=_LONGEST, tied=True)


def lengths_for(limit: int | None, quick: bool) -> tuple[int, ...]:
    """Positions that double up to the longest which a model takes."""
    last = 256 if quick else _LONGEST
    last = last if limit is None else min(last, limit)
    return tuple(last >> k for k in reversed(range(4 if quick else 6)) if last >> k > 1)


# --- timing


class Case(Protocol):
    """Something to be timed."""

    def run(self) -> object:
        """The timed part."""

    def reset(self) -> None:
        """Make ready for another run; not timed."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds over all rounds."""

    median: float
    low: float
    high: float


def interleaved(cases: Mapping[str, Case], rounds: int, tick: Tick) -> dict[str, Timing]:
    """Visit all cases in turn, `rounds` times; `tick` is called after each visit."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(1e3 * _visit(case))
            tick(name)
    return {name: Timing(statistics.median(ms), min(ms), max(ms)) for name, ms in found.items()}


def _visit(case: Case) -> float:
    """Seconds of one run: the median of as many as fit the visit, since the first finds the processor's caches cold."""
    times: list[float] = []
    end = perf_counter() + _VISIT
    while not times or (perf_counter() < end and len(times) < _MOST):
        start = perf_counter()
        case.run()
        times.append(perf_counter() - start)
        case.reset()
    return statistics.median(times)


# --- steps


@dataclass(frozen=True)
class Setting:
    """How a step is run."""

    cached: bool = True
    deterministic: bool = False
    codec: str = "raw"
    layout: str = "auto"
    batch: int = 1

    @property
    def runtime(self) -> Runtime:
        """The same for a runner."""
        return Runtime(self.deterministic, self.codec, self.layout)  # type: ignore[arg-type]  # refused by name


class Step:
    """The step that reads the token at `position` (counted from 1) of `batch` random texts, again and again."""

    def __init__(self, model: Transformer, setting: Setting, position: int, capacity: int) -> None:
        self.position, self.setting = position, setting
        self.runner = TorchRunner(model, model.config.vocab_size, setting.runtime)
        rng = np.random.default_rng(0)
        self.texts = rng.integers(model.config.vocab_size, size=(setting.batch, position))
        if setting.cached:
            self.state = self.runner.start(setting.batch, capacity, slack=1)
            self.state.extend(self.texts[:, :-1].tolist())
            self.last = self.texts[:, -1:].tolist()
        else:
            self.whole = torch.from_numpy(self.texts)
            self.at = torch.full((setting.batch, 1), position - 1)
            self.prefix = torch.full((setting.batch,), position - 1) if self.runner.reads_prefix else None

    @property
    def cache_bytes(self) -> int:
        """What the cache takes, room for later tokens included."""
        return self.state.nbytes if self.setting.cached else 0

    def run(self) -> Logits:
        """The logits (B, V) after the token, which is read alone where a cache has the others, else with them."""
        if self.setting.cached:
            return self.state.extend(self.last)
        with self.runner.mode():
            output = self.runner.model(self.whole, logits_at=self.at, prefix_length=self.prefix)
        assert output.logits is not None
        logits: Logits = output.logits[:, 0].float().numpy()
        return logits

    def reset(self) -> None:
        """Take the token back."""
        if self.setting.cached:
            self.state.truncate([self.position - 1] * self.setting.batch)

    def counted(self) -> int:
        """The rows that one step sends through the layers."""
        with counted_rows(self.runner.model) as rows:
            self.run()
        self.reset()
        return sum(rows)


@contextmanager
def counted_rows(model: Transformer) -> Iterator[list[int]]:
    """Within the block, how many rows (batch times tokens) each call of the decoder gets."""
    rows: list[int] = []

    def count(stack: torch.nn.Module, given: tuple[Any, ...]) -> None:
        rows.append(math.prod(given[0].shape[:-1]))

    assert model.decoder is not None
    handle = model.decoder.register_forward_pre_hook(count)
    try:
        yield rows
    finally:
        handle.remove()


# --- the first measurement: against position


@dataclass(frozen=True)
class Side:
    """A step with a cache, or without."""

    step: Timing
    step_rows: int
    """Counted."""
    total_ms: float
    """Of all steps up to this one."""
    total_rows: int


@dataclass(frozen=True)
class Point:
    """One position, both ways."""

    position: int
    cached: Side
    uncached: Side

    @property
    def ratio(self) -> float:
        """How many times as long the step takes without a cache."""
        return self.uncached.step.median / self.cached.step.median


def visits_of_curve(lengths: Sequence[int], rounds: int) -> int:
    """How often `curve` calls its tick."""
    return 2 * len(lengths) * (rounds + 1)


def curve(model: Transformer, lengths: Sequence[int], setting: Setting, rounds: int, tick: Tick) -> list[Point]:
    """A step at each of `lengths` (2 or more, ascending), with and without a cache, otherwise as `setting` says."""
    check(model, lengths)
    steps: dict[str, Step] = {}
    rows: dict[str, int] = {}
    for cached, length in product((True, False), lengths):
        name = _name(cached, length)
        steps[name] = Step(model, replace(setting, cached=cached), length, lengths[-1])
        rows[name] = steps[name].counted()  # which is the warm-up as well
        tick(name)
    times = interleaved(steps, rounds, tick)

    def sides(cached: bool) -> list[Side]:
        names = [_name(cached, length) for length in lengths]
        step_rows = [rows[name] for name in names]
        total_ms = totals(lengths, [times[name].median for name in names])
        total_rows = [round(x) for x in totals(lengths, [float(x) for x in step_rows])]
        zipped = zip(names, step_rows, total_ms, total_rows, strict=True)
        return [Side(times[name], own, ms, every) for name, own, ms, every in zipped]

    return [Point(*one) for one in zip(lengths, sides(True), sides(False), strict=True)]


def _name(cached: bool, length: int) -> str:
    return f"{'with' if cached else 'without'} a cache, at {length}"


def check_config(config: ModelConfig) -> None:
    """Refuse a model that is not a decoder alone."""
    if config.decoder is None or config.encoder is not None:
        has = "an encoder" if config.decoder is None else "an encoder too"
        raise GenerationError(
            f"bench cache: steps are those of a decoder alone, and this model has {has}; use --memory"
        )


def check(model: Transformer, lengths: Sequence[int]) -> None:
    """Refuse another model than a decoder, and positions that are none or that it does not have."""
    check_config(model.config)
    if len(lengths) < 2 or lengths[0] < 2 or any(a >= b for a, b in pairwise(lengths)):
        raise DataError(f"lengths: give two or more, ascending, from 2 on, not {','.join(map(str, lengths))}")
    limit = longest(model)
    if limit is not None and lengths[-1] > limit:
        raise DataError(f"lengths: {lengths[-1]}, but the model has {limit} positions; give shorter ones")


def longest(model: Transformer) -> int | None:
    """How many positions the model has; None if there is no limit."""
    return TorchRunner(model, model.config.vocab_size, Runtime(deterministic=False)).max_length


def totals(positions: Sequence[int], costs: Sequence[float]) -> list[float]:
    """The cost of all steps from 1 to each position: between positions it goes in a straight line, and before the
    first as the line through the first two goes, but never below zero and never above the first."""
    slope = (costs[1] - costs[0]) / (positions[1] - positions[0])
    start = min(max(costs[0] - slope * (positions[0] - 1), 0.0), costs[0])
    found = [_line(1, positions[0], start, costs[0])]
    for (a, x), (b, y) in pairwise(zip(positions, costs, strict=True)):
        found.append(found[-1] + _line(a, b, x, y) - x)
    return found


def _line(a: int, b: int, x: float, y: float) -> float:
    """The sum over a, a + 1, ..., b of a cost that goes straight from x to y."""
    return (b - a + 1) * (x + y) / 2


@dataclass(frozen=True)
class Exponents:
    """cost ~ n^exponent."""

    first: int
    last: int
    """Between which positions."""
    cached_step: float
    uncached_step: float
    cached_total: float
    uncached_total: float


def exponents(points: Sequence[Point]) -> Exponents:
    """Fitted to the later half of the points, where overhead hides least; to the last three if that is more."""
    used = points[-max(min(3, len(points)), (len(points) + 1) // 2) :]
    positions = [point.position for point in used]
    return Exponents(
        positions[0],
        positions[-1],
        exponent(positions, [point.cached.step.median for point in used]),
        exponent(positions, [point.uncached.step.median for point in used]),
        exponent(positions, [point.cached.total_ms for point in used]),
        exponent(positions, [point.uncached.total_ms for point in used]),
    )


def exponent(positions: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of log cost over log position, by least squares."""
    return statistics.linear_regression([math.log(n) for n in positions], [math.log(cost) for cost in costs]).slope


# --- the second: ways to run a step


@dataclass(frozen=True)
class Way:
    """A step with a cache, run in one way."""

    setting: Setting
    step: Timing
    ratio: float
    """To the plain way (not deterministic, raw, auto) at the same batch."""
    cache_bytes: int


def ways(batches: Sequence[int] = (1, 8)) -> list[Setting]:
    """Every combination; the plain way first for each batch."""
    every = product(batches, (False, True), ("raw", "int8", "int4"), ("auto", "paged"))
    return [Setting(True, on, codec, layout, batch) for batch, on, codec, layout in every]


def visits_of_ways(rounds: int) -> int:
    """How often `compare` calls its tick."""
    return len(ways()) * (rounds + 1)


def compare(model: Transformer, position: int, rounds: int, tick: Tick) -> list[Way]:
    """One step at `position` in every way."""
    settings = {_way(setting): setting for setting in ways()}
    steps: dict[str, Step] = {}
    for name, setting in settings.items():
        steps[name] = Step(model, setting, position, position)
        steps[name].run()
        steps[name].reset()
        tick(name)
    times = interleaved(steps, rounds, tick)
    plain = {batch: times[_way(Setting(batch=batch))].median for batch in {s.batch for s in settings.values()}}
    return [
        Way(setting, times[name], times[name].median / plain[setting.batch], steps[name].cache_bytes)
        for name, setting in settings.items()
    ]


def _way(setting: Setting) -> str:
    on = "deterministic, " if setting.deterministic else ""
    return f"{on}{setting.codec}, {setting.layout}, batch {setting.batch}"
