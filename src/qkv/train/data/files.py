"""Files that hold texts, line by line: plain, compressed (.gz), or a member of a .zip archive.

A name is a path; `archive.zip!member.txt` names one file of an archive, and may leave the member out if only one file
of the archive does not begin with an underscore or a dot (these describe the others). Lines end with \\n or \\r\\n; a
byte order mark at the beginning is no text. Every problem names the file and the line.
"""

from __future__ import annotations

import gzip
import hashlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qkv.errors import DataError

MEMBER = "!"
_BLOCK = 1 << 20
_DAMAGED = (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
"""What the libraries raise for a file that is cut short, of another kind, encrypted, or packed in a way unknown."""


def read_lines(name: str) -> Iterator[tuple[int, str]]:
    """The lines of a file without their ends, and their numbers, from 1."""
    for number, line in _decoded(name):
        yield number, line.removesuffix("\n").removesuffix("\r")


def read_whole(name: str) -> str:
    """The text of a file, as it is."""
    return "".join(line for _, line in _decoded(name))


def _decoded(name: str) -> Iterator[tuple[int, str]]:
    number = 0
    with _opened(name) as file:
        for raw in file:
            number += 1
            if b"\0" in raw:
                raise DataError(f"{name}: line {number}: binary, not text (byte 0x00); give a text file")
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                place = f"byte {raw[error.start]:#04x} at {error.start + 1} of the line"
                raise DataError(f"{name}: line {number}: no UTF-8 text ({place}); convert it") from None
            yield number, line
    if number == 0:
        raise DataError(f"{name}: empty; give a file with text")


def content_hash(name: str) -> str:
    """SHA-256 of a file's bytes as they are stored; of an archive, with the member's name."""
    path, member = split_name(name)
    digest = hashlib.sha256(member.encode())
    with _readable(name), path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def split_name(name: str) -> tuple[Path, str]:
    """The file, and the member of the archive ("" if none is named)."""
    path, _, member = name.partition(MEMBER)
    # A file may have the character in its own name.
    return (Path(name), "") if Path(name).is_file() else (Path(path), member)


@contextmanager
def _opened(name: str) -> Iterator[Iterable[bytes]]:
    """A file's bytes, unpacked."""
    path, member = split_name(name)
    with _readable(name):
        if member and path.suffix != ".zip":
            raise DataError(f"{name}: only a .zip archive has members; give {path}")
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive, archive.open(_member(archive, name, member)) as file:
                yield file
        elif path.suffix == ".gz":
            with gzip.open(path) as unpacked:
                yield unpacked
        else:
            with path.open("rb") as file:
                yield file


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{name}: damaged or no archive of its kind ({said}); get it again") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror}); give the path of a file") from None


def _member(archive: zipfile.ZipFile, name: str, member: str) -> str:
    files = [one.filename for one in archive.infolist() if not one.is_dir()]
    if member:
        if member not in files:
            raise DataError(f"{name}: the archive has no such file; it has {', '.join(files[:8])}")
        return member
    texts = [one for one in files if not one.rsplit("/", 1)[-1].startswith(("_", "."))]
    if len(texts) != 1:
        given = f"it has {', '.join(files[:8])}" if files else "it is empty"
        raise DataError(f"{name}: name one file of the archive as {name}{MEMBER}FILE; {given}")
    return texts[0]
