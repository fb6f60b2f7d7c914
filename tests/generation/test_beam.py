"""Beam search against exhaustive search, against greedy search, and with a memory against without one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from qkv.config.decoding import Beam
from qkv.errors import GenerationError
from qkv.generate import beam as module
from qkv.generate.beam import Hypothesis, beam_search, bound, in_order, log_softmax, penalty
from qkv.generate.constrain import regex
from qkv.text import ByteTokenizer

Text = tuple[int, ...]
Logits = npt.NDArray[np.float32]
Function = Callable[[Text, Text], Logits]
"""The next logits (V,) of a source and a text."""

V, LONGEST = 4, 5
PROMPT = [1, 2]


class Rows:
    """A state that remembers whole texts: `function` sees each from its beginning."""

    def __init__(self, function: Function, sources: list[Text]) -> None:
        self.function, self.sources = function, sources
        self.texts: list[Text] = [()] * len(sources)
        self.extended: list[int] = []
        self.selected: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    @property
    def nbytes(self) -> int:
        return 8 * sum(self.lengths)

    def extend(self, tokens: Sequence[Sequence[int]]) -> Logits:
        self.extended.append(len(tokens))
        self.texts = [(*text, *new) for text, new in zip(self.texts, tokens, strict=True)]
        return np.stack([self.function(*row) for row in zip(self.sources, self.texts, strict=True)])

    def extend_all(self, tokens: Sequence[Sequence[int]]) -> list[Logits]:
        raise AssertionError("beam search extends by one token")

    def truncate(self, lengths: Sequence[int]) -> None:
        raise AssertionError("beam search takes nothing back")

    def select(self, rows: Sequence[int]) -> None:
        self.selected.append(list(rows))
        self.texts = [self.texts[row] for row in rows]
        self.sources = [self.sources[row] for row in rows]

    def fork(self) -> Rows:
        raise AssertionError("beam search repeats rows")


class Table:
    """A model that is a function of the whole text."""

    def __init__(self, function: Function, vocab_size: int = V, max_length: int | None = None) -> None:
        self.function, self.vocab_size, self.max_length = function, vocab_size, max_length
        self.state: Rows

    def start(
        self, batch: int, max_len: int, *, sources: Sequence[Sequence[int]] | None = None, slack: int = 0
    ) -> Rows:
        self.state = Rows(self.function, [tuple(source) for source in sources or [()] * batch])
        return self.state


class Cell(Rows):
    """A state that remembers a vector per text, and one per source: a row out of place has another's."""

    def __init__(self, seed: int, sources: list[Text]) -> None:
        super().__init__(lambda source, text: np.zeros(V, np.float32), sources)
        rng = np.random.default_rng(seed)
        self.inner, self.embedding, self.head = (rng.normal(size=size) for size in ((6, 6), (V, 6), (6, V)))
        self.hidden = np.zeros((len(sources), 6))
        self.cross = np.stack([self.embedding[list(source)].sum(0) for source in sources])

    def extend(self, tokens: Sequence[Sequence[int]]) -> Logits:
        super().extend(tokens)
        for row, new in enumerate(tokens):
            for token in new:
                mixed = self.inner @ self.hidden[row] + self.embedding[token] + self.cross[row]
                self.hidden[row] = np.tanh(mixed)
        return np.asarray(3 * self.hidden @ self.head, np.float32)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.hidden, self.cross = self.hidden[list(rows)], self.cross[list(rows)]


class Recurrent(Table):
    """A small recurrent encoder-decoder."""

    def __init__(self, seed: int) -> None:
        super().__init__(self.afresh)
        self.seed = seed

    def start(
        self, batch: int, max_len: int, *, sources: Sequence[Sequence[int]] | None = None, slack: int = 0
    ) -> Rows:
        self.state = Cell(self.seed, [tuple(source) for source in sources or [()] * batch])
        return self.state

    def afresh(self, source: Text, text: Text) -> Logits:
        return np.asarray(Cell(self.seed, [source]).extend([text])[0], np.float32)


def noise(seed: int, vocab_size: int = V) -> Function:
    """Random logits, different for every text."""

    def function(source: Text, text: Text) -> Logits:
        rng = np.random.default_rng([seed, len(source), *source, *text])
        return np.asarray(2 * rng.normal(size=vocab_size), np.float32)

    return function


def logprob(function: Function, tokens: Text, prompt: Sequence[int] = PROMPT, source: Text = ()) -> float:
    """The sum of the log-softmaxes, one after another."""
    total = 0.0
    for at, token in enumerate(tokens):
        logits = function(source, (*prompt, *tokens[:at])).astype(np.float64)
        total += logits[token] - np.log(np.exp(logits).sum())
    return float(total)


