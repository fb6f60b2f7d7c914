"""Vocabularies trained on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.cli.tokenizer import train
from qkv.errors import CheckpointError, DataError
from qkv.text import language_reference, tokenizer_from
from qkv.text.folder import read_folder
from qkv.text.training import END, train_bpe, train_bpe_for
from qkv.train.vocabulary import Vocabulary

ENGLISH = language_reference()[:60_000]
CHINESE = "道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。" * 20
TRAINED = train_bpe([ENGLISH, CHINESE], 600)


def test_a_vocabulary_has_the_size_asked_for_and_makes_texts_shorter() -> None:
    assert TRAINED.vocab_size == 600
    assert len(TRAINED.encode(ENGLISH)) < 0.5 * len(ENGLISH.encode())
    assert len(TRAINED.encode(CHINESE)) < 0.6 * len(CHINESE.encode())
    assert len(train_bpe([CHINESE], 400).encode(CHINESE)) < 0.5 * len(CHINESE)


def test_the_most_frequent_pair_is_the_first_token() -> None:
    tokenizer = train_bpe(["abab abab ab xy"], 258)
    assert tokenizer.piece(257) == "ab"
    assert tokenizer.vocab_size == 258


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_every_text_comes_back(text: str) -> None:
    assert TRAINED.decode(TRAINED.encode(text)) == text


def test_it_ends_texts_and_can_be_saved() -> None:
    assert TRAINED.specials.ends == {TRAINED.specials.controls[END]}
    assert tokenizer_from(TRAINED.to_dict()).encode(ENGLISH) == TRAINED.encode(ENGLISH)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(DataError, match="vocab_size is 256; the bytes and control tokens alone take 257"):
        train_bpe(["a"], 256)
    with pytest.raises(CheckpointError, match="unknown pre-tokenizer 'mine'"):
        train_bpe(["a"], 300, pre="mine")


@pytest.mark.parametrize("existing", ["file", "folder"])
def test_the_command_replaces_nothing(existing: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("abab abab ab xy")
    if existing == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "tokenizer.json").write_text("mine")
    with pytest.raises(DataError, match=r"out: exists already; choose another folder for the tokenizer"):
        train(text, out, 300)
    assert (out if existing == "file" else out / "tokenizer.json").read_text() == "mine"


def test_the_command_takes_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("abab abab ab xy")
    (tmp_path / "out").mkdir()
    train(tmp_path / "text.txt", tmp_path / "out", 258)
    assert "258 tokens" in capsys.readouterr().out
    assert read_folder(tmp_path / "out").vocab_size == 258


# With the control tokens of a kind of model


def test_frames_are_those_of_bert() -> None:
    tokenizer = train_bpe_for("frames", [ENGLISH], 300)
    roles, ids = tokenizer.specials, tokenizer.specials.controls
    assert (roles.cls, roles.sep, roles.mask, roles.pad) == tuple(
        ids[f"[{name}]"] for name in ("CLS", "SEP", "MASK", "PAD")
    )
    assert (roles.eos, roles.ends) == (None, frozenset())
    assert tokenizer.around == ([roles.cls], [roles.sep])
    assert tokenizer.vocab_size == 300


@pytest.mark.parametrize("purpose", ["pairs", "spans"])
def test_pairs_end_and_begin_as_t5_has_it(purpose: Literal["pairs", "spans"]) -> None:
    tokenizer = train_bpe_for(purpose, [ENGLISH], 400)
    roles, ids = tokenizer.specials, tokenizer.specials.controls
    assert (roles.eos, roles.pad, roles.starts) == (ids["</s>"], ids["<pad>"], (ids["<pad>"],))
    assert roles.ends == {roles.eos}
    assert tokenizer.around == ([], [roles.eos])
    assert len(Vocabulary.of(tokenizer).sentinels) == (100 if purpose == "spans" else 0)
    again = tokenizer_from(tokenizer.to_dict())
    assert again.to_dict() == tokenizer.to_dict()


def test_a_vocabulary_without_room_for_the_sentinels_is_refused() -> None:
    with pytest.raises(DataError, match=r"vocab_size is 300; the bytes and control tokens alone take 358"):
        train_bpe_for("spans", [ENGLISH], 300)
