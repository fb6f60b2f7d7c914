"""Top-k, top-p, min-p, typical: each against its definition by sorting, alone and one after another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config.decoding import Greedy, Sampling
from qkv.generate.sampling import ROUNDING, Chooser

NEVER = -math.inf


def distribution(probabilities: Sequence[float], sampling: Sampling) -> list[float]:
    """What is left of these probabilities, as a model in float32 gives their logits."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(probabilities)).astype(np.float32)
    return Chooser(sampling, []).distribution(logits, []).tolist()


# The definitions: everything sorted, one token after another


def renormalised(kept: dict[int, float]) -> dict[int, float]:
    total = math.fsum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


def until(order: list[int], kept: dict[int, float], share: float) -> dict[int, float]:
    """The first tokens of the order that have the share together."""
    taken: dict[int, float] = {}
    for token in order:
        taken[token] = kept[token]
        if math.fsum(taken.values()) >= share - ROUNDING:
            break
    return renormalised(taken)


def by_definition(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """The survivors and their probabilities, zeros left out."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: sampling.top_k]
    top = logits[order[0]]
    kept = renormalised({token: math.exp((logits[token] - top) / sampling.temperature) for token in order})
    if sampling.top_p < 1:
        kept = until(sorted(kept, key=lambda token: (-kept[token], token)), kept, sampling.top_p)
    if sampling.min_p > 0:
        least = sampling.min_p * max(kept.values())
        kept = renormalised({token: p for token, p in kept.items() if p >= least})
    kept = {token: p for token, p in kept.items() if p > 0}
    if sampling.typical_p < 1:
        entropy = -math.fsum(p * math.log(p) for p in kept.values())
        far = {token: abs(-math.log(p) - entropy) for token, p in kept.items()}
        kept = until(sorted(kept, key=lambda token: (far[token], token)), kept, sampling.typical_p)
    return kept


def assert_as_defined(logits: np.ndarray, sampling: Sampling) -> None:
    found = Chooser(sampling, []).distribution(logits, [])
    expected = by_definition(logits.tolist(), sampling)
    assert np.flatnonzero(found).tolist() == sorted(expected)
    assert np.abs(found - [expected.get(token, 0.0) for token in range(len(logits))]).max() < 1e-12


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(1, 12),
    top_p=st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 0.013, 0.11, 0.37, 1.0]),
    typical_p=st.floats(0.01, 1),
) | st.builds(Sampling, top_p=st.floats(0.01, 1))
tied = st.lists(st.sampled_from([-2.0, 0.0, 1.0, 1.5, 3.0]), min_size=1, max_size=12)
distinct = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12)


@given(logits=st.one_of(tied, distinct), sampling=samplings)
def test_filters_are_as_defined(logits: list[float], sampling: Sampling) -> None:
    assert_as_defined(np.array(logits, np.float32), sampling)


@pytest.mark.parametrize("n", [255, 257, 1000, 5000])
@pytest.mark.parametrize("levels", [1, 2, 40, None])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=300),
        Sampling(top_p=0.9),
        Sampling(top_p=0.02),
        Sampling(top_p=0.999, temperature=0.5),
        Sampling(typical_p=0.9),
        Sampling(typical_p=0.2),
        Sampling(top_k=2000, top_p=0.9, min_p=0.02, typical_p=0.8),
    ],
    ids=lambda sampling: " ".join(f"{name}={getattr(sampling, name)}" for name in sorted(sampling.model_fields_set)),
)
def test_filters_are_as_defined_on_large_vocabularies(n: int, levels: int | None, sampling: Sampling) -> None:
    """Where nothing is sorted whole; with few levels nearly every token is tied with others."""
    generator = np.random.default_rng(n)
    logits = generator.standard_normal(n) * 2 if levels is None else generator.integers(0, levels, n) / 8
    assert_as_defined(logits.astype(np.float32), sampling)


# Single filters, by hand


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 3}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [0.625, 0.375, 0, 0]),
        ({"top_p": 1e-12}, [1, 0, 0, 0]),
        ({"min_p": 0.25}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        # Entropy 1.142; -log p is 0.693, 1.204, 1.897, 2.996: the second is nearest, then the first.
        ({"typical_p": 0.2}, [0, 1, 0, 0]),
        ({"typical_p": 0.5}, [0.625, 0.375, 0, 0]),
        ({"typical_p": 0.9}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_a_filter_keeps_what_it_should(filters: dict[str, Any], expected: list[float]) -> None:
    assert distribution([0.5, 0.3, 0.15, 0.05], Sampling(**filters)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_b100_equal_tokens_at_the_cut_are_taken_by_id_until_there_are_enough(name: str) -> None:
    assert distribution([0.25] * 4, Sampling(**{name: 0.5})) == [0.5, 0.5, 0, 0]
    assert distribution([0.25] * 4, Sampling(**{name: 0.51})) == pytest.approx([1 / 3] * 3 + [0])
    assert distribution([0.1] * 10, Sampling(**{name: 0.8})) == pytest.approx(
        [1 / 8] * 8 + [0, 0]
    )  # sums to 0.79999...
    assert distribution([1 / 4096] * 4096, Sampling(**{name: 0.5})) == [1 / 2048] * 2048 + [0] * 2048


def test_b100_top_k_takes_exactly_k_and_min_p_all_equals() -> None:
    assert distribution([0.2, 0.3, 0.2, 0.2, 0.1], Sampling(top_k=3)) == pytest.approx([2 / 7, 3 / 7, 2 / 7, 0, 0])
    assert distribution([0.25] * 4, Sampling(top_k=2)) == [0.5, 0.5, 0, 0]
    assert distribution([0.2, 0.4, 0.2, 0.2], Sampling(min_p=0.5 - 1e-6)) == pytest.approx([0.2, 0.4, 0.2, 0.2])
    assert distribution([0.2, 0.4, 0.2, 0.2], Sampling(min_p=0.5 + 1e-6)) == [0, 1, 0, 0]


def test_b101_each_filter_sees_the_renormalised_survivors_of_the_one_before() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    two, one = pytest.approx([0.625, 0.375, 0, 0], abs=1e-7), [1, 0, 0, 0]
    # Of top_k = 2, the first has 0.625 of the mass: enough for 0.6, not for 0.9. Of all mass it has 0.5.
    assert distribution(probabilities, Sampling(top_k=2, top_p=0.9)) == two
    assert distribution(probabilities, Sampling(top_k=2, top_p=0.6)) == one
    assert distribution(probabilities, Sampling(top_p=0.6)) == two
    # Typical after min_p: of the first two, the first lies nearer to their entropy; of all four, the second.
    assert distribution(probabilities, Sampling(min_p=0.5, typical_p=0.2)) == one
    assert distribution(probabilities, Sampling(typical_p=0.2)) == [0, 1, 0, 0]
    # The temperature comes before the filters.
    assert distribution(probabilities, Sampling(top_p=0.6, temperature=0.5)) == one


@given(logits=distinct, small=st.floats(0.01, 1), large=st.floats(0.01, 1), temperature=st.sampled_from([0.5, 1, 3]))
def test_a_looser_filter_keeps_all_that_a_stricter_one_keeps(
    logits: list[float], small: float, large: float, temperature: float
) -> None:
    small, large = sorted((small, large))

    def kept(**filters: Any) -> set[int]:
        chooser = Chooser(Sampling(temperature=temperature, **filters), [])
        return set(np.flatnonzero(chooser.distribution(np.array(logits, np.float32), [])))

    for name in ("top_p", "typical_p"):
        assert kept(**{name: small}) <= kept(**{name: large}) <= kept()
    assert kept(min_p=large) <= kept(min_p=small) <= kept()
    assert kept(top_k=1) <= kept(top_k=2) <= kept()
    assert kept(top_k=3, top_p=small) <= kept(top_k=3)


@given(
    logits=st.lists(st.floats(-(2.0**99), 2.0**99, width=32) | st.just(NEVER), min_size=1, max_size=12),
    temperature=st.sampled_from([5e-324, 0.7, 1e300]),
    filters=st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.3}]),
)
def test_probabilities_sum_to_one_and_impossible_tokens_stay_impossible(
    logits: list[float], temperature: float, filters: dict[str, Any]
) -> None:
    if max(logits) == NEVER:
        return
    values = np.array(logits, np.float32)
    found = Chooser(Sampling(temperature=temperature, **filters), []).distribution(values, [])
    assert found.dtype == np.float64
    assert abs(found.sum() - 1) < 1e-12
    assert (found >= 0).all()
    assert (found[values == NEVER] == 0).all()


def test_one_token_of_top_k_is_the_greedy_one_at_every_temperature() -> None:
    logits = np.array([0, 1e-20, 0, 1e-20], np.float32)  # apart as numbers, equal as probabilities
    for temperature in (0.5, 1.0, 1e30):
        assert Chooser(Sampling(top_k=1, temperature=temperature), []).choose(logits, []).token == 1
    assert Chooser(Greedy(), []).choose(logits, []).token == 1
