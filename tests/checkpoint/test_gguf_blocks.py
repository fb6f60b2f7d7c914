"""GGUF's number formats against scalar code written from their definitions, number by number."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from qkv.checkpoint.gguf_blocks import _PIECE, BY_NAME, TYPES, WRITTEN, as_float, decode, encode, type_name
from qkv.errors import CheckpointError

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
Numbers = list[float]


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibbles(block: bytes, at: int) -> list[int]:
    """32 numbers of 4 bits: byte j has number j below and number j + 16 above."""
    return [block[at + j] & 15 for j in range(16)] + [block[at + j] >> 4 for j in range(16)]


def fifths(block: bytes, at: int, bits: int) -> list[int]:
    """32 numbers of 5 bits: the fifth of each is a bit of a 32-bit word."""
    (word,) = struct.unpack_from("<I", block, bits)
    return [low + 16 * ((word >> j) & 1) for j, low in enumerate(nibbles(block, at))]


def q4_0(b: bytes) -> Numbers:
    return [half(b, 0) * (q - 8) for q in nibbles(b, 2)]


def q4_1(b: bytes) -> Numbers:
    return [half(b, 0) * q + half(b, 2) for q in nibbles(b, 4)]


def q5_0(b: bytes) -> Numbers:
    return [half(b, 0) * (q - 16) for q in fifths(b, 6, 2)]


def q5_1(b: bytes) -> Numbers:
    return [half(b, 0) * q + half(b, 2) for q in fifths(b, 8, 4)]


def q8_0(b: bytes) -> Numbers:
    return [half(b, 0) * signed(q) for q in b[2:34]]


def iq4_nl(b: bytes) -> Numbers:
    return [half(b, 0) * IQ4_VALUES[q] for q in nibbles(b, 2)]


def two_bits(b: bytes, at: int, number: int) -> int:
    """Number 0 to 255 of a K block's 2-bit field: 32 bytes hold 128 numbers, 32 of them at each shift."""
    half_block, inside = divmod(number, 128)
    shift, byte = divmod(inside, 32)
    return (b[at + 32 * half_block + byte] >> (2 * shift)) & 3


