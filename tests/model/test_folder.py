"""A saved folder: exact, strict, mapped, all or nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import qkv
from qkv.checkpoint import native
from qkv.config import ModelConfig
from qkv.errors import CheckpointError
from qkv.model import save
from qkv.text import ByteTokenizer

CONFIG = qkv.preset("llama-3.2-1b").toy().override({"vocab_size": 256})  # its head is tied


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "model"
    qkv.TextModel(qkv.build(CONFIG, seed=5), ByteTokenizer()).save(path)
    return path


def rewrite_config(folder: Path, **changes: Any) -> None:
    path = folder / native.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / native.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / native.WEIGHTS)


def refusal(folder: Path) -> str:
    """The one line that loading the folder ends with."""
    with pytest.raises(CheckpointError) as caught:
        qkv.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is written


@pytest.mark.parametrize("name", ["llama-3-8b", "bert-base-uncased", "t5-small", "deepseek-v3", "transformer-xl-wt103"])
def test_a_model_comes_back_to_the_bit(tmp_path: Path, name: str) -> None:
    model = qkv.build(qkv.preset(name).toy(), seed=2)
    save(model, tmp_path / "m")
    loaded = qkv.load(tmp_path / "m")
    assert loaded.config == model.config
    assert loaded.tokenizer is None
    assert loaded.model.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[key]), key


def test_the_folder_holds_what_its_docstring_says(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    description = json.loads((folder / "config.json").read_text())
    assert description == {
        "format": "qkv",
        "version": 1,
        "model": CONFIG.to_dict(),
        "tokenizer": {"kind": "bytes"},
    }
    tensors = load_file(folder / "model.safetensors")
    assert sum(tensor.size for tensor in tensors.values()) == CONFIG.n_parameters  # the tied tensor once
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_float_types_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    model = qkv.build(CONFIG, dtype=dtype)
    save(model, tmp_path / "m")
    assert {tensor.dtype for tensor in qkv.load(tmp_path / "m").model.parameters()} == {dtype}
    assert {tensor.dtype for tensor in qkv.load(tmp_path / "m", dtype=torch.float32).model.parameters()} == {
        torch.float32
    }


def test_bfloat16_keeps_every_bit(tmp_path: Path) -> None:
    model = qkv.build(CONFIG, dtype=torch.bfloat16)
    save(model, tmp_path / "m")
    again = qkv.load(tmp_path / "m").model
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert {tensor.dtype for tensor in again.parameters()} == {torch.bfloat16}


def test_a_loaded_model_computes_trains_and_leaves_the_file_alone(folder: Path) -> None:
    before = (folder / native.WEIGHTS).read_bytes()
    lm = qkv.load(folder)
    assert not lm.model.training
    tokens = torch.arange(6)[None]
    fresh = qkv.build(CONFIG, seed=5)
    assert torch.equal(lm.model(tokens).logits, fresh(tokens).logits)
    lm.model(tokens).logits.sum().backward()
    with torch.no_grad():
        for parameter in lm.model.parameters():
            assert parameter.grad is not None
            parameter.add_(1.0)
    assert (folder / native.WEIGHTS).read_bytes() == before


def test_weights_are_mapped(folder: Path) -> None:
    tensors = native.read(folder).tensors
    assert all(isinstance(tensor, np.memmap) for tensor in tensors.values())


# What is replaced


def test_an_older_save_is_replaced(folder: Path) -> None:
    other = qkv.build(qkv.preset("gpt2").toy())
    save(other, folder)
    assert qkv.load(folder).config == other.config
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_model_may_be_saved_over_the_folder_it_is_mapped_from(folder: Path) -> None:
    lm = qkv.load(folder)
    with torch.no_grad():
        lm.model.embed.tokens.weight.mul_(2)
    lm.save(folder)
    assert torch.equal(qkv.load(folder).model.embed.tokens.weight, qkv.build(CONFIG, seed=5).embed.tokens.weight * 2)


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    save(qkv.build(CONFIG), tmp_path)
    assert qkv.load(tmp_path).config == CONFIG


def test_nothing_else_is_ever_replaced(folder: Path, tmp_path: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    other = tmp_path / "other"
    other.mkdir()
    (other / native.CONFIG).write_text('{"model_type": "llama"}')
    (tmp_path / "file").write_text("mine")
    model = qkv.build(CONFIG)
    for target, problem in [
        (folder, "notes.txt"),
        (other, "not a model that qkv saved"),
        (tmp_path / "file", "a file"),
    ]:
        with pytest.raises(CheckpointError, match=problem):
            save(model, target)
    assert (folder / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_a_save_that_fails_leaves_the_older_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native, "write_file", full)
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"):
        save(qkv.build(CONFIG, seed=9), folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert torch.equal(qkv.load(folder).model.embed.tokens.weight, qkv.build(CONFIG, seed=5).embed.tokens.weight)


# What is refused


def test_all_wrong_tensors_are_named_at_once(folder: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        del tensors["decoder.norm.weight"], tensors["decoder.layers.0.attention.q_proj.weight"]
        tensors["extra.bias"] = np.zeros(3, dtype=np.float32)
        tensors["embed.tokens.weight"] = tensors["embed.tokens.weight"][:10]
        tensors["decoder.layers.1.ffn_norm.weight"] = np.zeros(32, dtype=np.int64)

    rewrite_weights(folder, spoil)
    message = refusal(folder)
    for part in (
        "model.safetensors: does not fit its config",
        "decoder.norm.weight is missing",
        "decoder.layers.0.attention.q_proj.weight is missing",
        "extra.bias is unexpected",
        "embed.tokens.weight has shape (10, 32) instead of (256, 32)",
        "decoder.layers.1.ffn_norm.weight has dtype I64",
    ):
        assert part in message


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_short_is_refused(folder: Path, keep: int) -> None:
    path = folder / native.WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors: damaged or cut short" in refusal(folder)


def test_missing_files_are_named(folder: Path) -> None:
    (folder / native.WEIGHTS).unlink()
    assert "model.safetensors: missing" in refusal(folder)
    shutil.rmtree(folder)
    assert "does not exist; give the folder or file of a saved model" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "other"}, 'no saved model: it has neither "format": "qkv" nor a "model_type"'),
        ({"version": 2}, "version 2, but this qkv reads version 1; upgrade qkv"),
        ({"modle": {}}, "unknown field modle"),
        ({"model": None}, "field 'model' must be the model's config"),
        ({"tokenizer": {"kind": "words"}}, "tokenizer: expected"),
    ],
)
def test_a_wrong_description_is_refused(folder: Path, changes: dict[str, Any], problem: str) -> None:
    rewrite_config(folder, **changes)
    assert problem in refusal(folder)


def test_a_description_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / native.CONFIG).write_text("{")
    assert "config.json: not JSON" in refusal(folder)


def test_a_kind_of_ones_own_must_be_imported_first(folder: Path) -> None:
    model = json.loads((folder / native.CONFIG).read_text())["model"]
    model["decoder"]["layers"][0]["attention"]["positions"] = {"kind": "my-positions"}
    rewrite_config(folder, model=model)
    message = refusal(folder)
    assert "decoder.layers.0.attention.positions: unknown kind 'my-positions'" in message
    assert "import its file" in message


def test_the_config_can_be_read_alone(folder: Path) -> None:
    (folder / native.WEIGHTS).unlink()
    config, tokenizer = native.read_config(folder)
    assert isinstance(config, ModelConfig)
    assert config == CONFIG
    assert tokenizer == {"kind": "bytes"}
