"""Reusing the states of earlier texts: the same answers, for less work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config.decoding import Greedy, Sampling
from qkv.errors import GenerationError
from qkv.generate import DraftModel, Generation, Lookup, PrefixCache, Request, Usage, decode, generate
from qkv.generate.prefix import SMALLEST, Room, rows_of

from .toys import D, Toy

PROMPT = np.random.default_rng(0).integers(0, 16, 40).tolist()
ROW = SMALLEST * D * 4  # bytes of a kept row


def ask(toy: Toy, cache: PrefixCache, prompt: list[int], n: int = 5, **options: object) -> tuple[Generation, int]:
    """The greedy continuation, and how many tokens were read for it."""
    toy.log.clear()
    made = generate(toy, [Request(prompt, n, Sampling(seed=1))], prefix_cache=cache, **options)[0]
    return made, toy.tokens_read


def plain(prompt: list[int], n: int = 5) -> Generation:
    return generate(Toy(), [Request(prompt, n, Sampling(seed=1))])[0]


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("slack", [0, 1, 8])
def test_b12_the_same_prompt_four_times_gives_the_same_four_times(window: int | None, slack: int) -> None:
    toy = Toy(window=window)
    cache = PrefixCache(toy, 10**8, slack=slack)
    answers = [ask(toy, cache, PROMPT) for _ in range(4)]
    assert [made for made, _ in answers] == [plain(PROMPT)] * 4
    assert [read for _, read in answers] == [44, 4, 4, 4]
    assert (cache.hits, cache.misses) == (3, 1)


@pytest.mark.parametrize("window", [None, 4])
def test_b13_a_hit_is_a_miss(window: int | None) -> None:
    toy = Toy(window=window)
    cache = PrefixCache(toy, 10**8)
    for prompt in (PROMPT, PROMPT, [*PROMPT[:30], 1, 2], [*PROMPT, 5], PROMPT[:20], [3, *PROMPT], [*PROMPT[:30], 1]):
        assert ask(toy, cache, prompt)[0] == plain(prompt)


def test_only_what_differs_is_read() -> None:
    toy = Toy()
    cache = PrefixCache(toy, 10**8)
    ask(toy, cache, PROMPT, 1)
    assert toy.calls("fork") == [[]], "the prompt's state is copied, that of the answer needs no copy"
    usage = Usage()
    _, read = ask(toy, cache, [*PROMPT[:30], 15, 15, 15], 1, usage=usage)
    assert PROMPT[30] != 15
    assert (read, usage.prompt_tokens, usage.reused_tokens) == (3, 33, 30)
    assert ask(toy, cache, PROMPT[:12], 1)[1] == 1  # the last token, for its logits
    assert ask(toy, cache, [PROMPT[0] + 1, 2], 1)[1] == 2


def test_a_conversation_reads_its_new_turns_only() -> None:
    toy = Toy(window=4)
    cache = PrefixCache(toy, 10**8, slack=0)
    prompt = list(PROMPT)
    for turn in range(3):
        made, read = ask(toy, cache, prompt)
        assert made == plain(prompt)
        # The answer's last token was never read; then come the three of the next message.
        assert read == (40 if turn == 0 else 4) + 4
        prompt = [*prompt, *made.tokens, 7, 8, 9]


def test_a_state_that_cannot_go_back_makes_way_for_the_next_best() -> None:
    toy = Toy(window=4)
    cache = PrefixCache(toy, 10**8, slack=2)
    ask(toy, cache, PROMPT[:20], 1)
    ask(toy, cache, PROMPT, 1)
    toy.log.clear()
    # The longer text shares more, but would have to forget 10 tokens with a slack of 2.
    made, read = ask(toy, cache, [*PROMPT[:30], 1], 1)
    assert toy.calls("truncate") == [[30]]
    assert (made, read) == (plain([*PROMPT[:30], 1], 1), 11)
    assert ask(toy, cache, [*PROMPT[:38], 1], 1)[1] == 1
    assert ask(toy, cache, [*PROMPT[:10], 1], 1)[1] == 11, "no state can go back that far"


def test_a_prompt_that_was_kept_without_its_logits_reads_its_last_token() -> None:
    toy = Toy()
    cache = PrefixCache(toy, 10**8)
    made, _ = ask(toy, cache, PROMPT, 6)
    prompt = [*PROMPT, *made.tokens[:-1]]
    assert ask(toy, cache, prompt, 2) == (plain(prompt, 2), 1 + 1)


def test_a_prompt_that_was_kept_in_a_batch_is_known_with_its_logits() -> None:
    toy = Toy()
    cache = PrefixCache(toy, 10**8)
    generate(toy, [Request([5, 6], 1), Request(PROMPT, 1), Request([7], 1)], prefix_cache=cache)
    assert ask(toy, cache, PROMPT, 3) == (plain(PROMPT, 3), 2)


def test_what_is_kept_never_changes() -> None:
    toy = Toy()
    cache = PrefixCache(toy, 10**8)
    ask(toy, cache, PROMPT)
    before = {rows: (entry.state.lengths, entry.state.fork().extend([[1]])) for rows, entry in cache._entries.items()}
    assert len(before) == 2
    for prompt in ([*PROMPT[:10], 3], [*PROMPT, 3], PROMPT):
        ask(toy, cache, prompt, speculative=Lookup())
    generate(toy, [Request(PROMPT, 9, Sampling(seed=s)) for s in range(3)], prefix_cache=cache)
    for rows, (lengths, logits) in before.items():
        state = cache._entries[rows].state
        assert state.lengths == lengths
        assert (state.fork().extend([[1]]) == logits).all()


def test_a_generation_that_is_broken_off_leaves_the_cache_right() -> None:
    toy = Toy()
    cache = PrefixCache(toy, 10**8)
    events = decode(toy, [Request(PROMPT, 9, Sampling(seed=1))], prefix_cache=cache)
    next(events)
    events.close()
    assert ask(toy, cache, PROMPT) == (plain(PROMPT), 4)


# What is kept


def kept(cache: PrefixCache) -> list[int]:
    """The first tokens of the kept texts, the least recently used first."""
    return [rows.texts[0][0] for rows in cache._entries]


def fill(cache: PrefixCache, *firsts: int) -> None:
    """Prompts of two tokens, each kept with its logits; the answer is kept as well, and ends there."""
    for first in firsts:
        cache.prefill([[first, 0]], Room(8, 0))


def test_the_least_recently_used_leave_first() -> None:
    cache = PrefixCache(Toy(), 3 * (ROW + 16 * 4))
    fill(cache, 1, 2, 3)
    assert (kept(cache), cache.nbytes) == ([1, 2, 3], 3 * (ROW + 64))
    fill(cache, 1, 4)
    assert kept(cache) == [3, 1, 4]
    fill(cache, 3)
    assert kept(cache) == [1, 4, 3]
    assert (len(cache), cache.hits, cache.misses) == (3, 2, 4)
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_what_is_kept_again_counts_as_used() -> None:
    cache = PrefixCache(Toy(), 10**8)
    fill(cache, 1, 2)
    done = Toy().start(1, 8)
    cache.keep(rows_of([[1, 0]], None), done, Room(8, 0))
    assert kept(cache) == [2, 1]


def test_logits_count_too() -> None:
    toy = Toy()
    cache = PrefixCache(toy, ROW)
    cache.keep(rows_of([[1, 2]], None), toy.start(1, SMALLEST), Room(SMALLEST, 0))
    assert (kept(cache), cache.nbytes) == ([1], ROW)
    fill(cache, 3)
    assert kept(cache) == [1], "a row with logits is more than the limit, and pushes nothing out"


def test_what_is_larger_than_the_limit_is_not_kept_and_pushes_nothing_out() -> None:
    toy = Toy()
    cache = PrefixCache(toy, 2 * ROW)
    fill(cache, 1)
    toy.log.clear()
    rows = generate(toy, [Request([2], 3), Request([3], 3), Request([4], 3)], prefix_cache=cache)
    assert rows == [generate(Toy(), [Request([first], 3)])[0] for first in (2, 3, 4)]
    assert kept(cache) == [1]
    assert toy.calls("fork") == [], "nor is it copied"


@pytest.mark.parametrize("max_bytes", [1, ROW - 1, ROW + 64, 3 * ROW])
def test_the_limit_holds_at_all_times(max_bytes: int) -> None:
    toy = Toy()
    cache = PrefixCache(toy, max_bytes)
    for first in (1, 2, 3, 1, 2):
        assert ask(toy, cache, [first, *PROMPT])[0] == plain([first, *PROMPT])
        assert cache.nbytes <= max_bytes


def test_states_have_room_for_the_texts_that_follow() -> None:
    toy = Toy(max_length=600)
    cache = PrefixCache(toy, 10**8, slack=3)
    ask(toy, cache, PROMPT)
    assert toy.calls("start") == [[1, SMALLEST, 3]]
    long = PROMPT * 6
    assert ask(toy, cache, long, 20) == (generate(Toy(), [Request(long, 20, Sampling(seed=1))])[0], 240 + 19)
    assert toy.calls("start") == [[1, 512, 3]]
    toy.log.clear()
    assert ask(toy, cache, [*long, *PROMPT], 20)[1] == 40 + 19
    ask(toy, cache, PROMPT * 13, 20)
    assert toy.calls("start") == [[1, 600, 3]], "no more than the model has positions"


def test_a_state_with_less_slack_than_drafts_need_is_not_used() -> None:
    toy = Toy(window=3)
    cache = PrefixCache(toy, 10**8, slack=0)
    ask(toy, cache, PROMPT)
    _, read = ask(toy, cache, PROMPT, speculative=DraftModel(Toy(seed=7), 3))
    assert read >= 40
    assert toy.calls("start")[0] == [1, SMALLEST, 3]
    greedy = [Request(PROMPT, 12, Greedy())]
    assert generate(toy, greedy, prefix_cache=cache, speculative=Lookup(3)) == generate(Toy(), greedy)


def test_a_source_belongs_to_its_text() -> None:
    toy = Toy()
    cache = PrefixCache(toy, 10**8)
    requests = [Request([0, 1], 4)]
    for source, read in (([1, 2], 5), ([3], 5), ([1, 2], 3)):
        toy.log.clear()
        made = generate(toy, requests, sources=[source], prefix_cache=cache)
        assert made == generate(Toy(), requests, sources=[source])
        assert toy.tokens_read == read
    toy.log.clear()
    generate(toy, requests, prefix_cache=cache)
    assert toy.tokens_read == 5
    two = [Request([0, 1], 4), Request([0, 1, 5], 4)]
    for sources in ([[1, 2], [3]], [[1, 2], [1, 2]]):
        made = generate(toy, two, sources=sources, prefix_cache=cache)
        assert made == generate(Toy(), two, sources=sources)


def test_rows_of_a_batch_are_kept_when_they_end() -> None:
    toy = Toy()
    cache = PrefixCache(toy, 10**8)
    made = generate(toy, [Request([1, 2], 3), Request([3, 4], 6)], prefix_cache=cache)
    texts = [rows.texts for rows in cache._entries]
    assert texts == [
        ((1, 2), (3, 4)),
        ((1, 2, *made[0].tokens[:-1]),),
        ((3, 4, *made[1].tokens[:-1]),),
    ]
    for one, entry in zip(made, list(cache._entries.values())[1:], strict=True):
        logits = entry.state.fork().extend([one.tokens[-1:]])[0]
        assert (logits == Toy().logits_after([*entry.rows.texts[0], one.tokens[-1]])).all()


texts_ = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(
    st.lists(st.lists(texts_, min_size=1, max_size=3), min_size=2, max_size=8),
    st.sampled_from([None, 2, 6]),
    st.integers(0, 4),
)
def test_any_history_gives_the_answers_of_no_history(
    batches: list[list[list[int]]], window: int | None, slack: int
) -> None:
    toy = Toy(window=window)
    cache = PrefixCache(toy, 6 * ROW, slack=slack)
    for prompts in batches:
        requests = [Request(prompt, 3, Sampling(seed=4)) for prompt in prompts]
        assert generate(toy, requests, prefix_cache=cache) == generate(Toy(), requests)
        assert cache.nbytes <= cache.max_bytes


def test_a_text_is_kept_once() -> None:
    cache = PrefixCache(Toy(), 10**8)
    done = cache.prefill([[1, 2]], Room(8, 0))
    cache.keep(rows_of([[1, 2]], None), done.state, done.room)
    cache.keep(rows_of([[1, 2, 3]], None), done.state, done.room)
    assert len(cache) == 2


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(GenerationError, match="max_bytes: must be 1 or more, got 0"):
        PrefixCache(Toy(), 0)
    with pytest.raises(GenerationError, match="slack: must be 0 or more tokens, got -1"):
        PrefixCache(Toy(), 1, slack=-1)