def q2_k(b: bytes) -> Numbers:
    scales, d, least = b[:16], half(b, 80), half(b, 82)
    return [
        d * (scales[n // 16] & 15) * two_bits(b, 16, n) - least * (scales[n // 16] >> 4) for n in range(256)
    ]  # fmt: skip


def q3_k(b: bytes) -> Numbers:
    packed, d, out = b[96:108], half(b, 108), []
    for n in range(256):
        group = n // 16
        low = (packed[group % 8] >> (4 * (group // 8))) & 15
        high = (packed[8 + group % 4] >> (2 * (group // 4))) & 3
        third_bit = (b[n % 32] >> (n // 32)) & 1
        out.append(d * (low + 16 * high - 32) * (two_bits(b, 32, n) - (0 if third_bit else 4)))
    return out


def scale_and_least(packed: bytes, group: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of one of eight groups, from 12 bytes."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low, scale_top, least_top = packed[group + 4], packed[group - 4] >> 6, packed[group] >> 6
    return (low & 15) + 16 * scale_top, (low >> 4) + 16 * least_top


def q4_or_q5_k(b: bytes, at: int, fifth: Callable[[int], int]) -> Numbers:
    d, least, out = half(b, 0), half(b, 2), []
    for n in range(256):
        scale, minimum = scale_and_least(b[4:16], n // 32)
        byte = b[at + 32 * (n // 64) + n % 32]
        q = (byte >> 4 if (n // 32) % 2 else byte & 15) + 16 * fifth(n)
        out.append(d * scale * q - least * minimum)
    return out


def q4_k(b: bytes) -> Numbers:
    return q4_or_q5_k(b, 16, lambda n: 0)


def q5_k(b: bytes) -> Numbers:
    return q4_or_q5_k(b, 48, lambda n: (b[16 + n % 32] >> (n // 32)) & 1)


def q6_k(b: bytes) -> Numbers:
    d, out = half(b, 208), []
    for n in range(256):
        half_block, inside = divmod(n, 128)
        quarter, lane = divmod(inside, 32)
        byte = b[64 * half_block + 32 * (quarter % 2) + lane]
        low = byte >> 4 if quarter >= 2 else byte & 15
        high = (b[128 + 32 * half_block + lane] >> (2 * quarter)) & 3
        out.append(d * signed(b[192 + n // 16]) * (low + 16 * high - 32))
    return out


SCALARS: dict[str, tuple[Callable[[bytes], Numbers], tuple[int, ...]]] = {
    "Q4_0": (q4_0, (0,)), "Q4_1": (q4_1, (0, 2)), "Q5_0": (q5_0, (0,)), "Q5_1": (q5_1, (0, 2)), "Q8_0": (q8_0, (0,)),
    "Q2_K": (q2_k, (80, 82)), "Q3_K": (q3_k, (108,)), "Q4_K": (q4_k, (0, 2)), "Q5_K": (q5_k, (0, 2)),
    "Q6_K": (q6_k, (208,)), "IQ4_NL": (iq4_nl, (0,)),
}  # fmt: skip
"""What one block means, and where its float16 numbers stand."""


def random_blocks(name: str, count: int) -> np.ndarray:
    """Blocks of every bit pattern, with finite scales."""
    generator = np.random.default_rng(7)
    raw = generator.integers(0, 256, (count, BY_NAME[name].size), np.uint8)
    for at in SCALARS[name][1]:
        raw[:, at : at + 2] = generator.normal(0, 0.1, (count, 1)).astype(np.float16).view(np.uint8)
    return raw


@pytest.mark.parametrize("name", SCALARS)
def test_blocks_mean_what_their_definition_says(name: str) -> None:
    raw, kind = random_blocks(name, 6), BY_NAME[name]
    found = decode(raw.reshape(-1), kind, (2, 3 * kind.elements))
    expected = np.array([SCALARS[name][0](bytes(block)) for block in raw]).reshape(found.shape)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() <= 2**-23 * np.abs(expected).max()


@pytest.mark.parametrize("name", SCALARS)
def test_long_tensors_are_turned_in_pieces(name: str) -> None:
    kind = BY_NAME[name]
    count = 2 * _PIECE // kind.elements + 3
    raw = random_blocks(name, count)
    whole = decode(raw.reshape(-1), kind, (count, kind.elements))
    for row in (0, _PIECE // kind.elements - 1, _PIECE // kind.elements, count - 1):
        assert np.array_equal(whole[row], decode(raw[row], kind, (kind.elements,)))


def test_every_type_is_tested() -> None:
    assert set(BY_NAME) == set(SCALARS) | {"F32", "F16", "BF16"}


def test_sizes_are_those_of_the_library() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, kind in TYPES.items():
        known = GGMLQuantizationType(number)
        assert (known.name, *GGML_QUANT_SIZES[known]) == (kind.name, kind.elements, kind.size)
    assert type_name(16) == "IQ2_XXS"
    assert type_name(999) == "number 999"


def test_plain_numbers_are_views() -> None:
    numbers = np.array([[1.5, -2.0], [0.1, 3e-5]], np.float32)
    raw = numbers.reshape(-1).view(np.uint8)
    assert np.shares_memory(decode(raw, BY_NAME["F32"], (2, 2)), numbers)
    brains = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    found = decode(brains.reshape(-1).view(np.uint8), BY_NAME["BF16"], (2, 2))
    assert np.array_equal(found, brains)
    assert np.array_equal(as_float(found), (brains.astype(np.uint32) << 16).view(np.float32))


def test_q8_0_rounds_to_the_nearest_of_127_steps() -> None:
    numbers = np.random.default_rng(1).normal(0, 1, (5, 64)).astype(np.float32)
    raw = encode("x", numbers, BY_NAME["Q8_0"]).reshape(-1, 34)
    for block, values in zip(raw, numbers.reshape(-1, 32), strict=True):
        step = float(np.abs(values).max()) / 127
        assert half(bytes(block), 0) == np.float16(step)
        assert [signed(int(q)) for q in block[2:]] == [round(float(value) / step) for value in values]


def test_q4_0_gives_its_extreme_number_exactly() -> None:
    numbers = np.random.default_rng(2).normal(0, 1, (5, 64)).astype(np.float16).astype(np.float32)
    raw = encode("x", numbers, BY_NAME["Q4_0"])
    found = decode(raw, BY_NAME["Q4_0"], numbers.shape).reshape(-1, 32)
    for values, again in zip(numbers.reshape(-1, 32), found, strict=True):
        extreme = np.abs(values).argmax()
        step = abs(values[extreme]) / 8
        assert again[extreme] == pytest.approx(values[extreme], rel=2**-11)
        # One side of the range has seven steps, the other eight.
        assert np.abs(values - again).max() <= step * 1.01


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_again(name: str) -> None:
    kind = BY_NAME[name]
    numbers = np.random.default_rng(3).normal(0, 1, (3, 3 * _PIECE // 2)).astype(np.float32)
    again = as_float(decode(encode("x", numbers, kind), kind, numbers.shape))
    bound = {"F32": 0, "F16": 2**-11, "Q8_0": 1 / 250, "Q4_0": 1 / 7}[name]
    assert np.abs(again - numbers).max() <= bound * np.abs(numbers).max()
    second = encode("x", again, kind)
    assert np.array_equal(as_float(decode(second, kind, numbers.shape)), again), "writing again loses nothing more"


def test_zeros_and_the_smallest_block_stay_finite() -> None:
    for name in WRITTEN:
        assert not decode(encode("x", np.zeros((1, 32), np.float32), BY_NAME[name]), BY_NAME[name], (1, 32)).any()


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e8])
def test_what_a_type_cannot_hold_is_refused(name: str, value: float) -> None:
    numbers = np.ones((1, 32), np.float32)
    numbers[0, 5] = value
    with pytest.raises(CheckpointError, match=rf"blk\.0\.attn_q.*{name} cannot store; write F32"):
        encode("blk.0.attn_q", numbers, BY_NAME[name])


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_a_row_that_is_not_whole_blocks_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"rows of 100 numbers are not whole blocks of .* \\({name}\\)"):
        BY_NAME[name].row_bytes(100)
