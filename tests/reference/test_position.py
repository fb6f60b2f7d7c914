"""Every position scheme but rotary: by hand, and against its formula written out per pair."""

import math

import numpy as np
import pytest

import qkv.config as c
from qkv.errors import DataError
from qkv.reference.position import alibi_slopes, scheme, t5_bucket

from .small import here


def sinusoid(n: int, d: int, layout: str = "pairs") -> np.ndarray:
    return scheme(c.Sinusoidal(layout=layout), {}).embed(np.arange(n), d)


def test_sinusoid_starts_with_zeros_and_ones_and_a_published_row():
    table = sinusoid(9, 8)
    assert table[0].tolist() == [0.0, 1.0] * 4
    assert table[5, :2] == pytest.approx([-0.959, 0.284], abs=5e-4)
    assert table[5, 2:4] == pytest.approx([math.sin(5 / 10), math.cos(5 / 10)])  # theta^(-2/8) = 1/10


def test_sinusoid_of_width_128_row_5():
    assert sinusoid(6, 128)[5, :4] == pytest.approx([-0.959, 0.284, -0.928, -0.373], abs=5e-4)


def test_sinusoid_first_pair_is_the_fastest():
    """Wavelengths run from 2 pi to 54,410 for d = 128: the sine of the last pair at half its wavelength is near 0."""
    table = scheme(c.Sinusoidal(), {}).embed(np.array([0, 22, 27205]), 128)
    assert abs(table[1, 0]) < 0.01  # 22 is 3.5 wavelengths of 2 pi, to 0.0089
    assert table[2, 126:] == pytest.approx([0.0, -1.0], abs=1e-4)


def test_sinusoid_dot_products_depend_on_the_distance_only_and_are_even():
    table = sinusoid(9, 128)
    assert [table[0] @ table[3], table[5] @ table[8], table[5] @ table[2]] == pytest.approx([52.186] * 3, abs=5e-4)


def test_sinusoid_halves_is_a_permutation_of_pairs():
    pairs, halves = sinusoid(7, 10), sinusoid(7, 10, "halves")
    assert np.array_equal(halves, np.concatenate([pairs[:, 0::2], pairs[:, 1::2]], axis=1))


def test_learned_reads_row_position_plus_offset():
    table = np.arange(12.0).reshape(6, 2)
    learned = scheme(c.Learned(offset=2), {"weight": table})
    assert learned.embed(np.array([0, 3, -1]), 2).tolist() == [[4, 5], [10, 11], [4, 5]]
    with pytest.raises(DataError, match="position 4 lies beyond the learned table, which ends at 3"):
        learned.embed(np.array([0, 4]), 2)


def test_alibi_slopes_of_a_power_of_two():
    assert alibi_slopes(8) == [1 / 2**i for i in range(1, 9)]
    assert alibi_slopes(2, max_bias=4.0) == [1 / 4, 1 / 16]


def test_alibi_slopes_of_twelve_heads():
    assert alibi_slopes(12)[:8] == alibi_slopes(8)
    assert alibi_slopes(12)[8:] == pytest.approx([0.70711, 0.35355, 0.17678, 0.08839], abs=5e-6)


def test_alibi_slopes_of_bloom():
    """112 heads: those of 64, then the first 48 odd ones of 128."""
    slopes = alibi_slopes(112)
    assert len(slopes) == 112
    assert slopes[:64] == [2 ** (-i / 8) for i in range(1, 65)]
    assert slopes[64:] == [2 ** (-i / 16) for i in range(1, 97, 2)]


def test_alibi_bias_falls_on_both_sides():
    bias = scheme(c.Alibi(), {}).bias(2, here([3]), here([1, 3, 7]))
    assert bias.tolist() == [[[-2 / 16, 0, -4 / 16]], [[-2 / 256, 0, -4 / 256]]]


# Bucket edges of T5's default, by hand: 8 * 16^(j/8) = 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5 on each side of 16
# buckets, and 16 * 8^(j/16) = 16, 18.2, 20.7, 23.6, 26.9, 30.6, 34.9, 39.7, 45.3, 51.5, 58.7, 66.8, 76.1, 86.6, 98.7,
# 112.4 when all 32 look back.
TWO_SIDED = [8, 12, 16, 23, 32, 46, 64, 91]
LOOKING_BACK = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_t5_buckets_two_sided():
    config = c.T5Buckets(bidirectional=True)
    for distance in range(200):
        bucket = distance if distance < 8 else 7 + sum(distance >= edge for edge in TWO_SIDED)
        assert t5_bucket(config, -distance) == bucket
        assert t5_bucket(config, distance) == (bucket + 16 if distance else 0)


