"""Packed matrices stand for what they say, at sizes that fill no block and no group."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from qkv.engine.packing import FORMATS, GROUP, Format, pack, packed_bytes, unpack

SIZES = [(1, 1), (16, 32), (17, 33), (5, 100), (40, 64)]

sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")


def random(size: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@sizes
@pytest.mark.parametrize("form", FORMATS)
def test_the_size_is_what_the_format_says(form: Format, size: tuple[int, int]) -> None:
    packed = pack(random(size), form)
    assert packed.dtype == np.uint8
    assert packed.shape == (packed_bytes(*size, form),)
    assert unpack(packed, *size, form).shape == size


@sizes
def test_floats_come_back(size: tuple[int, int]) -> None:
    weight = random(size)
    assert np.array_equal(unpack(pack(weight, "fp32"), *size, "fp32"), weight)
    short = (weight.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(unpack(pack(short, "bf16"), *size, "bf16"), short)
    assert np.abs(unpack(pack(weight, "bf16"), *size, "bf16") / weight - 1).max() <= 2**-8


@sizes
@pytest.mark.parametrize(("form", "steps"), [("int8", 254), ("int4", 15)])
def test_codes_are_off_by_half_a_step_at_most(form: Format, steps: int, size: tuple[int, int]) -> None:
    weight = random(size, 1)
    found = unpack(pack(weight, form), *size, form)
    for row, (given, got) in enumerate(zip(weight, found, strict=True)):
        for start in range(0, size[1], GROUP):
            group, there = given[start : start + GROUP], got[start : start + GROUP]
            padded = np.append(group, 0) if size[1] % GROUP else group  # what fills the group counts in its range
            span = 2 * np.abs(group).max() if form == "int8" else padded.max() - padded.min()
            # Half a step; the scale's own rounding, up to 2^-11 of it, moves the last code by steps * 2^-11 of a
            # step at most; the minimum's moves all of them by 2^-11 of its size.
            bound = span / steps * (0.5 + steps * 2**-11) + np.abs(group).max() * 2**-11
            assert np.abs(there - group).max() <= bound, (row, start)


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_stays_nothing(form: Format) -> None:
    assert not unpack(pack(np.zeros((3, 40), np.float32), form), 3, 40, form).any()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_what_was_packed_is_packed_alike_again(form: Format) -> None:
    once = unpack(pack(random((7, 64), 2), form), 7, 64, form)
    assert np.allclose(unpack(pack(once, form), 7, 64, form), once, atol=2e-3)


@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "int8"), ("Q4_1", "int4")])
def test_blocks_of_gguf_are_executed_as_they_are_shipped(kind: str, form: Format) -> None:
    """Dequantised and packed again, they give the same scales and codes: each block uses its whole range."""
    made = gguf.quantize(random((48, 256), 3), gguf.GGMLQuantizationType[kind])
    weight = gguf.dequantize(made, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    assert np.array_equal(unpack(pack(weight, form), 48, 256, form), weight)
