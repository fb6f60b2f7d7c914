"""`qkv show`: totals that are exact, layers written once, shapes of all three topologies, and the trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from qkv.plan import index_ranges

from .helpers import Result

Command = Callable[..., Result]


def test_llama_3_8b(command: Command) -> None:
    out = command("show", "llama-3-8b").out
    assert "8,030,261,248 parameters" in out
    assert re.search(r"decoder\.layers\.0-31\.attention\.q_proj\.weight +\(4096, 4096\) +16,777,216 +x 32\n", out)
    assert re.search(r"total +8,030,261,248\n", out)
    assert re.search(r"attention\.k_proj +k = n W\^T +\(B, T, G\*F\) +\(B, T, 1024\) +4,194,304\n", out)
    assert re.search(r"\[scores\] +s = q k\^T \* 0\.08839 +\(B, H, T, T\) +\(B, 32, T, T\)\n", out)


def test_transformer_base_shows_both_stacks_and_the_shift(command: Command) -> None:
    out = command("show", "transformer-base").out
    parts = ["embed", "encoder.layers.0-5", "decoder input", "embed", "decoder.layers.0-5", "head"]
    headings = re.findall(r"^  (\S.*?)(?:  .*)?$", out.split("Operations")[1], flags=re.M)
    assert [heading for heading in headings if heading in parts] == parts
    assert "tokens = a start token, then targets without the last" in out
    assert re.search(r"cross_attention\.k_proj +k = memory W\^T +\(B, S, G\*F\)", out)
    assert re.search(r"\[scores\] +s = q k\^T \* 0\.125 +\(B, H, T, S\) +\(B, 8, T, S\)", out)
    assert re.search(r"logits = x \(table of embed\)\^T +\(B, T, V\) +\(B, T, 37000\)\n", out)


def test_defaults_are_hidden_unless_asked_for(command: Command) -> None:
    short, full = (command("show", "llama-3-8b", *flags).out for flags in ((), ("--all",)))
    assert "        positions: rotary\n          theta: 500000.0\n" in short
    assert "fraction" not in short
    assert "          fraction: 1.0\n" in full
    assert "hidden" in short
    assert "hidden" not in full


def test_layers_that_differ_stand_apart_and_equal_ones_together(command: Command) -> None:
    gemma = command("show", "gemma-3-270m").out
    assert "decoder.layers.{0-4,6-10,12-16}  x 15" in gemma  # five local layers, then a global one
    assert "decoder.layers.{5,11,17}         x 3" in gemma
    assert re.search(r"decoder\.layers\.0-17\.ffn\.up_proj\.weight +\(2048, 640\) +1,310,720 +x 18\n", gemma)
    deepseek = command("show", "deepseek-v3").out
    assert "decoder.layers.0-2.ffn.up_proj.weight" in deepseek
    assert "decoder.layers.3-60.ffn.experts.up_proj" in deepseek


@pytest.mark.parametrize(
    ("indices", "short"), [([5], "5"), ([0, 1, 2], "0-2"), ([0, 1, 3], "{0-1,3}"), ([1, 3, 4, 5, 9], "{1,3-5,9}")]
)
def test_indices_in_short(indices: list[int], short: str) -> None:
    assert index_ranges(indices) == short


@pytest.mark.parametrize("name", ["llama-3-8b", "t5-small", "bert-base-uncased", "deepseek-v3"])
def test_json_adds_up(command: Command, name: str) -> None:
    shown = json.loads(command("show", name, "--json").out)
    assert qkv.ModelConfig.from_dict(shown["config"]) == qkv.preset(name)
    total = qkv.preset(name).n_parameters
    assert shown["n_parameters"] == total
    assert sum(int(np.prod(t["shape"])) * t["copies"] for t in shown["tensors"]) == total
    parts = shown["operations"]
    assert sum(max(len(p["layers"]), 1) * sum(s["parameters"] for s in p["steps"]) for p in parts) == total


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_config_file_is_shown_like_a_preset(command: Command, tmp_path: Path, suffix: str) -> None:
    config, path = qkv.preset("gpt2"), tmp_path / f"mine.{suffix}"
    path.write_text(config.to_json() if suffix == "json" else config.to_toml())
    named, filed = command("show", "gpt2").out, command("show", str(path)).out
    assert filed == named.replace("gpt2", str(path), 1)
    path.write_text(path.read_text().replace("d_model", "d_modle"))
    shown = command("show", str(path))
    assert shown.code == 2
    assert shown.err.startswith(f"qkv: {path}: ")
    assert "d_modle: unknown field; did you mean 'd_model'?" in shown.err


def test_a_saved_folder_is_shown(command: Command, saved: Path) -> None:
    config = qkv.load(saved).config
    assert f"total{config.n_parameters:,}" in command("show", str(saved)).out.replace(" ", "")


# The trace


def test_the_trace_prints_every_matrix_in_order(command: Command) -> None:
    out = command("show", "gpt2", "--trace", "Hello").out
    config = qkv.preset("gpt2").toy()
    tokens = torch.tensor([[byte % config.vocab_size for byte in b"Hello"]])
    model = qkv.build(config, seed=0)
    with qkv.capture(model) as trace:
        model(tokens)
    expected = [f"{name} {tuple(value.shape[1:])}" for name, value in trace.items()]
    headings = re.findall(r"^([a-z][\w.]* \(.*\))$", out, flags=re.M)
    assert headings == ["tokens (5,)", *expected]
    assert "random weights (seed 0)" in out.splitlines()[0]
    weights = trace["decoder.layers.0.attention.weights"][0, 0, 1]
    assert f"[{weights[0]:.3f} {weights[1]:.3f} 0.    0.    0.   ]" in out


def test_the_trace_of_an_encoder_decoder_shifts_its_target(command: Command) -> None:
    shown = json.loads(command("show", "t5-small", "--trace", "abc", "--json").out)["trace"]
    assert shown["source"] == [97 - 96, 98 - 96, 99 - 96]
    assert shown["tokens"] == [0, 97 - 96, 98 - 96]
    assert np.shape(shown["decoder.layers.0.cross_attention.weights"]) == (4, 3, 3)


def test_a_saved_model_is_traced_with_its_own_weights(command: Command, saved: Path) -> None:
    shown = json.loads(command("show", str(saved), "--trace", "abc", "--json").out)["trace"]
    logits = qkv.load(saved).model(torch.tensor([list(b"abc")])).logits[0]
    assert np.array(shown["head.logits"]) == pytest.approx(logits.detach().numpy(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["bert-base-uncased", "longformer-base", "deepseek-v3", "transformer-xl-wt103"])
def test_every_kind_of_model_can_be_traced(command: Command, name: str) -> None:
    shown = command("show", name, "--trace", "a text")
    assert shown.code == 0
    assert "attention.weights" in shown.out
