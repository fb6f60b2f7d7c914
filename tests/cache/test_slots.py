"""Where tokens lie: every layout against a naive model that remembers all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.toys import FULL, MIXED, SINKS, WINDOW, Twin, users
from qkv.cache.cache import Options
from qkv.cache.slots import Slots
from qkv.cache.spec import Retention
from qkv.errors import CacheError

CONFIGS = {"full": FULL, "window": WINDOW, "sinks": SINKS, "mixed": MIXED}
LENGTH = 24
sizes = st.lists(st.integers(0, 9), min_size=4, max_size=4)
verbs = st.one_of(
    st.tuples(st.just("append"), sizes, st.integers(0, 2)),
    st.tuples(st.just("append"), st.integers(1, 9).map(lambda n: [n] * 4), st.just(0)),
    st.tuples(st.just("fail"), sizes, st.integers(0, 2)),
    st.tuples(st.just("truncate"), sizes),
    st.tuples(st.just("select"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    st.tuples(st.just("fork"), st.booleans()),
)
layouts = st.sampled_from([("auto", 16), ("paged", 1), ("paged", 3), ("paged", 4)])


def act(twins: list[Twin], verb: tuple[Any, ...]) -> None:
    """Do it to the first twin, whose rows may be fewer than the verb speaks of."""
    twin = twins[0]
    batch = len(twin.rows)
    if verb[0] == "fork":
        twins.append(twin.fork())
        if verb[1]:
            twins.reverse()
        del twins[3:]
    elif verb[0] == "select":
        twin.select([row % batch for row in verb[1]])
    elif verb[0] == "truncate":
        wanted = [max(0, len(row) - less) for row, less in zip(twin.rows, verb[1], strict=False)]
        if twin.may_become(wanted):
            twin.truncate(wanted)
        else:
            with pytest.raises(CacheError, match="are gone; a cache with more slack can be taken back further"):
                twin.truncate(wanted)
    else:
        new = [min(n, LENGTH - len(row)) for n, row in zip(verb[1], twin.rows, strict=False)]
        if any(new):
            twin.append(new, verb[2], fail=verb[0] == "fail")


@pytest.mark.parametrize("name", CONFIGS)
@given(layout=layouts, slack=st.sampled_from([0, 2, 30]), history=st.lists(verbs, max_size=12))
@settings(max_examples=60)
def test_any_history_shows_what_it_should(
    name: str, layout: tuple[Any, int], slack: int, history: list[tuple[Any, ...]]
) -> None:
    twins = [Twin(CONFIGS[name], 2, Options(LENGTH, layout=layout[0], page=layout[1], slack=slack))]
    for verb in history:
        act(twins, verb)
        if layout[0] == "paged":
            users(twins[0].cache, *(other.cache for other in twins[1:]))
    for twin in twins:
        twin.append([1] * len(twin.rows)) if all(len(row) < LENGTH for row in twin.rows) else None


def test_slots_by_hand() -> None:
    """A window of 4 with 2 sinks and slack 1: a ring of 5 after the sinks."""
    slots = Slots(("a",), Retention(3, 2), 1, None, 1)
    assert (slots.capacity, slots.kind, slots.kept) == (7, "window", 5)
    twin = Twin(SINKS, 1, Options(None, slack=1))  # window 3: a ring of 4
    group = twin.cache.groups[0]
    assert isinstance(group, Slots)
    for _ in range(7):
        twin.append([1])
    assert group.positions.tolist() == [[0, 1, 6, 3, 4, 5]]
    twin.append([2])
    assert group.positions.tolist() == [[0, 1, 6, 7, 8, 5]]


def test_a_window_as_long_as_the_context_is_full() -> None:
    for longest, kind in ((6, "full"), (7, "window"), (8, "window"), (None, "window")):
        assert Slots(("a",), Retention(3, 2), 1, longest, 1).kind == kind


@pytest.mark.parametrize("layout", [{}, {"layout": "paged", "page": 3}])
@pytest.mark.parametrize("slack", [0, 1, 5])
def test_truncating_within_slack_is_exact_and_beyond_it_refused(layout: dict[str, Any], slack: int) -> None:
    """At every length; after a refusal all is as before.

    The ring has a slot for the newest token, too, which the next one does not need: so one more than slack can go.
    """
    for length in range(1, 20):
        twin = Twin(WINDOW, 1, Options(None, slack=slack, **layout))
        for _ in range(length):
            twin.append([1])
        beyond = length - slack - 2
        if length > 5 + slack:
            with pytest.raises(CacheError, match=f"row 0 cannot go on at {beyond}: of its window the tokens"):
                twin.truncate([beyond])
            assert twin.cache.lengths == [length]
        twin.truncate([max(0, length - slack - length % 2)])
        for _ in range(6):
            twin.append([1])


@pytest.mark.parametrize("layout", [{}, {"layout": "paged", "page": 3}])
@pytest.mark.parametrize("config", [WINDOW, SINKS, MIXED])
def test_from_nothing_a_row_can_always_begin_anew(layout: dict[str, Any], config: Any) -> None:
    """What a window has lost concerns only the text that it had."""
    twin = Twin(config, 2, Options(LENGTH, **layout))
    twin.append([12, 12])
    twin.truncate([0, 12])
    for _ in range(8):
        twin.append([1, 1])
    twin.truncate([0, 0])
    twin.append([9, 9])


def test_windows_can_be_read_in_pieces_as_long_as_slack_and_one() -> None:
    """Longer ones are looked at before they are written."""
    for slack in (0, 3):
        twin = Twin(WINDOW, 1, Options(None, slack=slack))
        twin.append([3])
        for size, mode in ((slack + 2, "both"), (slack + 1, "stored")):
            step = twin.cache.begin(size)
            assert step.groups[0].mode == mode
            twin.cache.abort(step)
        twin.append([1])


@pytest.mark.parametrize("layout", [{}, {"layout": "paged", "page": 3}])
def test_a_failed_chunk_that_is_longer_than_the_window_leaves_all_as_it_was(layout: dict[str, Any]) -> None:
    for size in (2, 5, 12):
        twin = Twin(MIXED, 2, Options(LENGTH, **layout))
        twin.append([7, 5])
        twin.append([size, size - 1], fail=True)
        twin.append([1, 2])
        twin.append([size, size], fail=True)
        twin.append([1, 1])


def test_the_view_is_as_long_as_a_granule() -> None:
    """Few lengths occur, so that a compiled step serves many."""
    twin = Twin(FULL, 1, Options(200))
    lengths = set()
    for _ in range(130):
        step = twin.cache.begin(1)
        twin.cache.commit(step)
        if step.groups[0].view is not None:
            lengths.add(step.groups[0].view.slots)
    assert lengths == {64, 128, 192}
    assert np.array_equal(twin.cache.lengths, [130])
