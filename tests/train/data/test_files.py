"""Reading files: encodings, archives, and what is wrong in them, by line."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest

from qkv.errors import DataError
from qkv.train.data.files import content_hash, read_lines, read_whole

from .toys import written

LINES = [(1, "one"), (2, ""), (3, "zwölf")]


@pytest.mark.parametrize("text", ["one\n\nzwölf\n", "one\n\nzwölf", "one\r\n\r\nzwölf\r\n", "\ufeffone\n\nzwölf\n"])
def test_lines_have_no_ends(tmp_path: Path, text: str) -> None:
    assert list(read_lines(written(tmp_path, "a.txt", text))) == LINES


def test_a_whole_text_is_as_it_is(tmp_path: Path) -> None:
    assert read_whole(written(tmp_path, "a.txt", "\ufeffone\r\n\n\u2028 x \n")) == "one\r\n\n\u2028 x \n"


def test_packed_files_are_read_as_plain_ones(tmp_path: Path) -> None:
    raw = "one\n\nzwölf\n".encode()
    packed = written(tmp_path, "a.txt.gz", gzip.compress(raw))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("deu.txt", raw)
        archive.writestr("_about.txt", "where it is from")
    for name in (packed, str(tmp_path / "a.zip"), str(tmp_path / "a.zip!deu.txt")):
        assert list(read_lines(name)) == LINES
    assert list(read_lines(str(tmp_path / "a.zip!_about.txt"))) == [(1, "where it is from")]


def test_a_name_may_hold_the_mark_of_members(tmp_path: Path) -> None:
    assert list(read_lines(written(tmp_path, "hey!you.txt", "x"))) == [(1, "x")]


def test_a_hash_is_of_the_content(tmp_path: Path) -> None:
    first, same, other = (written(tmp_path, name, text) for name, text in [("a", "x"), ("b", "x"), ("c", "y")])
    assert content_hash(first) == content_hash(same) != content_hash(other)


def corrupt(folder: Path) -> dict[str, tuple[str, str]]:
    """Each a file and what must be said of it."""
    whole = gzip.compress(b"text\n" * 1000)
    with zipfile.ZipFile(folder / "two.zip", "w") as archive:
        archive.writestr("a.txt", "x")
        archive.writestr("b.txt", "x")
    archive = (folder / "two.zip").read_bytes()
    return {
        "missing": (str(folder / "none.txt"), "No such file"),
        "folder": (str(folder), "cannot be read"),
        "empty": (written(folder, "empty.txt", ""), "empty"),
        "latin-1": (written(folder, "l.txt", b"ok\nok\nf\xfcnf\n"), r"line 3: no UTF-8 text \(byte 0xfc at 2 of"),
        "binary": (written(folder, "b.txt", b"ok\na\0b\n"), "line 2: binary"),
        "short gzip": (written(folder, "short.gz", whole[:-9]), "damaged"),
        "no gzip": (written(folder, "no.gz", b"text"), "damaged"),
        "bad gzip": (written(folder, "bad.gz", whole[:20] + b"\xff\xff\xff" + whole[23:]), "damaged"),
        "no zip": (written(folder, "no.zip", b"text"), "damaged"),
        "short zip": (written(folder, "short.zip", archive[: len(archive) // 2]), "damaged"),
        "which member": (
            str(folder / "two.zip"),
            "name one file of the archive as .*two.zip!FILE; it has a.txt, b.txt",
        ),
        "no such member": (str(folder / "two.zip!c.txt"), "no such file; it has a.txt, b.txt"),
        "member of no archive": (f"{folder / 'l.txt'}!c", "only a .zip archive has members"),
    }


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    for name, said in corrupt(tmp_path).values():
        with pytest.raises(DataError, match=said) as caught:
            list(read_lines(name))
        assert str(caught.value).startswith(name)
        assert "\n" not in str(caught.value)
