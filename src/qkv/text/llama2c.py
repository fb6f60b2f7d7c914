"""The vocabularies of llama2.c: `tokenizer.bin`, `tok512.bin`.

    int32                      length of the longest piece, in bytes
    float32, int32, bytes      score, length and text of each piece, until the file ends

Little-endian. A space is a space; piece 0 is unknown, 1 begins and 2 ends a text, 3 to 258 are the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from qkv.errors import CheckpointError
from qkv.text.decoding import SPACE
from qkv.text.pieces import Specials
from qkv.text.sentencepiece import Kind, Pieces, SentencePieceTokenizer

_HEADER, _ENTRY = struct.Struct("<i"), struct.Struct("<fi")
_CONTROLS = {"<unk>": 0, "<s>": 1, "</s>": 2}
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def read(path: Path) -> SentencePieceTokenizer:
    """The tokenizer of a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    entries = list(_entries(data, path))
    scores, texts = [score for score, _ in entries], [text for _, text in entries]
    if texts[3:259] != _BYTES or texts[0] != "<unk>" or [text.strip() for text in texts[1:3]] != ["<s>", "</s>"]:
        raise CheckpointError(
            f"{path}: not a vocabulary of llama2.c (it begins with <unk>, <s>, </s> and the 256 bytes)"
        )
    texts = [*_CONTROLS, *(text.replace(" ", SPACE) for text in texts[3:])]
    kinds = [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL, *[Kind.BYTE] * 256]
    pieces = Pieces(texts, scores, kinds + [Kind.NORMAL] * (len(texts) - len(kinds)))
    specials = Specials(_CONTROLS, bos=1, eos=2, unk=0, ends=frozenset({1, 2}))
    return SentencePieceTokenizer(pieces, specials, ([1], []), str(path))


def _entries(data: bytes, path: Path) -> Iterator[tuple[float, str]]:
    at = _HEADER.size
    while at < len(data):
        if at + _ENTRY.size > len(data):
            raise CheckpointError(f"{path}: cut off at byte {at}")
        score, length = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        if not 0 <= length <= len(data) - at:
            raise CheckpointError(f"{path}: a piece of {length} bytes at byte {at} of {len(data)}")
        try:
            yield score, data[at : at + length].decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: the piece at byte {at} is no UTF-8 text") from None
        at += length