def every_text(ends: frozenset[int], longest: int = LONGEST, vocab_size: int = V) -> list[Text]:
    """All texts that end, and all of the largest length that do not."""
    goes_on = [token for token in range(vocab_size) if token not in ends]
    found: list[Text] = list(itertools.product(goes_on, repeat=longest))
    for length in range(longest):
        found += [(*text, end) for text in itertools.product(goes_on, repeat=length) for end in ends]
    return found


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.finished for one in found] == [one.finished for one in expected]
    np.testing.assert_allclose([one.score for one in found], [one.score for one in expected], rtol=1e-12)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 2.5])
@pytest.mark.parametrize("ends", [frozenset({0}), frozenset({1, 3}), frozenset()])
@pytest.mark.parametrize("seed", range(4))
def test_b113_wide_enough_it_is_exhaustive(seed: int, ends: frozenset[int], exponent: float) -> None:
    function = noise(seed)
    beam = Beam(width=V**LONGEST, length_penalty=exponent)
    found = beam_search(Table(function), PROMPT, beam, max_new_tokens=LONGEST, ends=ends)
    score = {text: logprob(function, text) / ((5 + len(text)) / 6) ** exponent for text in every_text(ends)}
    expected = sorted(score, key=lambda text: -score[text])
    assert len(found) == len(expected)
    assert [one.tokens for one in found] == expected
    np.testing.assert_allclose([one.score for one in found], [score[text] for text in expected], rtol=1e-12)
    assert all(one.finished == (one.tokens[-1] in ends) for one in found)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 2.5])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_stopping_before_the_end_loses_nothing(monkeypatch: pytest.MonkeyPatch, width: int, exponent: float) -> None:
    early = 0
    for seed in range(20):
        beam = Beam(width=width, length_penalty=exponent)
        runner = Table(noise(seed))
        found = beam_search(runner, PROMPT, beam, max_new_tokens=8, ends=frozenset({0}))
        early += len(runner.state.extended) < 8
        with monkeypatch.context() as patch:
            patch.setattr(module._Search, "_over", lambda *_: False)
            assert_same(found, beam_search(runner, PROMPT, beam, max_new_tokens=8, ends=frozenset({0})))
        assert len(runner.state.extended) == 8
    assert early > 0 or exponent > 1  # a strong reward of length keeps all of these searches going


@pytest.mark.parametrize("exponent", [-3.0, -0.5, 0.0, 0.6, 3.0])
def test_the_bound_is_the_best_of_all_lengths(exponent: float) -> None:
    for length, longest in [(1, 2), (1, 9), (7, 30)]:
        scores = [-2.5 / penalty(whole, exponent) for whole in range(length + 1, longest + 1)]
        assert bound(-2.5, length, longest, exponent) == max(scores)


def step_by_step(likely: dict[Text, dict[int, float]]) -> Function:
    """Probabilities after the prompt, by text: a missing token has next to none, after a missing text all are equal."""

    def function(source: Text, text: Text) -> Logits:
        probabilities = likely.get(text[len(PROMPT) :], {})
        return np.log(np.array([probabilities.get(token, 1e-12) for token in range(V)], np.float32))

    return function


B107 = step_by_step(
    {
        (): {1: 0.6, 2: 0.4},
        (1,): {1: 1.0},
        (2,): {2: 1.0},
        (1, 1): {0: 1.0},
        (2, 2): {2: 1.0},
        (2, 2, 2): {0: 1.0},
    }
)


@pytest.mark.parametrize("early_stopping", [True, False])
def test_b107_lengths_count_the_end_and_the_search_stops_with_the_last_beam(early_stopping: bool) -> None:
    runner = Table(B107)
    beam = Beam(width=2, length_penalty=1.0, early_stopping=early_stopping)
    found = beam_search(runner, PROMPT, beam, max_new_tokens=50, ends=frozenset({0}))
    assert [one.tokens for one in found] == [(1, 1, 0), (2, 2, 2, 0)]
    assert all(one.finished for one in found)
    np.testing.assert_allclose([one.score for one in found], [np.log(0.6) / (8 / 6), np.log(0.4) / (9 / 6)], rtol=1e-6)
    assert len(runner.state.extended) == 4  # the prompt and three tokens: the fourth ends both


@pytest.mark.parametrize("seed", range(10))
def test_width_1_without_penalty_is_greedy(seed: int) -> None:
    function, text = noise(seed), ()
    while len(text) < 12 and 0 not in text:
        text = (*text, int(function((), (*PROMPT, *text)).argmax()))
    beam = Beam(width=1, length_penalty=0.0, early_stopping=True)
    found = beam_search(Table(function), PROMPT, beam, max_new_tokens=12, ends=frozenset({0}))
    assert [one.tokens for one in found] == [text]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("width", [3, 6])
