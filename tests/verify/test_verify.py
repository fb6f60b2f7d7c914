"""The certificate passes for sound models of every topology, and each injected fault fails it and is located."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from parity.cases import CASES, attention, block, decoder
from parity.test_forward import float32_weights, model_with
from qkv import config as c
from qkv.checkpoint.huggingface import write_folder
from qkv.cli import app
from qkv.config import ModelConfig
from qkv.nn import Transformer
from qkv.nn.position import Rotary
from qkv.verify import Certificate, verify
from qkv.verify.paths import backends, batching, oracle, precision, saving
from qkv.verify.subject import Subject

# Compiling has a test of its own, in the unhooked process; caches and generation have a file of theirs.
QUICK = (oracle, backends, precision, batching, saving)


def certificate(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> Certificate:
    """Without compiling, and without FlexAttention, which compiles too."""
    monkeypatch.setattr("qkv.verify.PATHS", QUICK)
    monkeypatch.setattr("qkv.verify.paths.BACKENDS", {"flash": 0, "window": 0, "sdpa": 0, "eager": 0})
    return verify(model)


def built(config: ModelConfig) -> Transformer:
    return model_with(config, float32_weights(config), torch.float32)


WINDOWED = decoder(
    block(attention=attention(pattern=c.SlidingWindow(window=5), positions=c.Rotary(theta=100.0))),
    block(attention=attention(positions=c.Rotary(theta=100.0))),
    n_layers=3,
)
SOUND = {
    "windowed": WINDOWED,
    **{name: CASES[name] for name in ("masked-lm", "encoder-decoder", "experts-v3", "longformer", "adaptive", "prefix",
                                      "next-sentence", "rmsnorm-offset", "t5-buckets-own")},
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = certificate(built(SOUND[name]), monkeypatch)
    assert result.passed, result.to_json()
    ran = [row.path for row in result.rows if row.deviation is not None]
    assert "oracle = model, float64" in ran
    assert "saved and loaded = itself" in ran


def wrong_layout(model: Transformer) -> None:
    rotary = model.decoder.layers[1].attention.positions
    assert isinstance(rotary, Rotary)
    rotary.config = c.Rotary.from_dict({**rotary.config.to_dict(), "layout": "pairs"})


def wrong_window(model: Transformer) -> None:
    model.decoder.layers[0].attention.pattern = c.SlidingWindow(window=6)


def unscaled_head(model: Transformer) -> None:
    model.head.factor = 0.25  # as if T5's 1/sqrt(d_model) had been forgotten, or added


def wrong_norm(model: Transformer) -> None:
    model.decoder.layers[2].ffn_norm.offset = 1.0


FAULTS: dict[str, tuple[Callable[[Transformer], None], str]] = {
    "layout": (wrong_layout, "first in decoder.layers.1"),
    "window": (wrong_window, "first in decoder.layers.0"),
    "head": (unscaled_head, "first after the last layer"),
    "norm": (wrong_norm, "first in decoder.layers.2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_located(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, where = FAULTS[name]
    model = built(WINDOWED)
    inject(model)
    result = certificate(model, monkeypatch)
    assert not result.passed
    first = result.rows[0]
    assert first.verdict == "DIFFERS"
    assert first.deviation is not None
    assert first.deviation > 1e-3
    assert where in first.where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_fault_exceeds_the_rounding_bound(dtype: torch.dtype) -> None:
    """A bound that a fault could hide under would prove nothing."""
    sound = Subject(WINDOWED, built(WINDOWED))
    bound = sound.bound(dtype)
    for inject, _ in FAULTS.values():
        broken = built(WINDOWED).double()
        inject(broken)
        gap = (sound.inputs.run(broken) - sound.expected).abs().max() / sound.expected.abs().max()
        assert gap > bound


def test_the_package_is_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """`qkv.verify` is a package by its place and a function by its name."""
    monkeypatch.setattr("qkv.verify.PATHS", (oracle,))
    assert qkv.verify(built(WINDOWED)).passed
    assert qkv.verify.Certificate is Certificate


def test_a_hugging_face_folder_is_held_against_its_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder read with the wrong rotary layout agrees with itself on every path, and not with the peer."""
    monkeypatch.setattr("qkv.verify.PATHS", (oracle,))
    config = qkv.preset("llama-3-8b").toy()
    arrays = {name: value.astype(np.float32) for name, value in float32_weights(config).items()}
    write_folder(tmp_path / "m", config, arrays)
    assert [row.verdict for row in verify(tmp_path / "m").rows] == ["equal", "equal"]
    wrong = built(config.override({"decoder.layers.*.attention.positions.layout": "pairs"}))
    monkeypatch.setattr("qkv.verify._load", lambda path: wrong)
    assert [row.verdict for row in verify(tmp_path / "m").rows] == ["equal", "DIFFERS"]


def test_beginnings_are_compared_where_the_model_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.verify.PATHS", (batching,))
    rows = {row.path: row for row in verify(built(WINDOWED)).rows}
    assert rows["whole = each of its beginnings"].verdict == "equal"
    rows = {row.path: row for row in verify(built(CASES["masked-lm"])).rows}
    assert rows["whole = each of its beginnings"].verdict == "not run"


def test_a_large_model_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.verify.LARGE", 1000)
    result = certificate(built(WINDOWED), monkeypatch)
    assert result.passed
    assert "first 2 layers" in result.note


def test_a_fault_below_the_cut_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.verify.LARGE", 1000)
    model = built(WINDOWED)
    wrong_window(model)
    assert not certificate(model, monkeypatch).passed


@pytest.mark.unhooked
@pytest.mark.parametrize("name", ["windowed", "masked-lm"])
def test_all_paths_with_compiling(name: str) -> None:
    result = verify(built(SOUND[name]))
    assert result.passed, result.to_json()
    assert all(row.deviation is not None for row in result.rows if row.path in ("eager = compiled, float32",))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.setattr("qkv.verify.PATHS", (oracle, batching))
    target = tmp_path / "certificate.json"
    done = CliRunner().invoke(app, ["verify", "llama-3-8b", "--out", str(target)])
    assert done.exit_code == 0, done.output
    assert "oracle = model, float64" in done.output
    written = json.loads(target.read_text())
    assert written["passed"] is True
    assert {row["verdict"] for row in written["rows"]} == {"equal"}


def test_a_pulled_model_goes_before_the_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy-size preset would pass whatever the pulled weights are."""
    monkeypatch.setattr("qkv.verify.PATHS", (saving,))
    monkeypatch.setenv("QKV_HOME", str(tmp_path))
    assert "toy size" in verify("llama-3-8b").note
    config = qkv.preset("llama-3-8b").toy()
    arrays = {name: value.astype(np.float32) for name, value in float32_weights(config).items()}
    write_folder(tmp_path / "llama-3-8b", config, arrays)
    result = verify("llama-3-8b")
    assert result.note == ""
    assert [row.path for row in result.rows] == ["saved and loaded = itself", "peer transformers = model, float32"]
    assert result.passed
