"""Initialisation follows the config's table, tensor by tensor; a seed means the same whatever else the model has."""

from __future__ import annotations

import math

import pytest
import torch

from parity.cases import CASES, decoder
from qkv import config as c
from qkv.config.presets import preset
from qkv.nn import Transformer, initialise
from qkv.nn.init import draw


@pytest.mark.parametrize(
    ("distribution", "std", "largest"),
    [
        (c.Normal(0.3), 0.3, math.inf),
        # A normal cut at 2 standard deviations has 0.8796 of the standard deviation left.
        (c.Normal(0.3, cut=2.0), 0.3 * 0.8796, 0.6),
        (c.Uniform(0.3), 0.3 / math.sqrt(3), 0.3),
    ],
)
def test_draws_have_their_distribution(distribution: c.Normal | c.Uniform, std: float, largest: float) -> None:
    drawn = draw(distribution, (400, 500), seed=0, name="x")
    n = drawn.numel()
    assert abs(drawn.mean().item()) < 5 * std / math.sqrt(n)
    assert drawn.std().item() == pytest.approx(std, rel=5 / math.sqrt(n))  # kurtosis at most 3: error of the std
    assert drawn.abs().max().item() <= largest


@pytest.mark.parametrize(
    "name", ["gpt2", "bert-base-uncased", "t5-small", "transformer-base", "llama-3.1-8b", "palm-540b"]
)
def test_every_tensor_starts_as_the_table_says(name: str) -> None:
    config = preset(name).toy()
    model = Transformer(config)
    initialise(model, config, seed=3)
    table = config.parameters()
    for key, tensor in model.named_parameters():
        shape, distribution = table[key]
        assert torch.equal(tensor, draw(distribution, shape, 3, key)), key
        if isinstance(distribution, c.Constant):
            assert (tensor == distribution.value).all(), key


def test_gpt2_shrinks_what_joins_the_residual_stream() -> None:
    table = preset("gpt2").parameters()
    assert table["decoder.layers.3.attention.o_proj.weight"][1] == c.Normal(0.02 / math.sqrt(24))
    assert table["decoder.layers.3.ffn.down_proj.weight"][1] == c.Normal(0.02 / math.sqrt(24))
    assert table["decoder.layers.3.ffn.up_proj.weight"][1] == c.Normal(0.02)


def test_a_seed_gives_the_same_tensor_in_another_model() -> None:
    small, large = Transformer(decoder(n_layers=1)), Transformer(decoder(n_layers=3))
    initialise(small, decoder(n_layers=1), 7)
    initialise(large, decoder(n_layers=3), 7)
    assert torch.equal(small.decoder.layers[0].attention.q_proj.weight, large.decoder.layers[0].attention.q_proj.weight)
    initialise(small, decoder(n_layers=1), 8)
    assert not torch.equal(small.embed.tokens.weight, large.embed.tokens.weight)


def test_gemmas_norms_start_at_one() -> None:
    config = CASES["rmsnorm-offset"]
    model = Transformer(config)
    initialise(model, config, 0)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(
        model.decoder.layers[0].ffn_norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    )
