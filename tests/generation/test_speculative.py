"""Drafts change how often a model is called, never what it says."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from qkv.config.decoding import Greedy, Sampling
from qkv.errors import GenerationError
from qkv.generate import Acceptance, Draft, DraftModel, Generation, Lookup, Request, generate
from qkv.generate.runner import Tokens
from qkv.generate.sampling import Chooser, log_probability
from qkv.generate.speculative import judge

from .toys import Toy, letters

PROMPT = [3, 1, 4, 1, 5]
SHAPED = Sampling(temperature=0.8, top_k=9, top_p=0.95, repetition_penalty=1.2, seed=3)


def one(toy: Toy, request: Request, **options: object) -> Generation:
    """The only text of a batch."""
    return generate(toy, [request], spell=letters, **options)[0]


@dataclass
class Scripted:
    """Drafts what it was told, right or wrong: each round the next list."""

    rounds: list[list[int]]
    n: int = 6
    acceptance: Acceptance = field(default_factory=Acceptance)

    def drafter(self, prompt: Tokens, chooser: Chooser, max_len: int, vocab_size: int) -> Scripted:
        return self

    def propose(self, tokens: Tokens, n: int) -> Draft:
        return Draft(self.rounds.pop(0)[:n] if self.rounds else [])


# Greedy


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("drafter", [Toy(seed=5), Toy(scale=0.5), Toy(scale=0.5, window=2), Toy(vocab_size=11)])
@pytest.mark.parametrize("decoding", [Greedy(), Greedy(repetition_penalty=1.3, min_new_tokens=4)])
def test_b112_greedy_speculation_gives_the_same_tokens(n: int, drafter: Toy, decoding: Greedy) -> None:
    for prompt in ([7], PROMPT, [2] * 9):
        request = Request(prompt, 25, decoding, ends=frozenset({14}), stop=("ab",))
        assert one(Toy(), request, speculative=DraftModel(drafter, n)) == one(Toy(), request)
        assert one(Toy(), request, speculative=Lookup(n)) == one(Toy(), request)


def test_a_drafter_that_is_always_right_saves_calls() -> None:
    toy, drafts = Toy(), DraftModel(Toy(scale=0.5), 4)
    made = one(toy, Request(PROMPT, 21), speculative=drafts)
    assert made == one(Toy(), Request(PROMPT, 21))
    # The prompt gives one token, each of 4 calls 4 drafts and one more.
    assert toy.calls("extend", "extend_all") == [[5], *[[5]] * 4]
    assert drafts.acceptance == Acceptance(drafted=16, accepted=16, calls=4)
    assert (drafts.acceptance.rate, drafts.acceptance.tokens_per_call) == (1.0, 5.0)
    assert toy.calls("truncate") == []


def test_a_drafter_that_is_always_wrong_costs_calls_but_no_tokens() -> None:
    plain = one(Toy(), Request(PROMPT, 6))
    toy, wrong = Toy(), Scripted([[(token + 1) % 16, 0, 0] for token in plain.tokens[1:]])
    assert one(toy, Request(PROMPT, 6), speculative=wrong) == plain
    assert wrong.acceptance == Acceptance(drafted=4, accepted=0, calls=4)
    assert (wrong.acceptance.rate, wrong.acceptance.tokens_per_call) == (0.0, 1.0)
    # Each draft is taken back; before the last token there is nothing left to draft.
    assert toy.calls("extend", "extend_all") == [[5], [4], [4], [3], [2], [1]]
    assert toy.calls("truncate") == [[6], [7], [8], [9]]


@pytest.mark.parametrize("right", range(4))
def test_a_draft_is_kept_as_far_as_it_is_right(right: int) -> None:
    plain = one(Toy(), Request(PROMPT, 9))
    draft = plain.tokens[1:4]
    if right < 3:
        draft[right] = (draft[right] + 1) % 16
    script = Scripted([draft])
    assert one(Toy(), Request(PROMPT, 9), speculative=script) == plain
    assert script.acceptance == Acceptance(drafted=min(right + 1, 3), accepted=right, calls=1)


def test_a_text_ends_inside_a_draft_as_it_ends_without() -> None:
    plain = one(Toy(), Request(PROMPT, 9))
    end = plain.tokens[3]
    assert end not in plain.tokens[:3]
    request = Request(PROMPT, 9, ends=frozenset({end}))
    assert one(Toy(), request, speculative=Scripted([plain.tokens[1:8]])) == one(Toy(), request)
    request = Request(PROMPT, 9, stop=(plain.text[2:4],))
    made = one(Toy(), request, speculative=Scripted([plain.tokens[1:8]]))
    assert made == one(Toy(), request)
    assert made.tokens == plain.tokens[:4]


def test_nothing_is_drafted_beyond_the_length() -> None:
    toy = Toy(max_length=len(PROMPT) + 4)
    plain = one(Toy(), Request(PROMPT, 9)).tokens
    assert one(toy, Request(PROMPT, 4), speculative=Scripted([plain[1:]])).tokens == plain[:4]
    assert toy.calls("extend", "extend_all") == [[5], [3]]


def test_a_drafter_with_fewer_positions_drafts_as_long_as_it_can() -> None:
    drafts = DraftModel(Toy(scale=0.5, max_length=12), 4)
    assert one(Toy(), Request(PROMPT, 20), speculative=drafts) == one(Toy(), Request(PROMPT, 20))
    assert drafts.acceptance == Acceptance(drafted=6, accepted=6, calls=2)  # to the 13th token, which it need not read
    short = DraftModel(Toy(max_length=4), 4)
    assert one(Toy(), Request(PROMPT, 20), speculative=short) == one(Toy(), Request(PROMPT, 20))
    assert short.acceptance == Acceptance()


def test_a_drafter_reads_each_token_once() -> None:
    drafter = Toy(scale=0.5)
    made = one(Toy(), Request(PROMPT, 21), speculative=DraftModel(drafter, 4))
    assert drafter.calls("start") == [[1, len(PROMPT) + 21, 4]]
    assert drafter.tokens_read == len(PROMPT) + len(made.tokens) - 2
    assert drafter.calls("truncate") == []


@pytest.mark.parametrize("decoding", [Greedy(), SHAPED])
def test_a_drafter_forgets_what_was_rejected(decoding: Greedy | Sampling) -> None:
    text = np.random.default_rng(2).integers(0, 16, 60).tolist()
    chooser = Chooser(decoding, text[:3])
    kept = DraftModel(Toy(window=2), 4).drafter(text[:3], chooser, 64, 16)
    for n in (4, 5, 7, 8, 14, 15, 20):
        guess = kept.propose(text[:n], 4)
        fresh = DraftModel(Toy(), 4).drafter(text[:3], chooser, 64, 16).propose(text[:n], 4)
        assert guess.tokens == fresh.tokens
        assert np.array_equal(guess.distributions or [], fresh.distributions or [])
        text[n : n + 2] = guess.tokens[:2]  # some drafts come true


# Sampling


@pytest.mark.parametrize("decoding", [Sampling(seed=2), SHAPED])
def test_lookup_gives_the_same_samples_as_no_speculation(decoding: Sampling) -> None:
    for sample in range(6):
        request = Request([1, 2, 3] * 4, 30, decoding, sample=sample)
        drafts = Lookup()
        assert one(Toy(), request, speculative=drafts) == one(Toy(), request)
        assert drafts.acceptance.drafted > 0


def test_sampled_drafts_give_the_same_text_in_every_run_and_true_log_probabilities() -> None:
    drafts = DraftModel(Toy(scale=0.6), 3)
    made = one(Toy(), Request(PROMPT, 30, SHAPED), speculative=drafts)
    assert made == one(Toy(), Request(PROMPT, 30, SHAPED), speculative=DraftModel(Toy(scale=0.6), 3))
    assert 0.3 < drafts.acceptance.rate < 1
    text = list(PROMPT)
    for token, logprob in zip(made.tokens, made.logprobs, strict=True):
        assert logprob == log_probability(Toy().logits_after(text), token)
        text.append(token)


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    drafts = DraftModel(Toy(), 3)
    one(Toy(), Request(PROMPT, 30, SHAPED), speculative=drafts)
    assert drafts.acceptance.rate == 1


def joint(toy: Toy, decoding: Sampling, n: int) -> dict[tuple[int, ...], float]:
    """The exact probability of each continuation of PROMPT by n tokens."""
    chooser = Chooser(decoding, PROMPT)
    found = {(): 1.0}
    for _ in range(n):
        grown = {}
        for text, p in found.items():
            q = chooser.distribution(toy.logits_after([*PROMPT, *text]), text)
            grown |= {(*text, token): p * q[token] for token in np.flatnonzero(q).tolist()}
        found = grown
    return found


def deviation(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int) -> float:
    """Pearson's chi-square in standard deviations from its mean (Wilson and Hilferty 1931); rare texts are one."""
    assert set(counts) <= set(expected), "a text of no probability"
    common = [text for text, p in expected.items() if p * draws >= 8]
    cells = [(counts[text], expected[text] * draws) for text in common]
    rest = (draws - sum(n for n, _ in cells), draws - sum(e for _, e in cells))
    if rest[1] >= 8:
        cells.append(rest)
    k = len(cells) - 1
    assert k > 15
    chi = sum((n - e) ** 2 / e for n, e in cells)
    return ((chi / k) ** (1 / 3) - (1 - 2 / (9 * k))) / (2 / (9 * k)) ** 0.5


