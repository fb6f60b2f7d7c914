"""The loop over tokens, without a model and with one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import qkv
import qkv.config as c
from qkv.errors import GenerationError
from qkv.generate import continuation, draw
from qkv.text import ByteTokenizer


def next_is_last_plus_one(tokens: list[int]) -> np.ndarray:
    logits = np.zeros(10)
    logits[(tokens[-1] + 1) % 10] = 50.0
    return logits


def byte_model(**changes: object) -> qkv.TextModel:
    """A small language model of bytes."""
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 256, **changes})
    return qkv.TextModel(qkv.build(config, seed=3), ByteTokenizer())


def test_each_token_follows_from_all_before_it() -> None:
    assert list(continuation(next_is_last_plus_one, [7], 5, temperature=1.0, seed=0)) == [8, 9, 0, 1, 2]


def test_each_draw_has_the_number_of_its_position() -> None:
    flat = np.zeros(1000)
    tokens = list(continuation(lambda _: flat, [7, 7, 7], 5, temperature=1.0, seed=4))
    assert tokens == [draw(flat, 1.0, 4, position) for position in range(3, 8)]


def test_the_prompt_is_left_as_it_is() -> None:
    prompt = [7]
    list(continuation(next_is_last_plus_one, prompt, 3, temperature=0.0, seed=0))
    assert prompt == [7]


@pytest.mark.parametrize(("prompt", "n", "problem"), [([], 1, "prompt: empty"), ([1], 0, "max_new_tokens: must be 1")])
def test_impossible_requests_are_refused(prompt: list[int], n: int, problem: str) -> None:
    with pytest.raises(GenerationError, match=problem):
        list(continuation(next_is_last_plus_one, prompt, n, temperature=0.0, seed=0))


def test_greedy_text_is_that_of_the_largest_logits() -> None:
    lm = byte_model()
    tokens = lm.tokenizer.encode("ab")
    for _ in range(6):
        logits = lm.model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    made = lm.generate("ab", 6, temperature=0)
    assert made.tokens == tokens[2:]
    assert made.text == lm.tokenizer.decode(tokens[2:])
    assert made.finish_reason == "length"


def test_a_seed_gives_the_same_text_whole_or_in_pieces() -> None:
    lm = byte_model()
    first, again, other = (lm.generate("ab", 12, temperature=1.5, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.tokens != other.tokens
    assert "".join(lm.stream("ab", 12, temperature=1.5, seed=1)) == first.text


def test_a_longer_request_begins_with_the_shorter_one() -> None:
    lm = byte_model()
    assert lm.generate("ab", 9, seed=4).tokens[:5] == lm.generate("ab", 5, seed=4).tokens


def test_a_prefix_model_reads_its_prompt_both_ways() -> None:
    lm = byte_model(**{"decoder.layers.*.attention.pattern": {"kind": "prefix"}})
    tokens = torch.tensor([lm.tokenizer.encode("abcd")])
    expected = lm.model(tokens, prefix_length=torch.tensor([4])).logits[0, -1].argmax()
    assert lm.generate("abcd", 1, temperature=0).tokens == [int(expected)]


def test_learned_positions_limit_the_length() -> None:
    config = qkv.preset("gpt2").toy().override({"vocab_size": 256, "max_seq_len": 8})
    lm = qkv.TextModel(qkv.build(config), ByteTokenizer())
    assert len(lm.generate("abc", 5).tokens) == 5
    with pytest.raises(GenerationError, match="max_new_tokens: 9 tokens with the prompt, but the model has 8"):
        lm.generate("abc", 6)


@pytest.mark.parametrize("name", ["bert-base-uncased", "t5-small"])
def test_models_that_do_not_continue_text_say_so(name: str) -> None:
    config = qkv.preset(name).toy().override({"vocab_size": 256})
    with pytest.raises(GenerationError, match="decoder-only"):
        qkv.TextModel(qkv.build(config), ByteTokenizer()).generate("a", 1)


def test_a_model_without_a_tokenizer_says_so() -> None:
    config = c.ModelConfig.from_dict(qkv.preset("gpt2").toy().to_dict())
    with pytest.raises(GenerationError, match="tokenizer"):
        qkv.TextModel(qkv.build(config)).generate("a", 1)
