"""A SentencePiece vocabulary as a `.model` file: the inverse of `model_file`, which describes the format.

So a vocabulary that came in a GGUF file gets into a Hugging Face folder, as the `tokenizer.model` that such models are
published with.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

from qkv.text.sentencepiece import Kind, SentencePieceTokenizer

_VARINT, _BYTES, _FLOAT = 0, 2, 5
_UNIGRAM, _BPE = 1, 2


def to_model(tokenizer: SentencePieceTokenizer) -> bytes | None:
    """The bytes of the file; None where the format has no word for how spaces are put."""
    pieces, specials = tokenizer.pieces, tokenizer.specials
    if pieces.add_space and not (pieces.space_after_control and (pieces.space_before_space or pieces.collapse_spaces)):
        return None
    trainer = [(3, _UNIGRAM if pieces.unigram else _BPE), (35, int(Kind.BYTE in pieces.kinds))]
    roles = ((40, specials.unk), (41, specials.bos), (42, specials.eos), (43, specials.pad))
    trainer += [(number, -1 if token is None else token) for number, token in roles]
    normalizer = b"".join(
        [
            _field(1, b"qkv"),
            _field(2, base64.b64decode(pieces.charsmap)),
            _field(3, int(pieces.add_space)),
            _field(4, int(pieces.collapse_spaces)),
            _field(5, 1),
        ]
    )
    message = b"".join(_field(number, value) for number, value in trainer)
    return b"".join([*_pieces(tokenizer), _field(2, message), _field(3, normalizer)])


def _pieces(tokenizer: SentencePieceTokenizer) -> Iterator[bytes]:
    pieces = tokenizer.pieces
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True):
        yield _field(1, _field(1, text.encode()) + _field(2, float(score)) + _field(3, int(kind)))


def _field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return _varint(number << 3 | _BYTES) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | _FLOAT) + struct.pack("<f", value)
    return _varint(number << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; a negative number as 64 bits in two's complement."""
    left = value & (1 << 64) - 1
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])
