"""Computed permutations: complete, different, evenly spread, and the same for ever."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.train.data import permutation
from qkv.train.data.permutation import below, key_of, permuted

SIZES = st.integers(1, 3000) | st.sampled_from([2**k + d for k in range(3, 13) for d in (-1, 0, 1)])


@given(SIZES, st.integers(0, 2**64 - 1))
def test_each_number_comes_exactly_once(size: int, key: int) -> None:
    found = permuted(np.arange(size), size, key)
    assert np.array_equal(np.sort(found), np.arange(size))


@given(SIZES, st.data())
def test_any_place_can_be_asked_for(size: int, data: st.DataObject) -> None:
    whole = permuted(np.arange(size), size, 5)
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=8)), dtype=np.int64)
    assert permuted(places, size, 5).tolist() == whole[places].tolist()


def test_a_huge_order_costs_what_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    network = permutation._network

    def counted(index: permutation.Ints, first: int, second: int, keys: tuple[int, ...]) -> permutation.Ints:
        asked.append(index.size)
        return network(index, first, second, keys)

    monkeypatch.setattr(permutation, "_network", counted)
    size = 10**12 + 39
    found = permuted(np.arange(1000), size, 1)
    assert found.min() >= 0
    assert found.max() < size
    assert len(set(found.tolist())) == 1000
    assert sum(asked) <= 1010  # at most one in a million is sent through again


def test_all_orders_are_equally_likely() -> None:
    # Chi-square with 23 degrees of freedom: 49.7 is exceeded once in a thousand times. The keys are fixed.
    orders = dict.fromkeys(permutations(range(4)), 0)
    rounds = 2400
    for key in range(rounds):
        orders[tuple(permuted(np.arange(4), 4, key).tolist())] += 1
    expected = rounds / len(orders)
    assert sum((count - expected) ** 2 / expected for count in orders.values()) < 49.7


def test_neighbours_do_not_stay_neighbours() -> None:
    size, rounds = 50, 400
    steps = [np.diff(permuted(np.arange(size), size, key_of(7, epoch))) for epoch in range(rounds)]
    # 49 pairs in each of 400 orders: a share of 1/50 with a standard deviation of 0.001.
    assert abs(float((np.array(steps) == 1).mean()) - 1 / size) < 0.004


def test_seeds_and_epochs_make_different_keys() -> None:
    keys = {key_of(seed, epoch) for seed in range(30) for epoch in range(30)}
    assert len(keys) == 900
    assert key_of(1) != key_of(1, 0) != key_of(0, 1) != key_of(1, 1)


@given(st.integers(1, 1000), st.integers(0, 2**64 - 1))
def test_random_numbers_are_below_their_limit(limit: int, key: int) -> None:
    found = below(limit, key, np.arange(200))
    assert found.min() >= 0
    assert found.max() < limit


def test_random_numbers_are_spread_evenly() -> None:
    counts = np.bincount(below(10, key_of(3), np.arange(10_000)), minlength=10)
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # 9 degrees of freedom, once in a thousand


def test_the_order_of_a_seed_never_changes() -> None:
    # A run that is taken up again with another version must go on with the same data.
    assert permuted(np.arange(10), 10, key_of(0, 0)).tolist() == GOLDEN
    assert key_of(0, 0) == GOLDEN_KEY


GOLDEN = [0, 6, 5, 7, 3, 2, 8, 1, 9, 4]
GOLDEN_KEY = 4295609322031115183
