"""Rotary positions: goldens of both layouts, the properties of a rotation, and the eight scaling rules."""

import cmath
import math

import numpy as np
import pytest

import qkv.config as c
from qkv.reference.position import rotary_frequencies, scheme

from .small import deviation, here


def turn(x: np.ndarray, position: int, **fields: object) -> np.ndarray:
    """One vector (F,), turned."""
    return scheme(c.Rotary(**fields), {}).turn(x[None, None, :].astype(float), here([position]))[0, 0]


def frequencies(scaling: c.RotaryScaling, width: int = 128, theta: float = 10_000.0, length: int = 1) -> list[float]:
    return rotary_frequencies(c.Rotary(theta=theta, scaling=scaling), width, length)[0]


def factor(scaling: c.RotaryScaling, length: int = 1) -> float:
    return rotary_frequencies(c.Rotary(scaling=scaling), 128, length)[1]


PLAIN = frequencies(c.NoScaling())
YARN = c.YarnScaling(factor=8.0, original_max_seq_len=4096)


def test_goldens_of_both_layouts():
    x = np.array([1, 2, 3, 4])
    assert turn(x, 1, layout="pairs") == pytest.approx([-1.143, 1.922, 2.960, 4.030], abs=5e-4)
    assert turn(x, 1, layout="halves") == pytest.approx([-1.984, 1.960, 2.462, 4.020], abs=5e-4)


def test_frequencies_of_width_128():
    assert PLAIN[:3] == pytest.approx([1, 0.865964, 0.749894], abs=5e-7)
    assert [PLAIN[30], PLAIN[60], PLAIN[63]] == pytest.approx([0.0133352, 1.77828e-4, 1.15478e-4], rel=5e-6)


def test_pairs_is_multiplication_by_a_complex_number():
    x = np.random.default_rng(0).standard_normal(8)
    turned = turn(x, 7, layout="pairs")
    for i in range(4):
        z = complex(x[2 * i], x[2 * i + 1]) * cmath.exp(1j * 7 * 10_000 ** (-i / 4))
        assert turned[2 * i : 2 * i + 2] == pytest.approx([z.real, z.imag], rel=1e-12)


