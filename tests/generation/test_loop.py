"""The loop over tokens: one text on a toy, and the texts of a real model."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import qkv
import qkv.config as c
from qkv.config.decoding import Beam, Greedy, Sampling
from qkv.errors import GenerationError
from qkv.generate import Event, Generation, Request, Usage, decode, generate
from qkv.generate.prefix import PrefixCache
from qkv.generate.sampling import log_probability
from qkv.text import ByteTokenizer

from .toys import Toy, letters

PROMPT = [3, 1, 4, 1, 5]


def greedy_tokens(toy: Toy, prompt: list[int], n: int) -> list[int]:
    """The tokens of the largest logits, each from the whole text."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(toy.logits_after(text).argmax()))
    return text[len(prompt) :]


def one(toy: Toy, request: Request, **options: object) -> Generation:
    """The only text of a batch."""
    return generate(toy, [request], **options)[0]


def test_greedy_tokens_are_those_of_the_largest_logits() -> None:
    toy = Toy()
    made = one(toy, Request(PROMPT, 20), spell=letters)
    assert made.tokens == greedy_tokens(toy, PROMPT, 20)
    assert made.text == "".join(letters(made.tokens))
    assert (made.finish_reason, made.stop) == ("length", None)


def test_a_token_comes_with_its_log_probability_by_the_model_itself() -> None:
    toy, text = Toy(), list(PROMPT)
    made = one(toy, Request(PROMPT, 10, Sampling(temperature=0.7, top_k=3, repetition_penalty=1.2, seed=5)))
    for token, logprob in zip(made.tokens, made.logprobs, strict=True):
        assert logprob == log_probability(toy.logits_after(text), token)
        text.append(token)


def test_the_prompt_is_read_once_and_each_token_but_the_last_after_it() -> None:
    toy, usage = Toy(), Usage()
    one(toy, Request(PROMPT, 6), usage=usage)
    assert toy.calls("start") == [[1, len(PROMPT) + 6, 0]]
    assert toy.calls("extend") == [[5]] + [[1]] * 5
    assert toy.calls("truncate", "select", "fork", "extend_all") == []
    assert usage == Usage(prompt_tokens=5, new_tokens=6, calls=5, cache_bytes=11 * 12 * 4)


def test_events_come_before_the_next_token_is_computed() -> None:
    toy = Toy()
    events = decode(toy, [Request(PROMPT, 5)])
    assert toy.log == []
    next(events)
    assert toy.tokens_read == len(PROMPT)
    next(events)
    assert toy.tokens_read == len(PROMPT) + 1


def test_a_text_that_is_left_costs_nothing_more() -> None:
    toy = Toy()
    events = decode(toy, [Request(PROMPT, 50)])
    next(events)
    events.close()
    assert toy.tokens_read == len(PROMPT)


def test_the_texts_of_the_events_are_the_text() -> None:
    request = Request(PROMPT, 12, Sampling(seed=3))
    events = list(decode(Toy(), [request], spell=letters))
    assert [event.text for event in events] == list(letters(event.token for event in events))
    assert [event.finish_reason for event in events] == [None] * 11 + ["length"]
    assert "".join(event.text for event in events) == one(Toy(), request, spell=letters).text


def test_the_prompt_is_left_as_it_is() -> None:
    prompt = list(PROMPT)
    one(Toy(), Request(prompt, 3))
    assert prompt == PROMPT


@pytest.mark.parametrize("place", [0, 1, 7])
def test_an_end_is_a_token_but_no_text(place: int) -> None:
    plain = one(Toy(), Request(PROMPT, 12, Sampling(seed=1)))
    end = plain.tokens[place]
    first = plain.tokens.index(end)
    other = next(token for token in range(16) if token not in plain.tokens)
    ended = one(Toy(), Request(PROMPT, 12, Sampling(seed=1), ends=frozenset({end, other})), spell=letters)
    assert ended.tokens == plain.tokens[: first + 1]
    assert ended.logprobs == plain.logprobs[: first + 1]
    assert ended.text == "".join(letters(plain.tokens[:first]))
    assert (ended.finish_reason, ended.stop) == ("stop", end)


def test_an_end_as_the_last_token_is_a_stop() -> None:
    plain = one(Toy(), Request(PROMPT, 3))
    ended = one(Toy(), Request(PROMPT, 1, ends=frozenset({plain.tokens[0]})), spell=letters)
    assert ended == Generation("", plain.tokens[:1], "stop", plain.logprobs[:1], plain.tokens[0])