def samples(target: Toy, decoding: Sampling, draws: int, make) -> Counter[tuple[int, ...]]:
    """Texts of three tokens with the seeds 0, 1, ...; `make` gives the speculation."""
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, draws, 50):
        requests = [Request([*PROMPT], 3, decoding.override({"seed": seed + i})) for i in range(50)]
        counts.update(tuple(made.tokens) for made in generate(target, requests, speculative=make()))
    return counts


CHI = {
    "plain": (Sampling(), None),
    "another model": (Sampling(), lambda: DraftModel(Toy(vocab_size=6, seed=9), 2)),
    "a flatter model": (Sampling(), lambda: DraftModel(Toy(vocab_size=6, scale=0.3), 2)),
    "a sharper model": (Sampling(temperature=1.3), lambda: DraftModel(Toy(vocab_size=6, scale=2.0), 2)),
    "filters": (Sampling(temperature=1.5, top_k=5, top_p=0.97), lambda: DraftModel(Toy(vocab_size=6, seed=9), 2)),
    "penalties": (Sampling(presence_penalty=1.0), lambda: DraftModel(Toy(vocab_size=6, seed=9), 2)),
    "fewer tokens": (Sampling(), lambda: DraftModel(Toy(vocab_size=5, seed=9), 2)),
    "lookup": (Sampling(), lambda: Lookup(2)),
    "scripted": (Sampling(), lambda: Scripted([[0, 1]] * 50)),
}


