"""`build`: a config, or a preset's name, becomes a model with reproducible weights."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv.errors import ConfigError

CONFIG = qkv.preset("gpt2").toy()


def test_it_has_the_tensors_of_the_config() -> None:
    model = qkv.build(CONFIG)
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == {
        name: p.shape for name, p in CONFIG.shapes().items()
    }
    assert all(p.device.type == "cpu" and p.dtype == torch.float32 and p.requires_grad for p in model.parameters())


def test_a_seed_gives_the_same_weights() -> None:
    first, again, other = (qkv.build(CONFIG, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.tokens.weight"], other["embed.tokens.weight"])


def test_a_forward_is_deterministic_although_the_config_has_dropout() -> None:
    model = qkv.build(CONFIG.override({"embedding.dropout": 0.5}))
    tokens = torch.arange(8)[None]
    assert not model.training
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_a_preset_goes_by_its_name() -> None:
    assert qkv.build("minilm-l6").config == qkv.preset("minilm-l6")
    with pytest.raises(ConfigError, match="did you mean 'gpt2'"):
        qkv.build("gpt-2")


def test_a_dtype_rounds_the_same_weights() -> None:
    full, half = qkv.build(CONFIG), qkv.build(CONFIG, dtype=torch.bfloat16)
    for name, tensor in half.state_dict().items():
        assert torch.equal(tensor, full.state_dict()[name].to(torch.bfloat16)), name


def test_no_weights_are_made_for_shapes_alone() -> None:
    model = qkv.build(CONFIG, device="meta")
    assert all(p.is_meta for p in model.parameters())
