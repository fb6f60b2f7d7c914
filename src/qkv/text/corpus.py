"""Texts to train on: a file of the user's, or the language reference that ships inside CPython."""

from __future__ import annotations

from pathlib import Path

from qkv.errors import DataError


def language_reference() -> str:
    """The Python language reference as `help()` shows it: about 370 KB of English prose, grammar and code.

    A fifth of its paragraphs repeat others word for word (`help("while")` is a part of `help("compound")`); each is
    kept once, or text that is held out would stand in the training text too.
    """
    from pydoc_data.topics import topics

    joined = "\n\n".join(topics[name] for name in sorted(topics))
    return "\n\n".join(dict.fromkeys(joined.split("\n\n")))


def read_text(path: Path) -> str:
    """A UTF-8 text file. Raises DataError if it is missing, no text, or empty."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of a text file") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: no UTF-8 text (byte {raw[error.start]:#04x} at {error.start}); convert it") from None
    if "\0" in text:
        raise DataError(f"{path}: binary, not text (byte 0x00 at {raw.index(0)}); give a text file")
    if not text.strip():
        raise DataError(f"{path}: empty; give a file with text")
    return text
