"""Codecs: bytes and codes by hand, what rounding may cost, and one result from NumPy, torch and the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from qkv.cache.codec import DTYPES, LARGEST, Codec, Int4, Int8, Raw, codec
from qkv.cache.spec import vector_bytes
from qkv.errors import CacheError
from qkv.nn import codec as twin
from qkv.reference.codec import through

WIDTHS = (1, 2, 5, 31, 32, 33, 48, 64, 65, 100)
TORCH = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LOSSY = (Int8(), Int4())
EXTREMES = (
    0.0, -0.0, 1.0, -1.0, 127.0, -8.0, 6.0e-8, 2.9e-8, -1e-7, 3.8e-6, 1e-45, 1e-30, 65504.0, -65520.0, 5.3e5, -8.4e6,
    1e30, -3e38, np.inf, -np.inf, np.nan,
)  # fmt: skip
"""Around the smallest and the largest scale of both codecs, and what is no finite number."""

every_width = pytest.mark.parametrize("width", WIDTHS)
every_dtype = pytest.mark.parametrize("name", TORCH)
every_lossy = pytest.mark.parametrize("lossy", LOSSY, ids=lambda one: one.name)


def all_codecs(name: str) -> tuple[Codec, ...]:
    return Raw(name), *LOSSY


def in_dtype(x: np.ndarray, name: str) -> tuple[np.ndarray, torch.Tensor]:
    """The same numbers for NumPy and for torch: torch rounds, NumPy looks at its memory."""
    tensor = torch.from_numpy(np.array(x, dtype=np.float64)).to(TORCH[name])
    held = tensor.view(torch.uint16) if name == "bfloat16" else tensor
    return held.numpy().copy(), tensor


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def wide(array: np.ndarray) -> np.ndarray:
    """In float64."""
    return Raw("float64").encode(array)["values"]


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Numbers of very different sizes from vector to vector."""
    rng = np.random.default_rng(seed)
    return scale * rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape[:-1]))[..., None]


def steady(n: int, width: int) -> np.ndarray:
    """As `noise`, but the first number of each group is at least 1, so that no scale is a subnormal float16."""
    x = noise(n, width, seed=width)
    x[:, ::32] = np.copysign(1 + np.abs(x[:, ::32]), x[:, ::32])
    return x


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the bit; NaN wherever the other is NaN."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    undefined = np.isnan(wide(expected))
    assert np.array_equal(np.isnan(wide(found)), undefined)
    assert np.array_equal(bits(found[~undefined]), bits(expected[~undefined]))


def assert_twins_agree(x: np.ndarray, name: str) -> None:
    """Encoded and decoded alike by NumPy and torch, in every codec and into every dtype."""
    held, tensor = in_dtype(x, name)
    for one in all_codecs(name):
        expected, found = one.encode(held), twin.encode(one, tensor)
        assert expected.keys() == found.keys()
        for part, array in expected.items():
            if part == "values":
                assert_same(as_numpy(found[part]), array)
            else:
                assert as_numpy(found[part]).dtype == array.dtype
                assert np.array_equal(bits(as_numpy(found[part])), bits(array)), part
        for target, dtype in TORCH.items():
            back = one.decode(expected, x.shape[-1], DTYPES[target])
            assert_same(as_numpy(twin.decode(one, found, x.shape[-1], dtype)), back)


# By hand


def test_int8_by_hand():
    """The largest is 254, so d = 2: half steps go to the even neighbour."""
    x = np.array([254.0, -254.0, 1.0, 3.0, 5.0, -1.0, 0.0, 4.2], dtype=np.float32)
    parts = Int8().encode(x)
    assert parts["scales"].tolist() == [2.0]
    assert parts["codes"].tolist() == [127, -127, 0, 2, 2, 0, 0, 2]
    assert Int8().decode(parts, 8, np.float32).tolist() == [254.0, -254.0, 0.0, 4.0, 4.0, 0.0, 0.0, 4.0]


def test_int4_by_hand():
    """The largest is +4, so d = -0.5: 4 is code 0, zero is 8, and -4 would be 16, of which 15 is left."""
    x = np.array([4.0, 0.0, -4.0, 1.0, -0.25], dtype=np.float32)
    parts = Int4().encode(x)
    assert parts["scales"].tolist() == [-0.5]
    assert parts["codes"].tolist() == [0 | 8 << 4, 15 | 6 << 4, 8]
    assert Int4().decode(parts, 5, np.float32).tolist() == [4.0, 0.0, -3.5, 1.0, 0.0]
    assert Int4().encode(-x)["scales"].tolist() == [-0.5]  # at a tie the positive one
    assert Int4().encode(-x[:2])["scales"].tolist() == [0.5]


