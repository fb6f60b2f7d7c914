"""qkv's own folder: where a tokenizer's vocabulary stands, and folders of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

import qkv
from qkv.checkpoint import native
from qkv.errors import CheckpointError
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer, Specials
from text.files import sentencepiece, trained_bpe

CONFIG = qkv.preset("llama-3.2-1b").toy().override({"vocab_size": 600})
TEXT = "The with statement is used, naïvely 的, <s>…  12"
BPE, SENTENCEPIECE = "tokenizer.json", "pieces.json"
FILES = [BPE, SENTENCEPIECE]


def tokenizer_in(file: str) -> PieceTokenizer:
    """A tokenizer whose vocabulary stands in that file."""
    if file == SENTENCEPIECE:
        return sentencepiece("bpe")
    return LibraryTokenizer(json.loads(trained_bpe(["<s>"]).to_str()), Specials({"<s>": 0}, bos=0))


def saved(folder: Path, file: str) -> PieceTokenizer:
    made = tokenizer_in(file)
    qkv.TextModel(qkv.build(CONFIG), made).save(folder / "m")
    return made


def described(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "m" / native.CONFIG).read_text())
    return found


@pytest.mark.parametrize("file", FILES)
def test_a_vocabulary_has_a_file_of_its_own(file: str, tmp_path: Path) -> None:
    made = saved(tmp_path, file)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == sorted([native.CONFIG, native.WEIGHTS, file])
    # The config alone, without any of the 600 pieces.
    assert (tmp_path / "m" / native.CONFIG).stat().st_size < 8000
    again = qkv.load(tmp_path / "m").tokenizer
    assert isinstance(again, PieceTokenizer)
    assert again.encode(TEXT) == made.encode(TEXT)
    assert again.specials == made.specials


def test_its_file_is_one_that_the_library_reads(tmp_path: Path) -> None:
    made = saved(tmp_path, BPE)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "m" / BPE))
    assert library.encode("The with statement").ids == made.encode("The with statement", add_special=False)


@pytest.mark.parametrize("file", FILES)
def test_a_folder_with_the_vocabulary_in_its_config_is_read(file: str, tmp_path: Path) -> None:
    """As qkv wrote it at first."""
    made = saved(tmp_path, file)
    (tmp_path / "m" / file).unlink()
    description = described(tmp_path) | {"tokenizer": made.to_dict()}
    (tmp_path / "m" / native.CONFIG).write_text(json.dumps(description))
    again = qkv.load(tmp_path / "m").tokenizer
    assert again is not None
    assert again.encode(TEXT) == made.encode(TEXT)


@pytest.mark.parametrize("file", FILES)
def test_a_vocabulary_that_is_missing_or_damaged_is_named(file: str, tmp_path: Path) -> None:
    saved(tmp_path, file)
    path = tmp_path / "m" / file
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=rf"{file}: not JSON"):
        qkv.load(tmp_path / "m")
    path.write_text("7")
    with pytest.raises(CheckpointError, match=r"tokenizer: its .* description is damaged"):
        qkv.load(tmp_path / "m")
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{file}: cannot be read \(No such file"):
        qkv.load(tmp_path / "m")


@pytest.mark.parametrize(
    "files", [{"json": "../../secret.json"}, {"other": "tokenizer.json"}, ["tokenizer.json"], None]
)
def test_no_other_file_is_ever_read_for_it(files: object, tmp_path: Path) -> None:
    saved(tmp_path, BPE)
    description = described(tmp_path) | {"tokenizer": {"kind": "huggingface", "files": files}}
    (tmp_path / "m" / native.CONFIG).write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=r"config\.json: tokenizer\.files is .* not understood"):
        qkv.load(tmp_path / "m")


@pytest.mark.parametrize("file", FILES)
def test_saves_with_and_without_vocabulary_replace_each_other(file: str, tmp_path: Path) -> None:
    made = saved(tmp_path, file)
    qkv.TextModel(qkv.build(CONFIG)).save(tmp_path / "m")
    assert qkv.load(tmp_path / "m").tokenizer is None
    assert not (tmp_path / "m" / file).exists()
    saved(tmp_path, file)
    again = qkv.load(tmp_path / "m").tokenizer
    assert again is not None
    assert again.encode(TEXT) == made.encode(TEXT)


@pytest.mark.parametrize("name", ["tokenizer.json", "pieces.json", "model.safetensors"])
def test_files_without_a_config_are_no_save_and_stay(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=rf"holds other files \({name}\)"):
        native.write(tmp_path, CONFIG, {}, None)
    assert (tmp_path / name).read_text() == "mine"
