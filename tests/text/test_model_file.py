"""Reading `.model` files, whole and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import CheckpointError
from qkv.text import model_file
from qkv.text.model_file import fields

from .files import SENTENCEPIECE

WHOLE = (SENTENCEPIECE / "bpe.model").read_bytes()


def varint(value: int) -> bytes:
    value %= 1 << 64
    low = bytes([value & 0x7F | (0x80 if value > 0x7F else 0)])
    return low if value <= 0x7F else low + varint(value >> 7)


def message(*given_fields: tuple[int, int | bytes]) -> bytes:
    out = b""
    for number, value in given_fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=300)), max_size=8))
def test_fields_are_read_as_they_were_written(given_fields: list[tuple[int, int | bytes]]) -> None:
    assert list(fields(message(*given_fields))) == given_fields


@given(st.integers(0, len(WHOLE) - 1))
def test_a_file_that_is_cut_off_is_refused_or_has_fewer_pieces(
    tmp_path_factory: pytest.TempPathFactory, at: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "cut.model"
    path.write_bytes(WHOLE[:at])
    try:
        size = model_file.read(path).vocab_size
    except CheckpointError as error:
        problem = str(error)
    else:
        problem = f"{path}: only {size} pieces"
        assert size < 600
    assert problem.startswith(str(path))
    assert "\n" not in problem


@given(st.binary(max_size=200))
def test_any_bytes_give_one_line_or_a_tokenizer(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "any.model"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"any\.model") as caught:
        model_file.read(path)
    assert "\n" not in str(caught.value)


def test_whether_bos_and_eos_are_added_can_be_said() -> None:
    path = SENTENCEPIECE / "bpe.model"
    assert model_file.read(path).around == ([1], [])
    assert model_file.read(path, add_bos=False, add_eos=True).around == ([], [2])
    assert model_file.read(SENTENCEPIECE / "unigram.model").around == ([], [1])


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (message((2, message((3, 3)))), "a word model"),
        (message((2, message((3, 4)))), "a char model"),
        (message((2, message((3, 2), (24, 1)))), "its spaces stand behind words"),
        (message((2, message((3, 2))), (3, message((5, 0)))), "spaces are not written"),
        (message((1, message((1, b"x"), (3, 9)))), "piece type 9"),
        (message((1, message((1, 7)))), "the number 7 where text or a message belongs"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, extra: bytes, problem: str) -> None:
    pieces = message((1, message((1, b"<unk>"), (3, 2))), (1, message((1, b"a"))))
    (tmp_path / "odd.model").write_bytes(pieces + extra)
    with pytest.raises(CheckpointError, match=f"odd.model: .*{problem}"):
        model_file.read(tmp_path / "odd.model")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.model: cannot be read"):
        model_file.read(tmp_path / "none.model")
