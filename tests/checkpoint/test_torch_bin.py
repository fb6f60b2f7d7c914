"""PyTorch's `.bin` files: the same model as from safetensors, and nothing of them is ever run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

from checkpoint.as_family import drawn
from checkpoint.harness import VOCAB
from qkv.checkpoint import torch_bin
from qkv.checkpoint.huggingface import read_model
from qkv.errors import CheckpointError

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40,
}  # fmt: skip


class Trap:
    """Pickled, it asks for a folder to be made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """A folder without weights, the peer's tensors as `.bin` files hold them, and ours read from safetensors."""
    model = drawn(t.BertForMaskedLM(t.BertConfig(**SMALL)))
    model.save_pretrained(tmp_path)
    _, ours = read_model(tmp_path)
    expected = {name: np.array(value) for name, value in ours.items()}
    (tmp_path / "model.safetensors").unlink()
    return tmp_path, model.state_dict(), expected


def same(found: dict[str, Any], expected: dict[str, np.ndarray]) -> bool:
    return set(found) == set(expected) and all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("zipped", [True, False])
def test_one_file_is_the_model(both: Any, zipped: bool) -> None:
    folder, theirs, expected = both
    assert "cls.predictions.decoder.weight" in theirs  # a copy, as such files hold
    torch.save(theirs, folder / torch_bin.SINGLE, _use_new_zipfile_serialization=zipped)
    assert same(read_model(folder)[1], expected)


def write_shards(folder: Path, theirs: dict[str, torch.Tensor]) -> dict[str, str]:
    """Two files and their index; returns where each tensor is."""
    names = list(theirs)
    where: dict[str, str] = {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{index + 1:05}-of-00002.bin"
        torch.save({name: theirs[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / torch_bin.INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return where


def test_several_files_are_the_model(both: Any) -> None:
    folder, theirs, expected = both
    write_shards(folder, theirs)
    assert same(read_model(folder)[1], expected)


def test_an_index_that_does_not_fit_is_refused(both: Any) -> None:
    folder, theirs, _ = both
    where = write_shards(folder, theirs)
    moved = {**where, "cls.predictions.bias": "pytorch_model-00001-of-00002.bin", "more": where["cls.predictions.bias"]}
    (folder / torch_bin.INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match=r"does not fit its files: .*more is not in pytorch_model"):
        read_model(folder)
    del where["cls.predictions.bias"]
    (folder / torch_bin.INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match=r"cls.predictions.bias is in pytorch_model.*, but not in the index"):
        read_model(folder)
    (folder / torch_bin.INDEX).write_text("[1]")
    with pytest.raises(CheckpointError, match="not an index of tensors"):
        read_model(folder)


def test_a_missing_part_is_named(both: Any) -> None:
    folder, theirs, _ = both
    write_shards(folder, theirs)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002.bin: missing"):
        read_model(folder)


def test_safetensors_come_first(both: Any) -> None:
    folder, theirs, expected = both
    drawn(t.BertForMaskedLM(t.BertConfig(**SMALL))).save_pretrained(folder)
    torch.save({name: value + 1 for name, value in theirs.items()}, folder / torch_bin.SINGLE)
    assert same(read_model(folder)[1], expected)


def test_a_folder_without_weights_says_what_is_missing(both: Any) -> None:
    with pytest.raises(CheckpointError, match=r"model.safetensors: missing"):
        read_model(both[0])


def test_dtypes_are_kept_and_bfloat16_is_its_bits(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, -2.5], [0.15625, 3e38]])
    kinds = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
    held = {str(kind): values.clamp(max=6e4).to(kind).T for kind in kinds}
    torch.save({**held, "scalar": torch.tensor(2.0), "ids": torch.arange(3)}, tmp_path / "a.bin")
    found = torch_bin.read_file(tmp_path / "a.bin")
    for kind in kinds[:3]:
        assert np.array_equal(found[str(kind)], held[str(kind)].numpy())
        assert found[str(kind)].dtype == held[str(kind)].numpy().dtype
    bits = found["torch.bfloat16"]
    assert bits.dtype == np.uint16
    assert np.array_equal((bits.astype(np.uint32) << 16).view(np.float32), held["torch.bfloat16"].float().numpy())
    assert found["scalar"].shape == ()
    assert found["ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("plain_pickle", [True, False])
def test_code_in_a_file_is_never_run(tmp_path: Path, plain_pickle: bool) -> None:
    target, path = tmp_path / "made", tmp_path / "trap.bin"
    if plain_pickle:
        path.write_bytes(pickle.dumps({"a": Trap(target)}, protocol=2))
    else:
        torch.save({"a": torch.ones(2), "b": Trap(target)}, path)
    with pytest.raises(
        CheckpointError, match=r"trap.bin: holds more than tensors, and was not run: it asks for posix.mkdir"
    ):
        torch_bin.read_file(path)
    assert not target.exists()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kept", [0, 7, 0.5, -4])
def test_a_file_cut_short_is_refused(tmp_path: Path, zipped: bool, kept: float) -> None:
    path = tmp_path / "a.bin"
    torch.save({"a": torch.arange(3000.0)}, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)] if isinstance(kept, float) else whole[:kept])
    with pytest.raises(CheckpointError, match=r"a.bin: (damaged or cut short|holds more than tensors)"):
        torch_bin.read_file(path)


@pytest.mark.parametrize("held", [[torch.ones(2)], {"model": {"a": torch.ones(2)}}, torch.ones(2)])
def test_what_is_no_table_of_tensors_is_refused(tmp_path: Path, held: Any) -> None:
    torch.save(held, tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match="not a table of tensors by name"):
        torch_bin.read_file(tmp_path / "a.bin")


def test_bytes_that_are_no_pickle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"hello world, " * 10)
    with pytest.raises(CheckpointError, match=r"a.bin: (damaged or cut short|holds more than tensors)"):
        torch_bin.read_file(tmp_path / "a.bin")
