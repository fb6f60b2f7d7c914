"""What the demo trains, and on what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qkv.errors import DataError
from qkv.evaluate import NGram
from qkv.train.demo import CONTEXT, Texts, demo_config, demo_recipe, prepared, steps_within


def test_the_model_is_as_small_as_it_says() -> None:
    assert demo_config().n_parameters == 820_352
    assert demo_config().max_seq_len == CONTEXT


def test_the_end_of_the_text_is_held_out() -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    texts = prepared(text, "here")
    assert bytes(texts.training.tolist()) + bytes(texts.held_out.tolist()) == text.encode()
    assert len(texts.held_out) == pytest.approx(len(text) / 10, abs=1)


def test_no_character_is_cut_in_two() -> None:
    for size in range(2600, 2612):
        texts = prepared("é注" * size, "here")
        assert bytes(texts.held_out[:5].tolist()).decode()
        assert bytes(texts.training.tolist()).decode() + bytes(texts.held_out.tolist()).decode() == "é注" * size


def test_fewer_steps_are_made_where_there_is_no_time_for_all(tmp_path: Path) -> None:
    texts = prepared("the cat sat on the mat. " * 200, "here")
    recipe = demo_recipe(texts, 10_000, 0, tmp_path)
    assert 1 <= steps_within(1, recipe) < 1000
    assert steps_within(1e6, recipe) == 10_000
    assert not (tmp_path / "run").exists()
    assert steps_within(1, demo_recipe(texts, 2, 0, tmp_path)) == 2


def test_a_short_text_is_refused_and_the_shortest_can_be_trained_on() -> None:
    with pytest.raises(DataError, match="here: 2569 bytes of text, but training needs at least 2570"):
        prepared("x" * 2569, "here")
    assert len(prepared("x" * 2570, "here").held_out) == CONTEXT + 1


def test_the_baseline_predicts_the_same_bytes_as_the_model() -> None:
    texts = prepared("the cat sat on the mat. " * 200, "here")
    ngram = NGram(texts.training.numpy(), 3, 256)
    p = ngram.probabilities(texts.held_out.numpy())
    assert texts.baseline() == pytest.approx(-np.log2(p[1:]).mean())


@pytest.mark.parametrize(
    ("held_out", "prompt"),
    [
        ("ut off, then five whole words and more", "off, then five whole words"),
        ("注意力机制" * 9, "注意力机制注意力机制注意"),
        (" " * 90, "The"),
    ],
)
def test_the_prompt_is_whole_words_or_characters(held_out: str, prompt: str) -> None:
    tokens = torch.tensor(list(held_out.encode()))
    assert Texts(tokens, tokens).prompt() == prompt
    assert "\ufffd" not in Texts(tokens, tokens[1:]).prompt()