def test_codes_are_made_with_the_rounded_scale():
    """amax = 1: d = 1/127 = 0.0078740, as float16 0.0078735; the code of 0.5 is 63.504 with it, 63.5 without."""
    parts = Int8().encode(np.array([1.0, 0.5], dtype=np.float64))
    assert parts["scales"][0] == np.float16(0.0078735)
    assert parts["codes"].tolist() == [127, 64]
    x = 64.5 * float(parts["scales"][0])  # a tie of the rounded scale only: to even
    assert Int8().encode(np.array([1.0, x]))["codes"].tolist() == [127, 64]


def test_float64_reaches_float16_through_float32():
    """8 (1 + 2^-11 + 2^-40) lies just above the middle of two float16, and float32 sees the middle: to even."""
    x = np.array([8 * (1 + 2.0**-11 + 2.0**-40)])
    assert x.astype(np.float16)[0] > 8.0
    assert Int4().encode(x)["scales"].tolist() == [-1.0]
    assert twin.encode(Int4(), torch.from_numpy(x))["scales"].tolist() == [-1.0]
    assert through("int4", x).tolist() == [8.0]


def test_each_group_has_its_own_scale():
    x = np.ones((2, 70), dtype=np.float32)
    x[0, 32:64], x[0, 64:], x[1] = 16.0, 4.0, 2.0
    assert Int4().encode(x)["scales"].tolist() == [[-0.125, -2.0, -0.5], [-0.25] * 3]
    assert np.array_equal(Int4().decode(Int4().encode(x), 70, np.float32), x)


@every_width
def test_the_parts_are_as_declared(width: int):
    for name, dtype in DTYPES.items():
        x = in_dtype(noise(2, 3, width), name)[0]
        for one in all_codecs(name):
            parts = one.encode(x)
            assert {part: (a.shape[-1], a.dtype) for part, a in parts.items()} == one.arrays(width)
            assert all(a.shape[:-1] == (2, 3) for a in parts.values())
            assert one.nbytes(width) * 6 == sum(a.nbytes for a in parts.values())
            assert one.nbytes(width) == vector_bytes(one.name, width, dtype.itemsize)


def test_bytes_by_hand():
    """128 numbers: 4 groups, so 128 + 8 and 64 + 8 bytes; 33 numbers: 2 groups, so 33 + 4 and 17 + 4."""
    assert [one.nbytes(128) for one in (Raw("bfloat16"), Raw("float32"), *LOSSY)] == [256, 512, 136, 72]
    assert [one.nbytes(33) for one in (Raw("bfloat16"), *LOSSY)] == [66, 37, 21]
    assert [one.nbytes(1) for one in LOSSY] == [3, 3]


def test_codecs_are_chosen_by_name():
    assert codec("raw", np.uint16) == codec("raw", "bfloat16") == Raw("bfloat16")
    assert codec("raw", np.float32) == Raw("float32")
    assert (codec("int8", np.float32), codec("int4", "float64")) == LOSSY
    with pytest.raises(CacheError, match="codec: unknown 'int5'; choose one of raw, int8, int4"):
        codec("int5", np.float32)
    with pytest.raises(CacheError, match="dtype: a cache cannot hold int32; choose one of float64, "):
        codec("raw", np.int32)


# What rounding may cost


@every_lossy
@every_width
def test_no_other_code_would_be_nearer(lossy: Codec, width: int):
    x = noise(200, width, seed=width)
    parts = lossy.encode(x)
    error = np.abs(x - lossy.decode(parts, width, np.float64))
    d = np.repeat(parts["scales"].astype(np.float64), 32, axis=-1)[:, :width, None]
    codes = np.arange(-127, 128) if lossy.name == "int8" else np.arange(-8, 8)
    assert (error <= np.abs(x[..., None] - d * codes).min(-1) * (1 + 2.0**-40)).all()


@every_lossy
@every_width
def test_the_error_is_at_most_half_a_step(lossy: Codec, width: int):
    """|x - d c| <= |d|/2 where the nearest integer to x/d is a code.

    d is float16: relative error 2^-11 at most. So amax/d <= 127 (1 + 2^-11) < 127.5 rounds to 127, and the largest of
    int4 is met by -8. Only int4 lacks +8: a number between 7.5 and 8 d (1 + 2^-11) loses up to d (1 + 2^-8).
    """
    x = steady(400, width)
    parts = lossy.encode(x)
    error = np.abs(x - lossy.decode(parts, width, np.float64))
    d = np.repeat(parts["scales"].astype(np.float64), 32, axis=-1)[:, :width]
    beyond = (x / d > 7.5) if lossy.name == "int4" else np.zeros(x.shape, dtype=bool)
    assert beyond.any() == (lossy.name == "int4" and width > 1)
    assert (error <= np.where(beyond, 1 + 2.0**-8, 0.5 + 2.0**-40) * np.abs(d)).all()
    assert (error > 0.45 * np.abs(d)).any() == (width > 1), "the bound is not idle"


