"""Texts to train on, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.errors import DataError
from qkv.text import language_reference, read_text


def test_the_language_reference_is_long_and_says_nothing_twice() -> None:
    text = language_reference()
    assert len(text.encode()) > 300_000
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert 'The "while" statement' in text


def test_a_file_is_read_as_utf_8_without_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbf" + "naïve\n".encode())
    assert read_text(path) == "naïve\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (b"abc\xff", "no UTF-8 text .byte 0xff at 3"),
        (b"abcd\x00e", "binary, not text .byte 0x00 at 4"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"given.txt: {problem}") as caught:
        read_text(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_text(tmp_path)
