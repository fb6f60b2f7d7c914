"""Longer contexts by stretched angles, chosen when a model is loaded."""

from __future__ import annotations

import pytest
import torch

import qkv
from qkv.config import Rotary
from qkv.config.presets import preset
from qkv.config.stretch import stretched
from qkv.errors import ConfigError


@pytest.mark.parametrize("kind", ["linear", "ntk", "dynamic-ntk", "yarn"])
def test_every_rotary_position_gets_the_rule_and_the_context_grows(kind: str) -> None:
    before = preset("gemma-3-270m" if kind == "linear" else "mistral-7b").toy()
    plain = before.override({"decoder.layers.*.attention.positions.scaling": {"kind": "none"}})
    after = stretched(plain, f"{kind}:4")
    assert after.max_seq_len == 4 * plain.max_seq_len
    assert after.decoder is not None
    for block in after.decoder.blocks:
        assert isinstance(block.attention.positions, Rotary)
        assert block.attention.positions.scaling.kind == kind
        assert block.attention.positions.scaling.to_dict()["factor"] == 4.0
    assert stretched(plain, f"{kind}:1").override({}) != plain  # factor 1 is a rule too


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("yarn", "give the factor as a number, as in yarn:4"),
        ("yarn:x", "give the factor as a number"),
        ("yarn:0.5", "the factor must be 1 or more"),
        ("yarn:inf", "the factor must be 1 or more"),
        ("longer:4", "choose one of linear, ntk, dynamic-ntk, yarn"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_remedy(rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stretched(preset("mistral-7b").toy(), rule)


def test_models_that_cannot_be_stretched() -> None:
    with pytest.raises(ConfigError, match="no rotary positions"):
        stretched(preset("gpt2").toy(), "yarn:4")
    with pytest.raises(ConfigError, match="stretched already, by 'llama3'"):
        stretched(preset("llama-3.1-8b").toy(), "yarn:4")


def test_a_model_is_stretched_as_it_is_loaded(tmp_path: object) -> None:
    config = preset("mistral-7b").toy()
    qkv.TextModel(qkv.build(config, seed=0)).save(f"{tmp_path}/m")
    plain, longer = qkv.load(f"{tmp_path}/m"), qkv.load(f"{tmp_path}/m", rope="linear:2")
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        halves = plain.model(tokens, positions=torch.tensor([[0, 1, 2, 3]])).logits
        whole = longer.model(tokens, positions=torch.tensor([[0, 2, 4, 6]])).logits
    assert (halves - whole).abs().max() < 1e-5 * halves.abs().max()
