"""One token from logits: penalties, constraints, log-probabilities, and draws by seed, sample and position alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from qkv.config.decoding import Beam, Greedy, Sampling
from qkv.errors import GenerationError
from qkv.generate import draw
from qkv.generate.sampling import Chooser, chosen, uniform

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
NEVER = -math.inf


# Greedy


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    chooser = Chooser(Greedy(), [7])
    assert chooser.choose(np.array([0, 3, -1], np.float32), []).token == 1
    assert chooser.choose(np.array([1, 3, 3], np.float32), [2]).token == 1
    assert chooser.distribution(np.array([1, 3, 3], np.float32), []).tolist() == [0, 1, 0]
    assert chooser.choose(np.array([NEVER, -5, NEVER], np.float32), []).token == 1


# What is done to the logits first

TEN = np.array([2.0, -1.0, 0.5, 0.0, 1.0], np.float32)


def shaped(decoding_fields: dict[str, Any], generated: list[int], prompt: Sequence[int] = (0, 1, 1)) -> list[float]:
    """The logits after shaping, up to a constant that makes the last one what it was."""
    probabilities = Chooser(Sampling(**decoding_fields), prompt).distribution(TEN, generated)
    logits = np.log(probabilities)
    return (logits - logits[-1] + 1.0).tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.25, 0, 1]),  # 0 and 1 in the prompt, 2 generated: once each
        ({"repetition_penalty": 0.5}, [4.0, -0.5, 1.0, 0, 1]),
        ({"repetition_penalty": 2.0, "penalty_scope": "generated"}, [2.0, -1.0, 0.25, 0, 1]),
        ({"frequency_penalty": 0.5}, [1.5, -2.0, -0.5, 0, 1]),
        ({"frequency_penalty": 0.5, "penalty_scope": "generated"}, [2.0, -1.0, -0.5, 0, 1]),
        ({"frequency_penalty": -0.5}, [2.5, 0.0, 1.5, 0, 1]),
        ({"presence_penalty": 0.5}, [1.5, -1.5, 0.0, 0, 1]),
        ({"presence_penalty": 0.5, "penalty_scope": "generated"}, [2.0, -1.0, 0.0, 0, 1]),
        ({"logit_bias": {3: 2.5, 0: -1}}, [1.0, -1.0, 0.5, 2.5, 1]),
        # Repetition first, then what is subtracted, then the bias.
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 1, "logit_bias": {0: 4}},
            [2 / 2 - 0.25 - 1 + 4, -1 * 2 - 0.5 - 1, 0.5 / 2 - 0.5 - 1, 0, 1],
        ),
    ],
)
def test_penalties_and_biases(fields: dict[str, Any], expected: list[float]) -> None:
    assert shaped(fields, [2, 2]) == pytest.approx(expected, abs=1e-12)


def test_penalties_see_what_was_generated_now() -> None:
    chooser = Chooser(Greedy(presence_penalty=10.0), [4])
    generated: list[int] = []
    for _ in range(4):
        generated.append(chooser.choose(TEN, generated).token)
    assert generated == [0, 2, 3, 1]
    assert chooser.choose(TEN, []).token == 0  # after a rollback, as at first


@pytest.mark.parametrize("decoding", [Greedy(), Sampling(), Sampling(top_k=2), Greedy(repetition_penalty=1.3)])
def test_shaping_never_changes_the_logits_that_were_given(decoding: Greedy | Sampling) -> None:
    for logits in (TEN.copy(), TEN.astype(np.float64)):
        Chooser(decoding, [1], ends=frozenset({0})).choose(logits, [0], np.array([True, True, False, True, True]))
        assert (logits == TEN).all()


def test_a_constraint_leaves_what_it_allows() -> None:
    allowed = np.array([False, True, False, True, False])
    expected = np.exp([-1.0, 0.0]) / np.exp([-1.0, 0.0]).sum()
    found = Chooser(Sampling(), []).distribution(TEN, [], allowed)
    assert found == pytest.approx([0, expected[0], 0, expected[1], 0])
    assert Chooser(Greedy(), []).choose(TEN, [], allowed).token == 3
    # Filters see only what is allowed: token 3 has 0.73 of the mass there.
    assert Chooser(Sampling(top_p=0.7), []).distribution(TEN, [], allowed).tolist() == [0, 0, 0, 1, 0]
    # A bias cannot bring back what is forbidden.
    assert Chooser(Greedy(logit_bias={0: 1e6}), []).choose(TEN, [], allowed).token == 3


def test_b104_ends_are_forbidden_only_while_too_few_tokens_were_generated() -> None:
    ends = frozenset({0, 2, 99, -1})  # 99: an end outside this vocabulary; -1: none
    chooser = Chooser(Greedy(min_new_tokens=5), [0, 0], ends=ends)
    generated: list[int] = []
    for _ in range(6):
        generated.append(chooser.choose(TEN, generated).token)
    assert generated == [4, 4, 4, 4, 4, 0]
    drawn = Chooser(Sampling(min_new_tokens=5), [0, 0], ends=ends)
    assert np.flatnonzero(drawn.distribution(TEN, [4] * 4)).tolist() == [1, 3, 4]
    assert (drawn.distribution(TEN, [4] * 5) > 0).all()
    assert Chooser(Greedy(), [], ends=ends).choose(TEN, []).token == 0


# Log-probabilities


@pytest.mark.parametrize(
    "decoding",
    [
        Greedy(),
        Greedy(logit_bias={3: 50.0}),
        Sampling(temperature=0.1),
        Sampling(top_k=2, repetition_penalty=1.5),
        Sampling(top_p=0.3),
    ],
)
def test_the_log_probability_is_the_models_own(decoding: Greedy | Sampling) -> None:
    token, logprob = Chooser(decoding, [1, 2]).choose(TEN, [0])
    exact = TEN.astype(np.float64)
    assert logprob == pytest.approx(exact[token] - np.log(np.exp(exact).sum()), abs=1e-14)


def test_log_probabilities_of_large_logits() -> None:
    assert Chooser(Greedy(), []).choose(np.array([1e4, 1e4, -1e4], np.float32), []) == (0, -math.log(2))
    assert Chooser(Greedy(), []).choose(np.array([NEVER, -3e38], np.float32), []) == (1, 0.0)


# Draws


def test_what_is_chosen_is_what_the_distribution_and_the_number_say() -> None:
    generator = np.random.default_rng(0)
    for position in range(200):
        logits = (generator.standard_normal(700) * 2).astype(np.float32)
        chooser = Chooser(Sampling(top_p=0.9, temperature=1.3, seed=position), [1] * position, sample=3)
        expected = chosen(chooser.distribution(logits, [5]).cumsum(), chooser.uniform(1))
        assert chooser.choose(logits, [5]).token == expected


@pytest.mark.parametrize(
    "decoding",
    [
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.6, top_k=6),
        Sampling(seed=3, top_p=0.9),
        Sampling(seed=4, min_p=0.1, frequency_penalty=0.3),
        Sampling(seed=5, typical_p=0.8),
        Sampling(seed=6, top_k=2),
    ],
)
def test_draws_follow_the_distribution(decoding: Sampling) -> None:
    """Chi-square of 6000 draws, one per sample of the same request."""
    n, prompt, generated = 6000, [3, 1], [4, 4, 2]
    logits = np.array([1.2, -0.5, 0.3, 2.0, 0.0, 0.9, -1.1, 1.4], np.float32)
    counts = np.zeros(len(logits))
    for sample in range(n):
        counts[Chooser(decoding, prompt, sample=sample).choose(logits, generated).token] += 1
    expected = n * Chooser(decoding, prompt).distribution(logits, generated)
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert possible.sum() >= 2
    assert statistic < 24.32  # the 99.9 % quantile of 7 degrees of freedom, the most there are here


def test_a_seed_means_the_same_whatever_else_happens() -> None:
    logits = np.zeros(1000, np.float32)
    texts = []
    for disturbed in (False, True):
        chooser, other = Chooser(Sampling(seed=3), [1, 2, 3]), Chooser(Sampling(seed=9), [1])
        text: list[int] = []
        for _ in range(8):
            if disturbed:
                np.random.default_rng().random(5)
                other.choose(logits, [])
                chooser.choose(logits, [*text, 17])
                chooser.uniform(2, lane=1)
            text.append(chooser.choose(logits, text).token)
        texts.append(text)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 5
    # Resumed with the first four as the prompt, the rest is the same.
    resumed = Chooser(Sampling(seed=3), [1, 2, 3, *texts[0][:4]])
    assert [resumed.choose(logits, texts[0][4 : 4 + n]).token for n in range(4)] == texts[0][4:]


def test_seeds_samples_positions_and_lanes_give_different_numbers() -> None:
    numbers = {
        uniform(seed, sample, position, lane)
        for seed in (0, 1, 2**64 - 1)
        for sample in (0, 1, 2**64 - 1)
        for position in (0, 1, 2)
        for lane in (0, 1, 2)
    }
    assert len(numbers) == 81
    assert all(0 <= number < 1 for number in numbers)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> int:
    """The first word of Philox4x64-10, from the paper: ten rounds of two products, the key raised after each."""
    (k0, k1), (c0, c1, c2, c3), full = key, counter, 2**64
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = right // full ^ c1 ^ k0, right % full, left // full ^ c3 ^ k1, left % full
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % full, (k1 + 0xBB67AE8584CAA73B) % full
    return c0


def test_the_numbers_are_those_of_philox() -> None:
    assert philox((0, 0), (0, 0, 0, 0)) == 0x16554D9ECA36314C  # the known answer of its authors
    for seed, sample, position, lane in ((0, 0, 0, 0), (5, 2, 7, 1), (2**64 - 1, 2**64 - 1, 10**6, 3)):
        word = philox((seed, sample), (position + 1, lane, 0, 0))
        assert uniform(seed, sample, position, lane) == (word >> 11) / 2**53
    assert Chooser(Sampling(seed=9), [0] * 4, sample=6).uniform(2, lane=3) == uniform(9, 6, 6, 3)
    assert Chooser(Greedy(), [0] * 4).uniform(2) == uniform(0, 0, 6)


def test_the_first_sample_has_the_numbers_of_the_seed_alone() -> None:
    for seed, position in ((0, 0), (3, 5), (2**64 - 1, 1000)):
        expected = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
        assert uniform(seed, 0, position) == expected


def test_different_samples_are_independent() -> None:
    one, two = ([uniform(0, sample, position) for position in range(4000)] for sample in (0, 1))
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / math.sqrt(4000)
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 4 / math.sqrt(4000)
    assert abs(np.mean(one) - 0.5) < 4 / math.sqrt(12 * 4000)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.24, 1), (0.25, 3), (1 - 2**-53, 3)])
def test_the_ends_of_the_range_fall_on_tokens_that_can_come(uniform: float, token: int) -> None:
    for total in (1.0, 1.1, 3.0, 7e-5):
        cumulative = np.array([0.0, 0.25, 0.25, 1.0, 1.0]) * total
        assert chosen(cumulative, uniform) == token


# What cannot be served


def refusal(call: Callable[..., Any], *arguments: Any, **fields: Any) -> str:
    with pytest.raises(GenerationError) as error:
        call(*arguments, **fields)
    return str(error.value)


BOTH = pytest.mark.parametrize("decoding", [Greedy(), Sampling(), Sampling(top_k=1), Sampling(top_p=0.5, min_p=0.1)])


@BOTH
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_no_token(decoding: Greedy | Sampling, wrong: float) -> None:
    logits = TEN.copy()
    logits[3] = wrong
    message = refusal(Chooser(decoding, [1, 2]).choose, logits, [4])
    assert message.startswith(f"position 3: the logit of token 3 is {wrong}; the model overflowed: ")
    assert refusal(Chooser(decoding, [1, 2]).distribution, logits, [4]) == message


@BOTH
def test_a_model_that_offers_nothing(decoding: Greedy | Sampling) -> None:
    message = refusal(Chooser(decoding, []).choose, np.full(5, NEVER, np.float32), [])
    assert message.startswith("position 0: every logit is -inf; ")


@BOTH
def test_nothing_that_is_allowed(decoding: Greedy | Sampling) -> None:
    chooser = Chooser(decoding, [1], ends=frozenset({0}))
    nothing = np.zeros(5, bool)
    assert refusal(chooser.choose, TEN, [], nothing).startswith("position 1: the constraint allows no token; ")
    padded = np.where(np.arange(5) < 3, TEN, NEVER).astype(np.float32)
    message = refusal(chooser.choose, padded, [], np.arange(5) >= 3)
    assert message.startswith("position 1: the model gives every allowed token probability 0; ")
    early = Chooser(decoding.model_copy(update={"min_new_tokens": 3}), [1], ends=frozenset({0}))
    message = refusal(early.choose, TEN, [2], np.arange(5) == 0)
    assert message.startswith("position 2: only tokens that end the text could come, before min_new_tokens = 3; ")
    assert chooser.choose(TEN, [2], np.arange(5) == 0).token == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {5: 1.0}}, "logit_bias: token 5 is not in the vocabulary, use 0 to 4"),
        ({"presence_penalty": 1.0}, "prompt: token 6 is not in the vocabulary, use 0 to 4"),
        (
            {"presence_penalty": 1.0, "penalty_scope": "generated"},
            "generated: token -2 is not in the vocabulary, use 0 to 4",
        ),
        (
            {"logit_bias": {1: 1.7e308}, "frequency_penalty": -1.7e308, "penalty_scope": "generated"},
            "position 3: a penalty or bias makes a logit infinite; choose smaller ones",
        ),
    ],
)
def test_what_does_not_fit_the_vocabulary(fields: dict[str, Any], message: str) -> None:
    generated = [-2] if "frequency_penalty" not in fields else [1]
    assert refusal(Chooser(Greedy(**fields), [6, 0]).choose, TEN, generated) == message


def test_an_infinite_reward_for_an_impossible_token_is_no_number_either() -> None:
    chooser = Chooser(Greedy(frequency_penalty=-1.7e308), [])
    logits = np.array([0.0, NEVER], np.float32)
    assert chooser.choose(logits, [1]).token == 0
    assert "a penalty or bias makes a logit infinite" in refusal(chooser.choose, logits, [1, 1])


def test_shapes_and_kinds_that_do_not_fit() -> None:
    chooser = Chooser(Greedy(), [])
    assert "logits must be (V,), one per token, got shape (1, 5)" in refusal(chooser.choose, TEN[None], [])
    assert "got shape (0,)" in refusal(chooser.choose, TEN[:0], [])
    short, numbers = np.ones(4, bool), np.ones(5, np.int64)
    assert refusal(chooser.choose, TEN, [], short) == "allowed: must be one boolean per token, (5,), got bool (4,)"
    assert refusal(chooser.choose, TEN, [], numbers) == "allowed: must be one boolean per token, (5,), got int64 (5,)"
    assert refusal(Chooser, Beam(), []).startswith("decoding: Beam ranks whole texts")
    assert refusal(Chooser, Greedy(), [], sample=-1) == "sample: must be 0 to 2^64 - 1, got -1"


# The function of the plain loop


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


def test_large_logits_do_not_overflow() -> None:
    assert draw(np.array([1e4, -1e4], dtype=np.float32), 1.0, 0, 0) == 0


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    flat = np.zeros(1000)
    assert draw(flat, 1.0, 3, 5) == draw(flat, 1.0, 3, 5)
    assert len({draw(flat, 1.0, seed, 5) for seed in range(20)}) > 15
    assert len({draw(flat, 1.0, 3, position) for position in range(20)}) > 15


def test_a_draw_is_the_choice_of_a_plain_sampling() -> None:
    generator = np.random.default_rng(1)
    for position in range(100):
        logits = generator.standard_normal(50).astype(np.float32)
        chooser = Chooser(Sampling(temperature=0.7, seed=4), [0] * position)
        assert draw(logits, 0.7, 4, position) == chooser.choose(logits, []).token


@pytest.mark.parametrize(("temperature", "seed", "problem"), [(-0.1, 0, "temperature"), (1.0, -1, "seed")])
def test_impossible_requests_are_refused(temperature: float, seed: int, problem: str) -> None:
    with pytest.raises(GenerationError, match=f"{problem}: must be 0"):
        draw(LOGITS, temperature, seed, 0)