@pytest.mark.parametrize("name", CHI)
def test_sampled_speculation_keeps_the_distribution(name: str) -> None:
    decoding, make = CHI[name]
    target, draws = Toy(vocab_size=6, scale=0.5), 3000
    counts = samples(target, decoding, draws, make or (lambda: None))
    assert abs(deviation(counts, joint(target, decoding, 3), draws)) < 4


def test_the_test_of_distributions_sees_a_wrong_one() -> None:
    target, draws = Toy(vocab_size=6, scale=0.5), 3000
    exact = joint(target, Sampling(), 3)
    # As if every draft were accepted, and as if the temperature were 0.85.
    drafted = samples(Toy(vocab_size=6, scale=0.5, seed=9), Sampling(), draws, lambda: None)
    colder = samples(target, Sampling(temperature=0.85), draws, lambda: None)
    assert deviation(drafted, exact, draws) > 10
    assert deviation(colder, exact, draws) > 6


def test_one_judgement_keeps_the_distribution_exactly() -> None:
    """The sum over drafts of q(x) min(1, p(x) / q(x)), and the residual's share of the rest, is p."""
    draws = np.random.default_rng(0)
    logits = draws.normal(0, 1, 7).astype(np.float32)
    q = draws.dirichlet(np.ones(7))
    p = Chooser(Sampling(), [0]).distribution(logits, [])
    counts, n = np.zeros(7), 4000
    for seed in range(n):
        chooser = Chooser(Sampling(seed=seed), [0])
        drafted = int(np.searchsorted(q.cumsum(), draws.random()))
        counts[judge(chooser, logits, [], None, (drafted, q)).token] += 1
    assert (np.abs(counts / n - p) < 4 * np.sqrt(p * (1 - p) / n)).all()