def test_b104_no_end_before_the_least_number_of_tokens() -> None:
    ends = frozenset(range(8))
    free = one(Toy(), Request(PROMPT, 5, Sampling(seed=2), ends=ends))
    assert len(free.tokens) < 5, "the case needs an early end"
    least = one(Toy(), Request(PROMPT, 5, Sampling(seed=2, min_new_tokens=5), ends=ends))
    assert len(least.tokens) == 5
    assert not ends & set(least.tokens[:5])


def test_ignore_eos_goes_on_to_the_full_length() -> None:
    plain = one(Toy(), Request(PROMPT, 9, Sampling(seed=2)), spell=letters)
    ends = frozenset(plain.tokens)
    ignoring = one(Toy(), Request(PROMPT, 9, Sampling(seed=2, ignore_eos=True), ends=ends), spell=letters)
    assert ignoring == plain


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_across_tokens(include: bool) -> None:
    plain = one(Toy(), Request(PROMPT, 12, Sampling(seed=6)), spell=letters)
    stop = plain.text[4:7]
    at = plain.text.index(stop)
    toy = Toy()
    request = Request(PROMPT, 12, Sampling(seed=6), stop=(stop, "zzz"), include_stop=include)
    events = list(decode(toy, [request], spell=letters))
    assert "".join(event.text for event in events) == plain.text[: at + 3 if include else at]
    assert [event.token for event in events] == plain.tokens[: at + 3]
    assert (events[-1].finish_reason, events[-1].stop) == ("stop", stop)
    assert toy.tokens_read == len(PROMPT) + at + 2


def test_what_was_held_back_is_shown_when_the_text_ends_otherwise() -> None:
    plain = one(Toy(), Request(PROMPT, 6), spell=letters)
    held = one(Toy(), Request(PROMPT, 6, stop=(plain.text[4:] + "?",)), spell=letters)
    assert held == plain
    end = plain.tokens[-1]
    assert end not in plain.tokens[:-1], "the case needs a new last token"
    ended = one(Toy(), Request(PROMPT, 9, ends=frozenset({end}), stop=(plain.text[3:5] + "?",)), spell=letters)
    assert (ended.text, ended.stop) == (plain.text[:5], end)


class Countdown:
    """A constraint: only these tokens, one after another."""

    def __init__(self, tokens: list[int]) -> None:
        self.left = list(tokens)

    @property
    def finished(self) -> bool:
        return not self.left

    @property
    def complete(self) -> bool:
        return not self.left

    def allowed(self) -> np.ndarray:
        return np.arange(16) == self.left[0]

    def advance(self, token: int) -> None:
        assert token == self.left.pop(0)

    def fork(self) -> Countdown:
        return Countdown(self.left)


def test_a_constraint_says_what_comes_and_ends_the_text() -> None:
    constraint = Countdown([7, 7, 2])
    for decoding in (Greedy(), Sampling(seed=1, top_p=0.5)):
        made = one(Toy(), Request(PROMPT, 9, decoding, constraint=constraint), spell=letters)
        assert (made.text, made.finish_reason, made.stop) == ("hhc", "stop", None)
    assert constraint.left == [7, 7, 2], "a request can be served again"


def test_no_request_is_no_work() -> None:
    toy = Toy()
    assert generate(toy, []) == []
    assert toy.log == []


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (Request([], 1), "prompt: empty; give at least one token"),
        (Request([1], 0), "max_new_tokens: must be 1 or more, got 0"),
        (Request([1, 16], 1), "prompt: token 16 is not in the vocabulary, 0 to 15"),
        (Request([-1], 1), "prompt: token -1 is not in the vocabulary"),
        (Request([1], 3, Greedy(min_new_tokens=4)), "min_new_tokens: 4 is more than max_new_tokens = 3"),
        (Request([1] * 33, 1), "prompt: 33 tokens, but the model has 32 positions"),
        (Request([1] * 32, 1), "prompt: 32 tokens, but the model has 32 positions"),
        (Request([1], 1, stop=("x",)), "stop: stop strings are text, and there is no tokenizer"),
        (Request([1], 1, Beam()), "decoding: Beam follows several texts at once; call beam_search"),
    ],
)
def test_b24_impossible_requests_are_refused_before_anything_is_computed(request_: Request, problem: str) -> None:
    toy = Toy(max_length=32)
    with pytest.raises(GenerationError) as caught:
        decode(toy, [request_])
    assert str(caught.value).startswith(problem)
    with pytest.raises(GenerationError, match="^request 1: " if "stop" not in problem else "stop"):
        decode(toy, [Request([1], 1), request_])
    assert toy.log == []


