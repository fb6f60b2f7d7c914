"""New folders are all or nothing: Hugging Face's and the way in which every folder is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.checkpoint import huggingface
from qkv.checkpoint.whole_folder import whole_folder
from qkv.errors import CheckpointError

CONFIG = qkv.preset("llama-3.2-1b").toy()
TENSORS = {name: np.zeros(p.shape, np.float32) for name, p in CONFIG.shapes().items()}


class StoppedError(Exception):
    """Something that goes wrong which nobody foresees."""


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), StoppedError(), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [True, False])
def test_a_hugging_face_folder_that_fails_leaves_nothing(
    error: BaseException, existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "deep" / "down" / "model"
    if existing:
        target.mkdir(parents=True)
    before = everything(tmp_path)

    def half(path: Path, *_: object) -> None:
        path.write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(huggingface, "write_file", half)
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        huggingface.write_folder(target, CONFIG, TENSORS)
    assert everything(tmp_path) == before


def test_it_is_complete_before_it_is_there(tmp_path: Path) -> None:
    seen = []

    def more(new: Path) -> None:
        seen.extend([sorted(path.name for path in new.iterdir()), (tmp_path / "model").exists()])
        (new / "tokenizer.json").write_text("{}")

    huggingface.write_folder(tmp_path / "model", CONFIG, TENSORS, also=more)
    assert seen == [["config.json", "model.safetensors"], False]
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert everything(tmp_path) == ["model", *(f"model/{name}" for name in names)]
    assert huggingface.read_model(tmp_path / "model")[0] == CONFIG


def test_a_tokenizer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(_: Path) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        huggingface.write_folder(tmp_path / "model", CONFIG, TENSORS, also=fails)
    assert everything(tmp_path) == []


def test_an_empty_folder_is_taken_and_another_never(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    huggingface.write_folder(tmp_path / "model", CONFIG, TENSORS)
    before = everything(tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        huggingface.write_folder(tmp_path / "model", CONFIG, TENSORS)
    assert everything(tmp_path) == before


def test_what_was_there_is_there_again_if_the_last_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("old")
    rename = Path.rename

    def refused(path: Path, to: Path) -> Path:
        if path.name.endswith(".new"):
            raise OSError(13, "Permission denied")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refused)
    with (
        pytest.raises(CheckpointError, match=r"model: cannot be written \(Permission denied\); choose another"),
        whole_folder(target) as new,
    ):
        (new / "new").write_text("new")
    assert everything(tmp_path) == ["model", "model/old"]


def test_where_no_folder_can_be_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        huggingface.write_folder(tmp_path / "file" / "model", CONFIG, TENSORS)
    assert "\n" not in str(caught.value)
    assert everything(tmp_path) == ["file"]