def test_halves_is_pairs_after_the_fixed_permutation():
    x = np.random.default_rng(1).standard_normal(10)
    order = [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert np.array_equal(turn(x[order], 9, layout="halves"), turn(x, 9, layout="pairs")[order])


@pytest.mark.parametrize("layout", ["pairs", "halves"])
def test_scores_depend_on_the_distance_only_and_norms_stay(layout: str):
    q, k = np.random.default_rng(2).standard_normal((2, 16))
    scores = [turn(q, m + 5, layout=layout) @ turn(k, m, layout=layout) for m in (0, 1, 50, 1000)]
    assert scores == pytest.approx([scores[0]] * 4, rel=1e-11)
    assert abs(scores[0] - turn(q, 6, layout=layout) @ turn(k, 0, layout=layout)) > 0.01
    assert np.linalg.norm(turn(q, 777, layout=layout)) == pytest.approx(np.linalg.norm(q), rel=1e-14)


def test_position_zero_stays():
    x = np.random.default_rng(3).standard_normal(6)
    assert np.array_equal(turn(x, 0), x)


def test_fraction_turns_only_the_start_of_the_head():
    x = np.random.default_rng(4).standard_normal(16)
    turned = turn(x, 3, fraction=0.5)
    assert np.array_equal(turned[8:], x[8:])
    assert np.array_equal(turned[:8], turn(x[:8], 3))


def test_linear_divides_every_frequency():
    assert frequencies(c.LinearScaling(factor=4.0)) == pytest.approx([w / 4 for w in PLAIN], rel=1e-15)
    x = np.arange(1.0, 9.0)
    assert turn(x, 8, scaling=c.LinearScaling(factor=4.0)) == pytest.approx(turn(x, 2))


def test_ntk_slows_the_last_pair_by_exactly_the_factor():
    """d = 128, factor 4: the base becomes 40,889.94."""
    scaled = frequencies(c.NtkScaling(factor=4.0))
    assert scaled[1] ** -64 == pytest.approx(40_889.94, abs=0.005)
    assert scaled[0] == 1.0
    assert scaled[63] / PLAIN[63] == pytest.approx(1 / 4, rel=1e-12)


def test_dynamic_ntk_grows_with_the_length():
    scaling = c.DynamicNtkScaling(factor=2.0, original_max_seq_len=2048)
    assert frequencies(scaling, length=2047) == frequencies(scaling, length=2048) == PLAIN
    assert frequencies(scaling, length=8192)[1] ** -64 == pytest.approx(72_195.86, abs=0.005)


@pytest.mark.parametrize(("length", "alpha"), [(100, 1), (2048, 1), (2049, 3), (4096, 3), (4097, 7), (8192, 7)])
def test_qwen_dynamic_grows_in_steps(length: int, alpha: int):
    scaling = c.QwenDynamicScaling(original_max_seq_len=2048)
    assert frequencies(scaling, length=length) == pytest.approx(
        [(10_000 * alpha ** (128 / 126)) ** (-i / 64) for i in range(64)], rel=1e-12
    )


def test_yarn_ramp_and_temperature():
    """d = 128, L0 = 4096, s = 8: the ramp runs from pair 20 to pair 46."""
    ratio = [w / plain for w, plain in zip(frequencies(YARN), PLAIN, strict=True)]
    assert ratio[:21] == [1.0] * 21
    assert ratio[33] == pytest.approx(0.5625, rel=1e-14)  # half way: (1 + 1/8) / 2
    assert ratio[46:] == pytest.approx([0.125] * 18, rel=1e-15)
    assert all(0.125 < r < 1 for r in ratio[21:46])
    assert ratio[21] - ratio[22] == pytest.approx(0.875 / 26, rel=1e-12)
    assert factor(YARN) == 1.2079441541679836


def test_yarn_corrections_by_hand():
    """The pair with t turns is 64 ln(4096 / (2 pi t)) / ln 10000: 20.94 for t = 32 and 45.03 for t = 1."""
    exact = c.YarnScaling(factor=8.0, original_max_seq_len=4096, truncate=False)
    low, high = (64 * math.log(4096 / (2 * math.pi * t)) / math.log(10_000) for t in (32, 1))
    assert (low, high) == pytest.approx((20.944, 45.027), abs=5e-4)
    ratio = frequencies(exact)[33] / PLAIN[33]
    assert ratio == pytest.approx(1 - 0.875 * (33 - low) / (high - low), rel=1e-12)


def test_yarn_attention_factor_choices():
    two = c.YarnScaling(factor=8.0, original_max_seq_len=4096, mscale=2.0, mscale_all_dim=0.5)
    assert factor(two) == pytest.approx((0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1), rel=1e-15)
    assert factor(c.YarnScaling(factor=8.0, original_max_seq_len=4096, attention_factor=1.5)) == 1.5
    x = np.random.default_rng(5).standard_normal(128)
    assert np.linalg.norm(turn(x, 9, scaling=YARN)) == pytest.approx(1.2079441541679836 * np.linalg.norm(x), rel=1e-12)


def test_yarn_whose_ramp_has_no_width_steps():
    """A tiny original length: both ends are clamped to pair 0, which stays, and the others are interpolated."""
    scaling = c.YarnScaling(factor=4.0, original_max_seq_len=4)
    plain = frequencies(c.NoScaling(), width=8)
    assert frequencies(scaling, width=8) == pytest.approx([plain[0], *(w / 4 for w in plain[1:])], rel=1e-12)


@pytest.mark.parametrize(("width", "s", "counts"), [(128, 8.0, (29, 6, 29)), (64, 32.0, (15, 3, 14))])
def test_llama3_keeps_blends_and_divides(width: int, s: float, counts: tuple[int, int, int]):
    scaled = frequencies(c.Llama3Scaling(factor=s), width=width, theta=500_000.0)
    plain = frequencies(c.NoScaling(), width=width, theta=500_000.0)
    ratio = [w / p for w, p in zip(scaled, plain, strict=True)]
    kept, divided = sum(r == 1 for r in ratio), sum(r == pytest.approx(1 / s, rel=1e-12) for r in ratio)
    assert (kept, width // 2 - kept - divided, divided) == counts
    assert ratio == sorted(ratio, reverse=True)


def test_llama3_blend_by_hand():
    """One pair of wavelength 8192/2.5 stands half way between the factors 1 and 4: half as is, half divided by 8."""
    scaled = frequencies(c.Llama3Scaling(factor=8.0), width=4, theta=(8192 / 2.5 / (2 * math.pi)) ** 2)
    assert scaled == pytest.approx([1.0, 2 * math.pi / (8192 / 2.5) * (0.5 + 0.5 / 8)], rel=1e-12)


def test_longrope_divides_each_pair_by_its_own_factor():
    scaling = c.LongRopeScaling(short_factor=(1.0, 2.0), long_factor=(4.0, 5.0), factor=16.0, original_max_seq_len=64)
    for length, divisors in [(64, (1.0, 2.0)), (65, (4.0, 5.0))]:
        assert frequencies(scaling, width=4, length=length) == [1 / divisors[0], 0.01 / divisors[1]]
    expected = math.sqrt(1 + math.log(16) / math.log(64))  # = sqrt(5/3)
    assert rotary_frequencies(c.Rotary(scaling=scaling), 4, 1)[1] == pytest.approx(math.sqrt(5 / 3))
    assert expected == pytest.approx(math.sqrt(5 / 3))


def test_each_token_turns_by_the_length_of_its_own_document():
    x = np.random.default_rng(6).standard_normal((2, 1, 8))
    rotary = scheme(c.Rotary(scaling=c.DynamicNtkScaling(factor=2.0, original_max_seq_len=4)), {})
    both = rotary.turn(x, here([3, 3], length=np.array([4, 9])))
    assert np.array_equal(both[:1], rotary.turn(x[:1], here([3], length=np.array([4]))))
    assert np.array_equal(both[1:], rotary.turn(x[1:], here([3], length=np.array([9]))))
    assert deviation(both[1], rotary.turn(x[1:], here([3], length=np.array([4])))[0]) > 1e-3
