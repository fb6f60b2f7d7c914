"""SentencePiece's `.model` files: a protocol buffer with the pieces and the normalization.

    ModelProto      1 pieces (repeated)   2 trainer   3 normalizer
    piece           1 text   2 score   3 type (`sentencepiece.Kind`, NORMAL if absent)
    trainer         3 model type (1 unigram, 2 BPE)   40 to 43 ids of unk, bos, eos, pad (0, 1, 2, -1 if absent)
    normalizer      2 compiled map   3 space before a text   4 collapse spaces   5 spaces are ▁ (all true if absent)

A field is a varint (number << 3 | wire type) and its value: a varint, 8 bytes, a length and bytes, or 4 bytes.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from qkv.errors import CheckpointError
from qkv.text.pieces import Specials
from qkv.text.sentencepiece import Kind, Pieces, SentencePieceTokenizer

Value = int | bytes
_UNIGRAM, _BPE = 1, 2
_MODEL_TYPES = {3: "word", 4: "char"}


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message in order; raises ValueError if it is cut off or of an unknown kind."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire} at byte {at}")
        length, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        if at + length > len(data):
            raise ValueError(f"{length} bytes wanted at byte {at} of {len(data)}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 0x80:
            # Negative numbers are written as 64 bits in two's complement.
            return (value - (1 << 64) if value >> 63 else value), at
    raise ValueError(f"a number that does not end at byte {at}")


def read(path: Path, *, add_bos: bool | None = None, add_eos: bool | None = None) -> SentencePieceTokenizer:
    """The tokenizer of a file, which does not say whether BOS and EOS stand around a text.

    The habit is BOS for BPE (Llama) and EOS for unigram (T5).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return _read(data, str(path), add_bos, add_eos)
    except (ValueError, struct.error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a SentencePiece model ({error})") from None


def _read(data: bytes, where: str, add_bos: bool | None, add_eos: bool | None) -> SentencePieceTokenizer:
    top = list(fields(data))
    raw = [dict(fields(_bytes(value))) for number, value in top if number == 1]
    trainer, normalizer = (_message(top, number) for number in (2, 3))
    texts = [_bytes(piece.get(1, b"")).decode() for piece in raw]
    kinds = [_int(piece.get(3, Kind.NORMAL)) for piece in raw]
    if not texts or set(kinds) - set(Kind):
        raise ValueError("no pieces" if not texts else f"piece type {min(set(kinds) - set(Kind))}")
    is_bpe = trainer.get(3, _UNIGRAM) == _BPE
    pieces = Pieces(
        texts,
        [struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0] for piece in raw],
        kinds,
        add_space=bool(normalizer.get(3, 1)),
        collapse_spaces=bool(normalizer.get(4, 1)),
        charsmap=base64.b64encode(_bytes(normalizer.get(2, b""))).decode(),
        unigram=not is_bpe,
    )
    _refuse(trainer, normalizer, where)
    specials = _specials(pieces, trainer)
    bos = [specials.bos] if specials.bos is not None and (is_bpe if add_bos is None else add_bos) else []
    eos = [specials.eos] if specials.eos is not None and (not is_bpe if add_eos is None else add_eos) else []
    return SentencePieceTokenizer(pieces, specials, (bos, eos), where)


def _specials(pieces: Pieces, trainer: Mapping[int, Value]) -> Specials:
    controls = {text: token for token, text in pieces.of(Kind.CONTROL, Kind.UNKNOWN)}
    unk, bos, eos, pad = (_int(trainer.get(number, absent)) for number, absent in ((40, 0), (41, 1), (42, 2), (43, -1)))
    known = {role: token if 0 <= token < len(pieces.texts) and pieces.texts[token] in controls else None
             for role, token in {"unk": unk, "bos": bos, "eos": eos, "pad": pad}.items()}  # fmt: skip
    ends = frozenset() if known["eos"] is None else frozenset({known["eos"]})
    return Specials(controls, unk=known["unk"], bos=known["bos"], eos=known["eos"], pad=known["pad"], ends=ends)


def _refuse(trainer: Mapping[int, Value], normalizer: Mapping[int, Value], where: str) -> None:
    kind = _int(trainer.get(3, _UNIGRAM))
    if kind not in (_UNIGRAM, _BPE):
        raise CheckpointError(f"{where}: a {_MODEL_TYPES.get(kind, kind)} model; only BPE and unigram are understood")
    if not normalizer.get(5, 1):
        raise CheckpointError(f"{where}: spaces are not written ▁ in it; such models are not understood")
    if trainer.get(24, 0):
        raise CheckpointError(f"{where}: its spaces stand behind words; such models are not understood")


def _message(top: list[tuple[int, Value]], number: int) -> dict[int, Value]:
    return dict(fields(next((_bytes(value) for found, value in top if found == number), b"")))


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"the number {value} where text or a message belongs")
    return value


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("text or a message where a number belongs")
    return value