@every_lossy
@every_width
def test_the_largest_number_is_met(lossy: Codec, width: int):
    """The last code times d is amax (1 + e), |e| <= 2^-11, as d is."""
    x = steady(400, min(width, 32))
    y = lossy.decode(lossy.encode(x), x.shape[-1], np.float64)
    at = np.arange(400), np.abs(x).argmax(-1)
    assert (np.abs(x[at] - y[at]) <= np.abs(x[at]) * (2.0**-11 + 2.0**-24)).all()


@every_lossy
@every_width
def test_storing_again_changes_nothing(lossy: Codec, width: int):
    """The decoded largest number is exactly 127 d, or -8 d: the same scale, and codes are exact. So in float32."""
    x = steady(200, width).astype(np.float32)
    first = lossy.encode(x)
    second = lossy.encode(lossy.decode(first, width, np.float32))
    assert all(np.array_equal(bits(first[part]), bits(second[part])) for part in first)


@every_dtype
def test_raw_gives_back_every_bit(name: str):
    x = np.concatenate([noise(20), EXTREMES])
    held, tensor = in_dtype(x, name)
    one = Raw(name)
    assert np.array_equal(bits(one.decode(one.encode(held), len(x), held.dtype)), bits(held))
    back = twin.decode(one, twin.encode(one, tensor), len(x), tensor.dtype)
    assert back.data_ptr() == tensor.data_ptr(), "nothing is copied"


# Extremes


@every_lossy
def test_a_group_of_zeros_stays_zero(lossy: Codec):
    for zeros in (np.zeros((3, 40)), np.full((3, 40), -0.0), np.array([0.0, -0.0, 0.0]), np.array([-0.0, 0.0])):
        assert (lossy.decode(lossy.encode(zeros), zeros.shape[-1], np.float64) == 0).all()
        assert_twins_agree(zeros, "float32")


@every_lossy
def test_a_scale_too_small_for_float16_gives_zeros(lossy: Codec):
    """Half the smallest float16 is 2^-25, and goes to even, which is 0."""
    steps = 127 if lossy.name == "int8" else 8
    for x, expected in ((steps * 2.0**-25, 0.0), (steps * 2.0**-24, steps * 2.0**-24), (1e-300, 0.0)):
        assert lossy.decode(lossy.encode(np.array([x, 0.0])), 2, np.float64).tolist() == [expected, 0.0]


@every_lossy
def test_a_scale_too_large_for_float16_is_the_largest(lossy: Codec):
    most = LARGEST * (127 if lossy.name == "int8" else 8)
    for x in (1e7, 1e300, np.inf):
        y = lossy.decode(lossy.encode(np.array([x, 100.0])), 2, np.float64)
        assert y.tolist() == [most, 0.0]
        assert lossy.decode(lossy.encode(np.array([x, 100.0])), 2, np.float16).tolist() == [LARGEST, 0.0]
        assert lossy.decode(lossy.encode(-np.array([x, 100.0])), 2, np.float64).tolist() == [-most, 0.0]


@every_lossy
def test_nan_makes_its_group_nan_and_no_other(lossy: Codec):
    x = noise(3, 80)
    for bad in (np.nan, -np.nan):
        broken = x.copy()
        broken[1, 40] = bad
        broken[1, 41] = np.inf
        y = lossy.decode(lossy.encode(broken), 80, np.float64)
        whole = lossy.decode(lossy.encode(x), 80, np.float64)
        assert np.isnan(y[1, 32:64]).all()
        y[1, 32:64] = whole[1, 32:64]
        assert np.array_equal(y, whole)


@every_lossy
@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
def test_nan_is_nan_whatever_its_bits(lossy: Codec, pattern: int):
    """Rounded as a number, the first would become infinity and the second zero; all are stored as one NaN."""
    x = np.ones(40, dtype=np.float32)
    x.view(np.uint32)[3] = pattern
    parts, found = lossy.encode(x), twin.encode(lossy, torch.from_numpy(x))
    assert parts["scales"].view(np.uint16)[0] == 0x7E00
    assert all(np.array_equal(bits(array), bits(found[part].numpy())) for part, array in parts.items())


