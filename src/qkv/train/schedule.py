"""Learning rates: the rate of each optimizer step, a function of the schedule and the step alone.

    noam          factor * d_model^-0.5 * min(s^-0.5, s * warmup^-1.5)            Vaswani 2017, equation 3
    cosine        peak * (floor + (1 - floor) * (1 + cos(pi x)) / 2)             Loshchilov and Hutter 2016
    wsd           peak, then down to floor * peak over the last `decay` of steps  Hu 2024
    linear        peak * (1 - (1 - floor) x)                                     Devlin 2018
    inverse-sqrt  peak * sqrt(hold / max(s, hold))                               Shazeer 2018
    constant      peak

s is the step, counted from 1; x is the share of the way from the warm-up's end to the last step that is done. During
the warm-up the rate is peak * s / warmup. A step is one update of the weights, whatever number of micro-batches its
gradient was summed over.
"""

from __future__ import annotations

import math

from qkv.config.training import WSD, ConstantRate, Cosine, Decaying, InverseSqrt, Linear, Noam, Schedule, Warm
from qkv.errors import ConfigError


def rate(schedule: Schedule, step: int, steps: int, d_model: int) -> float:
    """The learning rate of `step`, one of 1 to `steps`; later steps keep the last one's where the schedule ends."""
    assert step >= 1, "steps are counted from 1"
    match schedule:
        case Noam():
            return (
                schedule.factor / math.sqrt(d_model) * min(1 / math.sqrt(step), step / math.sqrt(schedule.warmup) ** 3)
            )
        case InverseSqrt():
            return schedule.peak * math.sqrt(schedule.hold / max(step, schedule.hold))
        case Cosine() | WSD() | Linear() | ConstantRate():
            return schedule.peak * _share(schedule, step, steps)
    raise ConfigError(f"schedule: {schedule.kind!r} has no rule in qkv.train.schedule; choose another kind")


def _share(schedule: Warm, step: int, steps: int) -> float:
    """The rate as a share of the peak."""
    if step < schedule.warmup:
        return step / schedule.warmup
    match schedule:
        case Cosine():
            left = (1 + math.cos(math.pi * _done(step, schedule.warmup, steps))) / 2
        case Linear():
            left = 1 - _done(step, schedule.warmup, steps)
        case WSD():
            done = _done(step, _decay_start(schedule, steps), steps)
            if schedule.shape == "exponential":
                return math.pow(schedule.floor, done)
            left = 1 - (math.sqrt(done) if schedule.shape == "sqrt" else done)
        case _:
            return 1.0
    assert isinstance(schedule, Decaying)
    return schedule.floor + (1 - schedule.floor) * left


def _done(step: int, start: int, end: int) -> float:
    """How much of the way from `start` to `end` lies behind."""
    return min(max(step - start, 0) / max(end - start, 1), 1.0)


def _decay_start(schedule: WSD, steps: int) -> int:
    """The last step with the full rate."""
    return max(steps - round(schedule.decay * steps), schedule.warmup)


def table(schedule: Schedule, steps: int, d_model: int, rows: int = 20) -> list[tuple[int, float]]:
    """Steps and their rates: about `rows` evenly spread ones, with the first, the last, and where the rule changes."""
    turns = {1, steps}
    match schedule:
        case InverseSqrt():
            turns.add(schedule.hold)
        case Noam() | Warm():
            turns.add(schedule.warmup)
    if isinstance(schedule, WSD):
        turns.add(_decay_start(schedule, steps))
    spread = {round(steps * row / rows) for row in range(1, rows + 1)}
    return [(step, rate(schedule, step, steps, d_model)) for step in sorted(turns | spread) if 1 <= step <= steps]
