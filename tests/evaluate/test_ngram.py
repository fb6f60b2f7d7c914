"""The n-gram baseline: proper probabilities, equal to a slow count, and the figure that the demo prints."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.evaluate import NGram
from qkv.text import language_reference

V = 5
TOKENS = st.lists(st.integers(0, V - 1), min_size=6, max_size=60)


def slow(training: list[int], history: tuple[int, ...], token: int) -> float:
    """Witten and Bell's recursion, by counting anew for every history."""
    lower = 1 / V if not history else slow(training, history[1:], token)
    if not history:
        followers = Counter(training)
    else:
        n = len(history)
        places = [i for i in range(len(training) - n) if tuple(training[i : i + n]) == history]
        followers = Counter(training[i + n] for i in places)
    total, kinds = followers.total(), len(followers)
    return (followers[token] + kinds * lower) / (total + kinds) if total else lower


@given(TOKENS, st.lists(st.integers(0, V - 1), max_size=4), st.integers(1, 4))
def test_probabilities_sum_to_one_after_every_history(training: list[int], history: list[int], order: int) -> None:
    p = NGram(training, order, V).distribution(history)
    assert (p > 0).all()
    assert p.sum() == pytest.approx(1, abs=1e-12)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_it_equals_a_slow_count(training: list[int], text: list[int], order: int) -> None:
    expected = [slow(training, tuple(text[max(0, i - order + 1) : i]), token) for i, token in enumerate(text)]
    assert NGram(training, order, V).probabilities(text) == pytest.approx(np.array(expected), abs=1e-12)


def test_a_case_by_hand() -> None:
    # a b a b a c: after a came b twice and c once. p_1(b) = (2 + 3/3) / (6 + 3) = 1/3, p_2(b | a) = (2 + 2/3) / (3 + 2)
    model = NGram([0, 1, 0, 1, 0, 2], 2, 3)
    assert model.probabilities([0, 1])[1] == pytest.approx((2 + 2 / 3) / 5, abs=1e-15)


def test_the_last_history_of_the_text_counts_no_follower() -> None:
    model = NGram([0, 0, 0, 1], 2, 3)
    assert model.distribution([1]) == pytest.approx(NGram([0, 0, 0, 1], 1, 3).distribution([]), abs=1e-15)


def test_a_text_shorter_than_the_order() -> None:
    assert len(NGram([0, 1, 2, 1], 3, 3).probabilities([1])) == 1


def test_longer_histories_help_on_real_text() -> None:
    data = np.frombuffer(language_reference().encode(), dtype=np.uint8)
    training, held_out = data[:100_000], data[100_000:110_000]
    bits = [-np.log2(NGram(training, order, 256).probabilities(held_out)).mean() for order in (1, 2, 3)]
    assert 8 > bits[0] > bits[1] + 0.5 > bits[2] + 1
