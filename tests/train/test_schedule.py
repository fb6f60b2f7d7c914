"""Learning rates against values worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config.training import WSD, ConstantRate, Cosine, InverseSqrt, Linear, Noam, Schedule
from qkv.errors import ConfigError
from qkv.train.schedule import rate, table


def rates(schedule: Schedule, steps: int) -> list[float]:
    """The rates of steps 1 to `steps`, with one in front so that the index is the step."""
    return [math.nan, *(rate(schedule, step, steps, 64) for step in range(1, steps + 1))]


@pytest.mark.parametrize(("d_model", "peak"), [(512, 6.98771e-4), (1024, 4.94106e-4)])
def test_noam_peaks_where_the_paper_says(d_model: int, peak: float) -> None:
    values = [rate(Noam(), step, 100_000, d_model) for step in range(1, 8001)]
    assert max(values) == values[3999] == pytest.approx(peak, rel=1e-6)
    assert values[0] == pytest.approx(peak / 4000)  # a line from 0
    assert values[7999] == pytest.approx(peak / math.sqrt(2))  # then 1 / sqrt(step)


def test_noam_with_other_numbers() -> None:
    # 64^-0.5 = 1/8; warmup 4: step 1 has 4^-1.5 = 1/8, step 4 has 4^-0.5 = 1/2, step 16 has 1/4; factor 2.
    schedule = Noam(factor=2.0, warmup=4)
    assert [rate(schedule, step, 16, 64) for step in (1, 4, 16)] == pytest.approx([1 / 32, 1 / 8, 1 / 16])


def test_cosine_rises_in_a_line_and_falls_to_its_floor() -> None:
    values = rates(Cosine(peak=2.0, warmup=10, floor=0.1), 110)
    assert values[1:11] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert values[60] == pytest.approx(1.1)  # half way: the mean of peak and floor
    assert values[35] == pytest.approx(2 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2))  # a quarter: cos 45 degrees
    assert values[110] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(values[10:]))


def test_linear_falls_in_a_line() -> None:
    values = rates(Linear(peak=1.0, warmup=2), 12)
    assert values[1:] == pytest.approx([0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0], abs=1e-15)
    assert rates(Linear(peak=1.0, floor=0.5), 2)[1:] == pytest.approx([0.75, 0.5])


@pytest.mark.parametrize(
    ("shape", "falling"),
    [
        ("linear", [0.8125, 0.625, 0.4375, 0.25]),
        ("sqrt", [0.625, 0.25 + 0.75 * (1 - math.sqrt(0.5)), 0.25 + 0.75 * (1 - math.sqrt(0.75)), 0.25]),
        ("exponential", [math.sqrt(0.5), 0.5, 0.5 * math.sqrt(0.5), 0.25]),
    ],
)
def test_wsd_warms_up_stays_and_falls_at_the_end(
    shape: Literal["linear", "sqrt", "exponential"], falling: list[float]
) -> None:
    values = rates(WSD(peak=1.0, warmup=4, decay=0.2, floor=0.25, shape=shape), 20)
    assert values[1:5] == [0.25, 0.5, 0.75, 1.0]
    assert values[4:17] == [1.0] * 13
    assert values[17:] == pytest.approx(falling)


def test_a_long_warm_up_shortens_the_decay_and_still_reaches_the_peak() -> None:
    values = rates(WSD(peak=1.0, warmup=18, decay=0.2), 20)
    assert values[17:] == pytest.approx([17 / 18, 1.0, 0.5, 0.0])


def test_the_inverse_root_is_adafactors_own_as_it_stands() -> None:
    for step in (1, 100, 9_999, 10_000, 10_001, 40_000, 10**6):
        assert rate(InverseSqrt(), step, 10**6, 512) == pytest.approx(min(1e-2, step**-0.5))
    assert rate(InverseSqrt(peak=1.0, hold=4), 16, 16, 512) == 0.5


def test_constant_stays() -> None:
    assert rates(ConstantRate(peak=0.5, warmup=2), 4)[1:] == [0.25, 0.5, 0.5, 0.5]
    assert rates(ConstantRate(peak=0.5), 3)[1:] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("schedule", [Cosine(peak=1.0), Linear(peak=1.0), WSD(peak=1.0), ConstantRate(peak=1.0)])
def test_one_step_and_a_run_that_is_all_warm_up(schedule: Cosine | Linear | WSD | ConstantRate) -> None:
    assert math.isfinite(rate(schedule, 1, 1, 64))
    assert rates(schedule.override({"warmup": 8}), 4)[1:] == [0.125, 0.25, 0.375, 0.5]
    assert rate(schedule.override({"warmup": 4}), 4, 4, 64) == 1.0
    assert rate(schedule, 900, 10, 64) == rate(schedule, 10, 10, 64)  # past the end


schedules = st.one_of(
    st.builds(Noam, warmup=st.integers(1, 50)),
    st.builds(Cosine, peak=st.just(1.0), warmup=st.integers(0, 50), floor=st.floats(0, 1)),
    st.builds(Linear, peak=st.just(1.0), warmup=st.integers(0, 50), floor=st.floats(0, 1)),
    st.builds(
        WSD, peak=st.just(1.0), warmup=st.integers(0, 50), floor=st.floats(0.01, 1), decay=st.floats(0.01, 1),
        shape=st.sampled_from(["linear", "sqrt", "exponential"]),
    ),
    st.builds(InverseSqrt, peak=st.just(1.0), hold=st.integers(1, 50)),
    st.builds(ConstantRate, peak=st.just(1.0), warmup=st.integers(0, 50)),
)  # fmt: skip


@given(schedule=schedules, steps=st.integers(1, 80))
def test_rates_rise_then_fall_and_never_leave_the_range(schedule: Schedule, steps: int) -> None:
    values = rates(schedule, steps)[1:]
    top = values.index(max(values))
    assert all(a <= b for a, b in pairwise(values[: top + 1]))
    assert all(a >= b - 1e-15 for a, b in pairwise(values[top:]))
    assert all(0 <= value <= 1 for value in values)


def test_the_table_has_the_first_the_last_and_every_turn() -> None:
    schedule = WSD(peak=1.0, warmup=30, decay=0.1)
    shown = table(schedule, 1000, 64, rows=4)
    assert [step for step, _ in shown] == [1, 30, 250, 500, 750, 900, 1000]
    assert all(value == rate(schedule, step, 1000, 64) for step, value in shown)
    assert [step for step, _ in table(InverseSqrt(hold=7), 10, 64, rows=2)] == [1, 5, 7, 10]
    assert [step for step, _ in table(Noam(), 4, 64)] == [1, 2, 3, 4]  # the warm-up ends later than the run
    assert (4000, pytest.approx(6.98771e-4)) in table(Noam(), 100_000, 512)


def test_a_kind_without_a_rule_is_named() -> None:
    class Strange(Schedule):
        kind: Literal["strange"] = "strange"

    with pytest.raises(ConfigError, match="schedule: 'strange' has no rule"):
        rate(Strange(), 1, 1, 1)