def test_rounding_by_hand_gives_the_float16_of_every_float32():
    """Any bits at all, and all that lie at or beside the middle of two float16."""
    rng = np.random.default_rng(0)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = ((halves[1:] + halves[:-1]) / 2).astype(np.float32).view(np.uint32)[:, None] + np.array([-1, 0, 1])
    x = np.concatenate([rng.integers(0, 2**32, 100_000), middles.ravel(), [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001]])
    x = x.astype(np.uint32).view(np.float32)
    for signed in (x, -x):
        expected = np.clip(signed, -LARGEST, LARGEST).astype(np.float16)
        found = twin.as_float16(torch.from_numpy(signed))
        assert_same(found.numpy(), expected.astype(np.float32))
        assert_same(found.half().numpy(), expected)


def test_float16_at_its_end_stays_finite():
    """65504 / 127 = 515.78 becomes 516 in float16, and 127 * 516 = 65532 is no float16 any more."""
    x = np.array([LARGEST, 1.0], dtype=np.float16)
    assert Int8().decode(Int8().encode(x), 2, np.float32).tolist() == [65532.0, 0.0]
    assert Int8().decode(Int8().encode(x), 2, np.float16).tolist() == [LARGEST, 0.0]


# One result


@every_width
@every_dtype
def test_numpy_and_torch_agree_to_the_bit(width: int, name: str):
    rng = np.random.default_rng(width)
    x = noise(300, width, seed=width)
    x[100:200] = rng.choice([*EXTREMES, *x[0]], (100, width))
    x[200:250] = rng.integers(-254, 254, (50, width)) / 2  # ties
    x[250:] = 127 * rng.integers(2048, 4096, (50, width)) * 2.0 ** rng.integers(-20, 9, (50, 1))  # ties of the scale
    assert_twins_agree(x, name)
    assert_twins_agree(x.reshape(10, 2, 15, width), name)


numbers = st.one_of(st.sampled_from(EXTREMES), st.floats(width=32), st.floats(-300, 300, width=16))


@given(arrays.arrays(np.float64, st.tuples(st.integers(0, 3), st.integers(1, 70)), elements=numbers))
def test_numpy_and_torch_agree_on_anything(x: np.ndarray):
    for name in TORCH:
        assert_twins_agree(x, name)


def assert_as_the_oracle(x: np.ndarray) -> None:
    for one in LOSSY:
        expected = through(one.name, x)
        found = one.decode(one.encode(x), x.shape[-1], np.float64)
        assert np.array_equal(found, expected, equal_nan=True)


@every_width
def test_numpy_does_what_the_oracle_does(width: int):
    rng = np.random.default_rng(width)
    assert_as_the_oracle(noise(60, width, seed=width))
    assert_as_the_oracle(rng.choice(EXTREMES, (60, width)))
    assert_as_the_oracle(rng.choice(EXTREMES[:-3], (60, width)))
    assert_as_the_oracle(rng.integers(-254, 254, (20, width)) / 2)
    assert_as_the_oracle(127 * rng.integers(2048, 4096, (20, width)) / 2.0**14)


@given(arrays.arrays(np.float64, st.tuples(st.integers(0, 3), st.integers(1, 70)), elements=st.floats() | numbers))
def test_numpy_does_what_the_oracle_does_with_anything(x: np.ndarray):
    assert_as_the_oracle(x)


QUICK = [(33, "float32"), (64, "bfloat16"), (5, "float16")]
REST = [(width, name) for width in WIDTHS for name in TORCH if (width, name) not in QUICK]


@pytest.mark.unhooked
@pytest.mark.parametrize(("width", "name"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)])
def test_the_compiled_twin_gives_the_same_bits(width: int, name: str):
    """One graph, from the real compiler."""
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [noise(200, width), rng.choice(EXTREMES, (100, width)), rng.integers(-254, 254, (50, width)) / 2]
    )
    held, tensor = in_dtype(x, name)
    for one in LOSSY:
        torch._dynamo.reset()
        encode = torch.compile(lambda x, one=one: twin.encode(one, x), fullgraph=True)
        decode = torch.compile(lambda parts, one=one: twin.decode(one, parts, width, TORCH[name]), fullgraph=True)
        expected, found = one.encode(held), encode(tensor)
        for part, array in expected.items():
            assert_same(as_numpy(found[part]), array)
        assert_same(as_numpy(decode(found)), one.decode(expected, width, held.dtype))