def test_t5_buckets_looking_back():
    config = c.T5Buckets(bidirectional=False)
    for distance in range(200):
        bucket = distance if distance < 16 else 15 + sum(distance >= edge for edge in LOOKING_BACK)
        assert t5_bucket(config, -distance) == bucket
        assert t5_bucket(config, distance) == 0


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_agree_with_logarithms_in_single_precision(bidirectional: bool):
    """As the released code computes them."""
    config = c.T5Buckets(bidirectional=bidirectional)
    side = 16 if bidirectional else 32
    exact = side // 2
    for distance in range(exact, 1000):
        ratio = np.log(np.float32(distance) / np.float32(exact)) / np.float32(math.log(128 / exact))
        assert t5_bucket(config, -distance) == min(exact + int(ratio * np.float32(side - exact)), side - 1)


def test_t5_bias_reads_the_bucket_of_each_head():
    table = np.random.default_rng(0).standard_normal((8, 3))  # 4 buckets per side: 0, 1, then 2 to 3.99, 4 and beyond
    config = c.T5Buckets(n_buckets=8, max_distance=8, bidirectional=True)
    bias = scheme(config, {"weight": table}).bias(3, here([5]), here([5, 4, 3, 2, 1, 0, 6, 8, 20]))
    rows = [0, 1, 2, 2, 3, 3, 5, 6, 7]
    assert bias[:, 0, :].T.tolist() == table[rows].tolist()


def test_shaw_terms_equal_the_formula_per_pair():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((5, 3)), rng.standard_normal((5, 3))  # distances clipped to -2..2
    q, k, weights = rng.standard_normal((4, 2, 3)), rng.standard_normal((4, 2, 3)), rng.random((2, 4, 4))
    shaw = scheme(c.Shaw(max_distance=2), {"key": a, "value": b})
    at = here([0, 1, 2, 3])
    terms, mixed = shaw.relative(q, k, at, at), shaw.values(weights, at, at, 3)
    clipped = {-3: 0, -2: 0, -1: 1, 0: 2, 1: 3, 2: 4, 3: 4}
    for h in range(2):
        for i in range(4):
            for j in range(4):
                assert terms[h, i, j] == pytest.approx(sum(q[i, h, f] * a[clipped[j - i], f] for f in range(3)))
            for f in range(3):
                expected = sum(weights[h, i, j] * b[clipped[j - i], f] for j in range(4))
                assert mixed[i, h, f] == pytest.approx(expected)


def test_shaw_without_values_adds_none():
    at = here([0, 1])
    mixed = scheme(c.Shaw(max_distance=2, values=False), {"key": np.ones((5, 3))}).values(np.ones((2, 2, 2)), at, at, 3)
    assert mixed.tolist() == np.zeros((2, 2, 3)).tolist()


@pytest.mark.parametrize("clamp", [None, 2])
def test_transformer_xl_terms_equal_the_four_parts(clamp: int | None):
    """Content-content, content-position, content bias, position bias (Dai 2019): the oracle adds all but the first."""
    rng = np.random.default_rng(2)
    D, H, F = 6, 2, 3
    u, v, w = rng.standard_normal((H, F)), rng.standard_normal((H, F)), rng.standard_normal((H * F, D))
    q, k = rng.standard_normal((5, H, F)), rng.standard_normal((5, H, F))
    at = here([0, 1, 2, 3, 4])
    xl = scheme(c.TransformerXL(clamp=clamp), {"u": u, "v": v, "r_proj.weight": w})
    terms = xl.relative(q, k, at, at)
    for h in range(H):
        for i in range(5):
            for j in range(i + 1):
                d = i - j if clamp is None else min(i - j, clamp)
                r = [math.sin(d), math.sin(d / 10_000 ** (2 / 6)), math.sin(d / 10_000 ** (4 / 6))]
                r += [math.cos(d), math.cos(d / 10_000 ** (2 / 6)), math.cos(d / 10_000 ** (4 / 6))]
                projected = [sum(w[h * F + f, m] * r[m] for m in range(D)) for f in range(F)]
                content_bias = sum(u[h, f] * k[j, h, f] for f in range(F))
                content_position = sum(q[i, h, f] * projected[f] for f in range(F))
                position_bias = sum(v[h, f] * projected[f] for f in range(F))
                assert terms[h, i, j] == pytest.approx(content_bias + content_position + position_bias, rel=1e-12)


def test_no_positions_add_nothing():
    none, at = scheme(c.NoPositions(), {}), here([0, 1])
    x = np.ones((2, 3, 4))
    assert none.turn(x, at) is x
    assert not none.embed(np.arange(2), 4).any()
    assert not none.bias(3, at, at).any()
    assert not none.relative(x, x, at, at).any()
    assert none.values(np.ones((3, 2, 2)), at, at, 4).shape == (2, 3, 4)
