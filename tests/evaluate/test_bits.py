"""The disjoint-windows protocol: each token once, from those before it in its window."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import qkv
from qkv.errors import DataError
from qkv.evaluate import Score, disjoint_windows
from qkv.nn import Transformer


@pytest.fixture(scope="module")
def model() -> Transformer:
    return qkv.build(qkv.preset("llama-3-8b").toy(), seed=1)


def tokens(n: int) -> torch.Tensor:
    return torch.randint(96, (n,), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", [2, 7, 8, 9, 10, 33, 8 * 16 + 1, 8 * 35 + 4])
def test_it_equals_one_window_after_the_other(model: Transformer, n: int) -> None:
    text, nats = tokens(n), 0.0
    for start in range(0, n - 1, 8):
        window = text[start : start + 9]
        with torch.no_grad():
            nats += cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="sum").item()
    score = disjoint_windows(model, text, 8)
    assert score.tokens == n - 1
    assert score.nats == pytest.approx(nats, rel=1e-5)


def test_a_model_that_knows_nothing_needs_the_logarithm_of_the_vocabulary() -> None:
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 64})
    blank = qkv.build(config)
    with torch.no_grad():
        blank.head.weight.zero_()
    score = disjoint_windows(blank, tokens(40) % 64, 16)
    assert score.bits_per_token == pytest.approx(6, abs=1e-6)
    assert score.loss == pytest.approx(math.log(64), abs=1e-6)


def test_dropout_is_off_and_the_mode_is_given_back() -> None:
    config = qkv.preset("llama-3-8b").toy().override({"decoder.layers.*.dropout": 0.5})
    model = qkv.build(config).train()
    assert disjoint_windows(model, tokens(40), 8) == disjoint_windows(model, tokens(40), 8)
    assert model.training
    assert all(module.training for module in model.modules())


def test_bits_and_nats() -> None:
    assert Score(nats=8 * math.log(2), tokens=4).bits_per_token == pytest.approx(2)
    assert Score(nats=8.0, tokens=4).loss == 2


def test_a_text_of_one_token_predicts_nothing(model: Transformer) -> None:
    with pytest.raises(DataError, match="1 tokens predicts nothing"):
        disjoint_windows(model, tokens(1), 8)