def test_impossible_combinations_are_refused() -> None:
    with pytest.raises(GenerationError, match="sources: 1 for 2 requests"):
        decode(Toy(), [Request([1], 1)] * 2, sources=[[1]])
    with pytest.raises(GenerationError, match="prefix_cache: it holds states of another runner"):
        decode(Toy(), [Request([1], 1)], prefix_cache=PrefixCache(Toy(), 1000))


def test_b24_the_length_is_what_the_model_has_room_for_and_says_so() -> None:
    with pytest.warns(UserWarning, match="max_new_tokens: 2 in place of 10, since the model has 32 positions"):
        made = one(Toy(max_length=32), Request([1] * 30, 10))
    assert made.tokens == greedy_tokens(Toy(), [1] * 30, 2)
    assert made.finish_reason == "length"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one(Toy(max_length=32), Request([1] * 30, 2)).tokens == made.tokens


def test_a_text_may_be_read_from_a_source() -> None:
    toy = Toy()
    made = generate(toy, [Request([0], 4), Request([0], 4)], sources=[[5, 6], [7]])
    for source, generation in zip([[5, 6], [7]], made, strict=True):
        text = [0]
        for token in generation.tokens:
            assert token == toy.logits_after(text, source).argmax()
            text.append(token)


def test_events_are_plain_values() -> None:
    assert Event(0, 3, -1.0) == Event(row=0, token=3, logprob=-1.0, finish_reason=None, text="", stop=None)


# A real model


def byte_model(**changes: object) -> qkv.TextModel:
    """A small language model of bytes."""
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 256, **changes})
    return qkv.TextModel(qkv.build(config, seed=3), ByteTokenizer())


def test_greedy_text_is_that_of_the_largest_logits() -> None:
    lm = byte_model()
    tokens = lm.tokenizer.encode("ab")
    for _ in range(6):
        logits = lm.model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    made = lm.generate("ab", 6, decoding=Greedy())
    assert made.tokens == tokens[2:]
    assert made.text == lm.tokenizer.decode(tokens[2:])
    assert made.finish_reason == "length"


def test_a_seed_gives_the_same_text_whole_or_in_pieces() -> None:
    lm = byte_model()
    first, again, other = (lm.generate("ab", 12, decoding=Sampling(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.tokens != other.tokens
    assert "".join(lm.stream("ab", 12, decoding=Sampling(seed=1))) == first.text


def test_a_longer_request_begins_with_the_shorter_one() -> None:
    lm = byte_model()
    assert lm.generate("ab", 9).tokens[:5] == lm.generate("ab", 5).tokens


def test_a_prefix_model_reads_its_prompt_both_ways() -> None:
    lm = byte_model(**{"decoder.layers.*.attention.pattern": {"kind": "prefix"}})
    tokens = torch.tensor([lm.tokenizer.encode("abcd")])
    expected = lm.model(tokens, prefix_length=torch.tensor([4])).logits[0, -1].argmax()
    assert lm.generate("abcd", 1, decoding=Greedy()).tokens == [int(expected)]


def test_learned_positions_limit_the_length() -> None:
    config = qkv.preset("gpt2").toy().override({"vocab_size": 256, "max_seq_len": 8})
    lm = qkv.TextModel(qkv.build(config), ByteTokenizer())
    assert len(lm.generate("abc", 5).tokens) == 5
    with pytest.warns(UserWarning, match="max_new_tokens: 5 in place of 6, since the model has 8 positions"):
        assert len(lm.generate("abc", 6).tokens) == 5
    with pytest.raises(GenerationError, match="prompt: 9 tokens, but the model has 8 positions"):
        lm.generate("abcdefghi", 1)


def test_a_model_that_does_not_continue_text_says_so() -> None:
    config = qkv.preset("bert-base-uncased").toy().override({"vocab_size": 256})
    with pytest.raises(GenerationError, match="needs a decoder with a language-model head"):
        qkv.TextModel(qkv.build(config), ByteTokenizer()).generate("a", 1)


def test_a_model_without_a_tokenizer_says_so() -> None:
    config = c.ModelConfig.from_dict(qkv.preset("gpt2").toy().to_dict())
    with pytest.raises(GenerationError, match="tokenizer"):
        qkv.TextModel(qkv.build(config)).generate("a", 1)