def test_a_mask_holds_for_drafts() -> None:
    logits, q = np.zeros(5, np.float32), np.full(5, 0.2)
    allowed = np.array([False, True, False, True, False])
    for seed, drafted in itertools.product(range(40), range(5)):
        token = judge(Chooser(Sampling(seed=seed), [0]), logits, [], allowed, (drafted, q)).token
        assert allowed[token]
        assert token == drafted or not allowed[drafted]


def test_where_rounding_leaves_no_residual_the_model_draws_itself() -> None:
    logits = np.random.default_rng(1).normal(0, 1, 6).astype(np.float32)
    for seed in range(30):
        chooser = Chooser(Sampling(seed=seed), [0])
        above = 2 * chooser.distribution(logits, [])  # as rounding can, but more
        token = judge(chooser, logits, [], None, (3, above)).token
        assert token in (3, chooser.choose(logits, []).token)


def test_equal_distributions_accept_every_draft() -> None:
    logits = np.random.default_rng(1).normal(0, 2, 9).astype(np.float32)
    for seed in range(50):
        chooser = Chooser(Sampling(seed=seed), [0])
        p = chooser.distribution(logits, [])
        assert judge(chooser, logits, [], None, (seed % 9, p)).token == seed % 9


# Lookup


def proposed(tokens: list[int], n: int = 4, **options: int) -> list[int]:
    drafter = Lookup(n, **options).drafter([], Chooser(Greedy(), [0]), 100, 16)
    return list(drafter.propose(tokens, n).tokens)


@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], [9, 8, 7, 1]),
        ([1, 2, 9, 1, 2, 8, 5, 5, 1, 2], [8, 5, 5, 1]),  # the last time counts
        ([0, 1, 2, 9, 7, 1, 2, 8, 0, 1, 2], [9, 7, 1, 2]),  # the longer n-gram counts more
        ([5, 6, 7, 6], [7, 6, 7, 6]),  # beyond its end the text repeats
        ([4, 4], [4, 4, 4, 4]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_lookup_drafts_what_followed_the_last_tokens_before(tokens: list[int], drafted: list[int]) -> None:
    assert proposed(tokens) == drafted


def test_lookup_may_ask_for_longer_matches() -> None:
    assert proposed([1, 2, 9, 3, 2], shortest=2) == []
    assert proposed([1, 2, 9, 1, 2], shortest=2) == [9, 1, 2, 9]


def test_lookup_drafts_the_same_in_one_reading_and_in_many() -> None:
    tokens = np.random.default_rng(0).integers(0, 5, 200).tolist()
    drafter = Lookup(5).drafter([], Chooser(Greedy(), [0]), 300, 16)
    for n in range(1, 200, 3):
        assert list(drafter.propose(tokens[:n], 5).tokens) == proposed(tokens[:n], 5)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(GenerationError, match="n: must be 1 or more drafted tokens, got 0"):
        Lookup(0)
    with pytest.raises(GenerationError, match="n: must be 1"):
        DraftModel(Toy(), -1)
    with pytest.raises(GenerationError, match=r"shortest: must be 1 to longest \(2\), got 3"):
        Lookup(longest=2, shortest=3)
