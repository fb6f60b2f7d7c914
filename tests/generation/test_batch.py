"""A ragged batch: each row is what it is alone, and costs what it costs alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config.decoding import Greedy, Sampling
from qkv.generate import DraftModel, Lookup, PrefixCache, Request, Usage, decode, generate

from .toys import Toy, letters

DECODINGS = [
    Greedy(),
    Greedy(repetition_penalty=1.3, penalty_scope="generated"),
    Greedy(frequency_penalty=0.5, presence_penalty=0.2, logit_bias={3: 1.5, 7: -2.0}),
    Sampling(seed=1),
    Sampling(temperature=0.6, top_k=4, seed=2),
    Sampling(temperature=1.4, top_p=0.8, seed=3),
    Sampling(min_p=0.1, presence_penalty=0.4, seed=4),
    Sampling(typical_p=0.9, min_new_tokens=3, seed=5),
    Sampling(seed=6, ignore_eos=True, repetition_penalty=1.1),
]
PROMPTS = [[3], [1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9, 3], [2, 3, 8, 4], [6] * 7, [0, 15], [11], [9, 9, 9]]
LENGTHS = [4, 11, 3, 7, 16, 9, 3, 13, 5]
ENDS = frozenset({0, 2, 4, 8, 12})


def ragged(shift: int = 0, n: int = len(DECODINGS)) -> list[Request]:
    """Requests that differ in everything."""
    return [
        Request(
            PROMPTS[i],
            LENGTHS[i],
            DECODINGS[(i + shift) % len(DECODINGS)],
            ends=ENDS if i % 2 else frozenset(),
            stop=("ab", "c") if i % 3 == 0 else (),
            include_stop=i % 2 == 0,
            sample=i % 4,
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("shift", range(len(DECODINGS)))
def test_each_row_is_what_it_is_alone(shift: int) -> None:
    requests = ragged(shift)
    together = generate(Toy(), requests, spell=letters)
    alone = [generate(Toy(), [request], spell=letters)[0] for request in requests]
    assert together == alone
    assert len({len(made.tokens) for made in alone}) > 3, "the case needs rows that end at different times"
    assert {made.finish_reason for made in alone} == {"length", "stop"}


requests_ = st.builds(
    Request,
    prompt=st.lists(st.integers(0, 15), min_size=1, max_size=6),
    max_new_tokens=st.integers(4, 12),
    decoding=st.sampled_from(DECODINGS),
    ends=st.frozensets(st.integers(0, 15), max_size=3),
    stop=st.lists(st.sampled_from(["a", "bc", "abd", "ee"]), max_size=2).map(tuple),
    sample=st.integers(0, 3),
)


@given(st.lists(requests_, min_size=1, max_size=6), st.booleans(), st.booleans())
def test_no_combination_changes_a_row(requests: list[Request], cached: bool, drafted: bool) -> None:
    toy = Toy()
    options = {
        "prefix_cache": PrefixCache(toy, 10**7) if cached else None,
        "speculative": Lookup() if drafted else None,
    }
    alone = [generate(Toy(), [request], spell=letters)[0] for request in requests]
    for _ in range(2):
        assert generate(toy, requests, spell=letters, **options) == alone


def test_the_order_of_events_is_step_by_step_and_row_by_row() -> None:
    requests = ragged()
    plain = generate(Toy(), requests, spell=letters)
    events = list(decode(Toy(), requests, spell=letters))
    steps = max(len(one.tokens) for one in plain)
    expected = [(row, step) for step in range(steps) for row, one in enumerate(plain) if step < len(one.tokens)]
    assert [event.row for event in events] == [row for row, _ in expected]
    assert [event.token for event in events] == [plain[row].tokens[step] for row, step in expected]


@pytest.mark.parametrize("ignore", [False, True])
def test_b105_a_row_that_has_ended_gives_and_costs_nothing_more(ignore: bool) -> None:
    toy, usage = Toy(), Usage()
    first = generate(Toy(), [Request([3], 20)])[0].tokens
    end = first[2]
    assert end not in first[:2]
    requests = [
        Request([3], 20, Greedy(ignore_eos=ignore), ends=frozenset({end})),
        Request([1, 4], 20, Sampling(seed=1)),
    ]
    events = list(decode(toy, requests, usage=usage))
    of_first = [event for event in events if event.row == 0]
    assert [event.token for event in of_first] == (first if ignore else first[:3])
    assert [event.finish_reason for event in of_first[:-1]] == [None] * (len(of_first) - 1)
    assert usage.new_tokens == len(events) == 20 + len(of_first)
    # Two rows as long as both go on, one row after that.
    steps = [[1, 1]] * (len(of_first) - 1) + [[1]] * (20 - len(of_first))
    assert toy.calls("extend") == [[1, 2], *steps]
    assert toy.calls("select") == ([] if ignore else [[1]])


def test_rows_that_end_together_leave_together() -> None:
    toy = Toy()
    generate(toy, [Request([1], 2), Request([2], 5), Request([3], 2), Request([4], 5)])
    assert toy.calls("select") == [[1, 3]]
    assert toy.calls("extend") == [[1] * 4, [1] * 4, [1] * 2, [1] * 2, [1] * 2]


def test_samples_of_one_prompt_share_its_reading() -> None:
    toy, prompt = Toy(), PROMPTS[3]
    requests = [Request(prompt, 6, Sampling(seed=9), sample=sample) for sample in range(5)]
    made = generate(toy, requests)
    assert toy.calls("extend")[0] == [len(prompt)]
    assert toy.calls("start") == [[1, len(prompt) + 6, 0]]
    assert toy.calls("select")[0] == [0] * 5
    assert len({tuple(one.tokens) for one in made}) == 5
    for request, one in zip(requests, made, strict=True):
        assert generate(Toy(), [request]) == [one]


def test_samples_of_several_prompts_in_any_order_are_read_once_each() -> None:
    toy = Toy()
    order = [PROMPTS[i] for i in (1, 0, 1, 2, 0)]
    requests = [Request(prompt, 5, Sampling(seed=2), sample=i) for i, prompt in enumerate(order)]
    made = generate(toy, requests)
    assert toy.calls("extend")[0] == [5, 1, 2]
    assert toy.calls("select")[0] == [0, 1, 0, 2, 1]
    assert made == [generate(Toy(), [request])[0] for request in requests]


def test_one_prompt_with_two_sources_is_read_twice() -> None:
    toy = Toy()
    sources = [[1, 2], [3], [1, 2]]
    made = generate(toy, [Request([0], 5)] * 3, sources=sources)
    assert toy.calls("extend")[0] == [1, 1]
    assert made[0] == made[2] != made[1]
    assert made == [generate(Toy(), [Request([0], 5)], sources=[source])[0] for source in sources]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_drafts_leave_a_ragged_batch_as_it_is(n: int, window: int | None) -> None:
    greedy = [request for request in ragged() if isinstance(request.decoding, Greedy)]
    sampled = [request for request in ragged() if isinstance(request.decoding, Sampling)]
    plain = generate(Toy(), greedy, spell=letters)
    # The same model a little less decided: right often, not always.
    assert generate(Toy(window=window), greedy, spell=letters, speculative=DraftModel(Toy(seed=2), n)) == plain
    everything = [*greedy, *sampled]
    plain = generate(Toy(), everything, spell=letters)
    assert generate(Toy(window=window), everything, spell=letters, speculative=Lookup(n)) == plain


def test_a_row_with_sampled_drafts_does_not_depend_on_the_others() -> None:
    requests = [r for r in ragged(4) if isinstance(r.decoding, Sampling)]
    drafts = DraftModel(Toy(scale=0.7), 3)
    together = generate(Toy(), requests, spell=letters, speculative=drafts)
    alone = [generate(Toy(), [r], spell=letters, speculative=DraftModel(Toy(scale=0.7), 3))[0] for r in requests]
    assert together == alone
    assert 0.2 < drafts.acceptance.rate < 1


def test_a_prefix_cache_gives_each_row_of_a_batch_its_own_beginning() -> None:
    toy, shared = Toy(), [1, 2, 3, 4, 5, 6]
    cache = PrefixCache(toy, 10**7)
    generate(toy, [Request(shared, 1)], prefix_cache=cache)
    toy.log.clear()
    usage = Usage()
    requests = [Request([*shared, 7], 4), Request([1, 2, 3, 0], 4), Request([9], 4), Request(shared, 4)]
    made = generate(toy, requests, prefix_cache=cache, usage=usage)
    assert toy.calls("extend")[0] == [1, 1, 1, 1]
    assert (usage.prompt_tokens, usage.reused_tokens) == (18, 6 + 3 + 0 + 5)
    assert made == [generate(Toy(), [request])[0] for request in requests]


def test_a_seed_means_the_same_for_every_sample_and_place() -> None:
    tokens = {}
    for seed, sample in itertools.product(range(3), range(3)):
        request = Request([1, 2], 6, Sampling(seed=seed), sample=sample)
        first, *_, last = generate(Toy(), [request, *ragged(n=3), request], spell=letters)
        assert first == last
        tokens[seed, sample] = tuple(first.tokens)
    assert len(set(tokens.values())) == 9


def test_tokens_are_numpy_free() -> None:
    made = generate(Toy(), [Request(np.array([1, 2]), 3, Sampling())])[0]
    assert [type(token) for token in made.tokens] == [int] * 3
    assert [type(logprob) for logprob in made.logprobs] == [float] * 3
