"""From the pieces of a vocabulary to text, one piece at a time and never half a character.

A tokenizer hands over its pieces; a rule turns each into bytes, whatever comes later; `utf8` turns bytes into text and
holds a character back until its last byte is there. Text therefore streams with no delay beyond that, and the text of a
list of tokens is by definition the text of its stream.

    str       a piece of the vocabulary, in the vocabulary's own spelling: "Ġthe", "▁the", "##the"
    bytes     text that is meant literally: a token that was added to the vocabulary, or 0xFF for an unknown id
    RESTART   a control token stood here: text begins anew
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

RESTART: Final = None
Piece = str | bytes | None
Rule = Callable[[Iterable[Piece], bool], Iterator[bytes]]
"""The bytes of pieces; the second argument says that they continue an earlier text."""

SPACE = "\u2581"
"""What stands for a space in the vocabularies of SentencePiece."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# What WordPiece glues to the word before it.
_GLUED = frozenset({".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"})


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in the vocabularies of GPT-2 and its heirs.

    A byte that is printable in Latin-1 is itself; the others take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = byte_alphabet()


def byte_level(pieces: Iterable[Piece], continues: bool) -> Iterator[bytes]:
    """Each character of a piece is a byte."""
    for piece in pieces:
        if isinstance(piece, str):
            # A vocabulary may hold a word that is not written in the byte alphabet; it means itself.
            known = all(character in _BYTES for character in piece)
            yield bytes(_BYTES[character] for character in piece) if known else piece.encode()
        elif piece is not RESTART:
            yield piece


def spaced(*, leading: bool, restarts: bool = False, bytes_too: bool = True) -> Rule:
    """SentencePiece's rule: ▁ is a space, and <0x0A> is a byte if `bytes_too`.

    `leading`: encoding put a space in front, which is taken away again; with `restarts`, after each control token too.
    """

    def rule(pieces: Iterable[Piece], continues: bool) -> Iterator[bytes]:
        at_start = leading and not continues
        for piece in pieces:
            if piece is RESTART:
                at_start = at_start or (leading and restarts)
                continue
            raw = piece
            if isinstance(raw, str):
                byte = _BYTE.fullmatch(raw) if bytes_too else None
                raw = bytes([int(byte[1], 16)]) if byte else raw.replace(SPACE, " ").encode()
                raw = raw.removeprefix(b" ") if at_start else raw
            at_start = False
            yield raw

    return rule


def words(prefix: str, *, glue: bool) -> Rule:
    """WordPiece's rule: a space before each piece that does not begin with the prefix; `glue`: nor before ".,?!"."""

    def rule(pieces: Iterable[Piece], continues: bool) -> Iterator[bytes]:
        first = not continues
        for piece in pieces:
            if piece is RESTART:
                continue
            inner = isinstance(piece, str) and bool(prefix) and piece.startswith(prefix)
            text = piece.encode() if isinstance(piece, str) else piece
            if inner and not first:
                yield text[len(prefix.encode()) :]
            else:
                yield text if first or (glue and piece in _GLUED) else b" " + text
            first = False

    return rule


def word_ends(suffix: str) -> Rule:
    """The rule of GPT-1: the suffix ends a word, and a space follows it unless the text ends."""

    def rule(pieces: Iterable[Piece], continues: bool) -> Iterator[bytes]:
        owed = b""
        for piece in pieces:
            if piece is RESTART:
                continue
            ends = isinstance(piece, str) and piece.endswith(suffix)
            text = piece.removesuffix(suffix).encode() if isinstance(piece, str) else piece
            yield owed + text
            owed = b" " if ends else b""

    return rule


def utf8(chunks: Iterable[bytes]) -> Iterator[str]:
    """The text of bytes as they arrive; what is no UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for chunk in chunks:
        if text := decoder.decode(chunk):
            yield text
    if rest := decoder.decode(b"", final=True):
        yield rest