@pytest.mark.parametrize("ends", [frozenset({0}), frozenset()])
@pytest.mark.parametrize("seed", range(6))
def test_b16_b17_a_memory_that_follows_the_beams_changes_nothing(
    seed: int, ends: frozenset[int], width: int, groups: int
) -> None:
    beam = Beam(width=width, groups=groups, diversity=0.5 if groups > 1 else 0.0)
    runner, source = Recurrent(seed), (3, 1, 2)
    cached = beam_search(runner, PROMPT, beam, max_new_tokens=6, ends=ends, source=source)
    assert width == groups or any(rows != list(range(len(rows))) for rows in runner.state.selected[1:])
    afresh = beam_search(Table(runner.afresh), PROMPT, beam, max_new_tokens=6, ends=ends, source=source)
    assert [one.tokens for one in cached] == [one.tokens for one in afresh]
    np.testing.assert_allclose([one.score for one in cached], [one.score for one in afresh], rtol=1e-5)


def test_the_source_counts() -> None:
    texts = [
        beam_search(Recurrent(0), PROMPT, Beam(width=2), max_new_tokens=6, source=source)[0].tokens
        for source in ([3, 1, 2], [0, 0, 0, 2])
    ]
    assert texts[0] != texts[1]


def test_the_prompt_is_read_once() -> None:
    runner = Table(noise(0))
    beam_search(runner, PROMPT, Beam(width=3), max_new_tokens=4)
    assert runner.state.extended == [1, 3, 3, 3]
    assert runner.state.selected[0] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_the_model(seed: int) -> None:
    function = noise(seed)
    beam = Beam(width=6, length_penalty=0.6, groups=2, diversity=2.0)
    found = beam_search(Table(function), PROMPT, beam, max_new_tokens=LONGEST, ends=frozenset({0}))
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        assert one.logprob == pytest.approx(logprob(function, one.tokens), rel=1e-12)
        assert one.score == pytest.approx(one.logprob / ((5 + len(one.tokens)) / 6) ** 0.6, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_one_avoid_what_earlier_ones_chose_in_the_same_step(seed: int) -> None:
    function, diversity = noise(seed), 1.5
    texts: list[Text] = [(), (), ()]
    for _ in range(6):
        chosen = np.zeros(V)
        for at, text in enumerate(texts):
            token = int((log_softmax(function((), (*PROMPT, *text))) - diversity * chosen).argmax())
            chosen[token] += 1
            texts[at] = (*text, token)
    beam = Beam(width=3, groups=3, diversity=diversity)
    found = beam_search(Table(function), PROMPT, beam, max_new_tokens=6)
    assert {one.tokens for one in found} == set(texts)
    assert len(set(texts)) == 3


def test_groups_without_diversity_find_one_beam() -> None:
    function = noise(1)
    alone = beam_search(Table(function), PROMPT, Beam(width=2), max_new_tokens=5, ends=frozenset({0}))
    assert_same(
        beam_search(Table(function), PROMPT, Beam(width=4, groups=2), max_new_tokens=5, ends=frozenset({0})), alone
    )


def test_a_group_that_is_over_leaves_the_others_alone() -> None:
    function = step_by_step({(): {0: 0.9, 2: 0.1}, (2,): {2: 1.0}, (2, 2): {0: 1.0}})
    runner = Table(function)
    beam = Beam(width=2, groups=2, diversity=20.0, early_stopping=True, length_penalty=0.0)
    found = beam_search(runner, PROMPT, beam, max_new_tokens=9, ends=frozenset({0}))
    assert [one.tokens for one in found] == [(0,), (2, 2, 0)]
    assert runner.state.extended == [1, 1, 1]


@pytest.mark.parametrize("early_stopping", [True, False])
def test_without_ends_every_text_has_the_largest_length(early_stopping: bool) -> None:
    found = beam_search(Table(noise(3)), PROMPT, Beam(width=3, early_stopping=early_stopping), max_new_tokens=7)
    assert len(found) == 3
    assert all(len(one.tokens) == 7 and not one.finished for one in found)


def test_a_text_that_ends_takes_no_place_of_one_that_goes_on() -> None:
    function = step_by_step({(): {0: 0.7, 1: 0.2, 2: 0.1}, (1,): {1: 1.0}, (2,): {2: 1.0}})
    found = beam_search(Table(function), PROMPT, Beam(width=2), max_new_tokens=2, ends=frozenset({0}))
    assert [one.tokens for one in found] == [(0,), (1, 1)]
    runner = Table(function)
    beam_search(runner, PROMPT, Beam(width=2), max_new_tokens=2, ends=frozenset({0}))
    assert runner.state.extended == [1, 2]


def test_an_end_beyond_the_width_is_no_find() -> None:
    function = step_by_step({(): {0: 0.5, 1: 0.3, 3: 0.15, 2: 0.05}, (1,): {0: 1.0}, (2,): {0: 1.0}})
    beam = Beam(width=2, length_penalty=0.0, early_stopping=True)
    found = beam_search(Table(function), PROMPT, beam, max_new_tokens=5, ends=frozenset({0, 3}))
    assert [one.tokens for one in found] == [(0,), (1, 0)]


@pytest.mark.parametrize("least", [1, 3, 5])
def test_b104_no_end_comes_before_the_least_length(least: int) -> None:
    for seed in range(5):
        found = beam_search(
            Table(noise(seed)), PROMPT, Beam(width=400), max_new_tokens=5, ends=frozenset({0}), min_new_tokens=least
        )
        lengths = {len(one.tokens) for one in found if one.finished}
        assert lengths <= set(range(least + 1, 6))
        assert len(found) == 3**5 + sum(3 ** (length - 1) for length in range(least + 1, 6))


def test_among_equals_the_lower_beam_then_the_lower_token_comes_first() -> None:
    def flat(source: Text, text: Text) -> Logits:
        return np.zeros(V, np.float32)

    found = beam_search(Table(flat), PROMPT, Beam(width=3), max_new_tokens=2)
    assert [one.tokens for one in found] == [(0, 0), (0, 1), (0, 2)]
    for at_once in (1, 2, 3, 4, 9):
        assert list(in_order(np.array([1.0, 3.0, -np.inf, 3.0, 1.0, 1.0]), at_once)) == [1, 3, 0, 4, 5]
    keys = np.random.default_rng(0).integers(0, 3, 2000).astype(np.float64)
    assert list(in_order(keys, 1500)) == sorted(range(2000), key=lambda at: (-keys[at], at))


@pytest.mark.parametrize("ends", [frozenset({0}), frozenset()])
def test_a_constraint_leaves_the_best_of_what_it_allows(ends: frozenset[int]) -> None:
    function = noise(5, 256)
    constraint = regex("[ab]{2}(cd?)?", ByteTokenizer(), ends=ends)()
    found = beam_search(
        Table(function, 256), PROMPT, Beam(width=20), max_new_tokens=8, ends=ends, constraint=constraint
    )
    pairs = ["".join(pair) for pair in itertools.product("ab", repeat=2)]
    # After "cd" nothing may follow, which ends a text; before, only a token that says so can end it.
    expected = [tuple(f"{pair}cd".encode()) for pair in pairs]
    expected += [(*f"{pair}{rest}".encode(), end) for pair in pairs for rest in ("", "c") for end in ends]
    score = {text: logprob(function, text) / penalty(len(text), 0.6) for text in expected}
    assert [one.tokens for one in found] == sorted(expected, key=lambda text: -score[text])
    np.testing.assert_allclose([one.score for one in found], sorted(score.values(), reverse=True), rtol=1e-12)
    assert all(one.finished for one in found)


def test_impossible_tokens_are_never_taken() -> None:
    def function(source: Text, text: Text) -> Logits:
        return np.array([-np.inf, 0.0, -np.inf, 1.0], np.float32)

    found = beam_search(Table(function), PROMPT, Beam(width=16), max_new_tokens=2)
    assert [one.tokens for one in found] == [(3, 3), (3, 1), (1, 3), (1, 1)]


def test_what_cannot_be_searched_is_refused() -> None:
    beam = Beam(width=2)
    runner = Table(noise(0), max_length=8)
    with pytest.raises(GenerationError, match="prompt: empty"):
        beam_search(runner, [], beam, max_new_tokens=3)
    with pytest.raises(GenerationError, match="max_new_tokens: must be 1 or more, got 0"):
        beam_search(runner, PROMPT, beam, max_new_tokens=0)
    with pytest.raises(GenerationError, match=r"min_new_tokens: must be 0 to max_new_tokens \(3\), got 4"):
        beam_search(runner, PROMPT, beam, max_new_tokens=3, min_new_tokens=4)
    with pytest.raises(GenerationError, match="2 tokens and 7 new ones are 9, the model takes 8"):
        beam_search(runner, PROMPT, beam, max_new_tokens=7)
    assert beam_search(runner, PROMPT, beam, max_new_tokens=6)
    with pytest.raises(GenerationError, match="not finite"):
        beam_search(Table(lambda *_: np.full(V, np.nan, np.float32)), PROMPT, beam, max_new_tokens=2)
    hopeless = Table(lambda *_: np.array([0.0] + [-np.inf] * (V - 1), np.float32))
    with pytest.raises(GenerationError, match="every token was forbidden"):
        beam_search(hopeless, PROMPT, beam, max_new_tokens=2, ends=frozenset({0}), min_new_tokens=1)
