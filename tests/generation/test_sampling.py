"""One token from logits: greedy, by probability, and by the seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.errors import GenerationError
from qkv.generate import draw
from qkv.generate.sampling import chosen

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05]))


def frequencies(logits: np.ndarray, temperature: float, n: int = 4000) -> np.ndarray:
    """How often each token is drawn at positions 0 to n - 1."""
    drawn = [draw(logits, temperature, 7, position) for position in range(n)]
    return np.bincount(drawn, minlength=len(logits)) / n


def test_temperature_zero_takes_the_largest_and_the_first_of_equals() -> None:
    assert draw(np.array([0.0, 3.0, -1.0]), 0.0, 0, 0) == 1
    assert draw(np.array([1.0, 3.0, 3.0]), 0.0, 5, 9) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability(temperature: float) -> None:
    expected = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
    # Four standard deviations of a frequency over 4000 draws.
    bound = 4 * np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(frequencies(LOGITS, temperature) - expected) < bound).all()


def test_a_token_of_no_probability_never_comes() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf])
    assert set(np.flatnonzero(frequencies(logits, 1.0, 500))) == {1, 3}


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.24, 1), (0.25, 3), (1 - 2**-53, 3)])
def test_the_ends_of_the_range_fall_on_tokens_that_can_come(uniform: float, token: int) -> None:
    for total in (1.0, 1.1, 3.0, 7e-5):
        cumulative = np.array([0.0, 0.25, 0.25, 1.0, 1.0]) * total
        assert chosen(cumulative, uniform) == token


def test_large_logits_do_not_overflow() -> None:
    assert draw(np.array([1e4, -1e4], dtype=np.float32), 1.0, 0, 0) == 0


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    flat = np.zeros(1000)
    assert draw(flat, 1.0, 3, 5) == draw(flat, 1.0, 3, 5)
    assert len({draw(flat, 1.0, seed, 5) for seed in range(20)}) > 15
    assert len({draw(flat, 1.0, 3, position) for position in range(20)}) > 15


@pytest.mark.parametrize(("temperature", "seed", "problem"), [(-0.1, 0, "temperature"), (1.0, -1, "seed")])
def test_impossible_requests_are_refused(temperature: float, seed: int, problem: str) -> None:
    with pytest.raises(GenerationError, match=f"{problem}: must be 0"):
        draw(LOGITS, temperature, seed, 0)
