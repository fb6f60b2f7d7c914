"""Positions inside the scores: ALiBi, T5's buckets, Shaw's vectors, Transformer-XL's sinusoids."""

import numpy as np
import pytest

import qkv
from qkv import config as c

from .small import (
    Run,
    attention_matrix,
    block,
    both,
    decoder,
    deviation,
    heads,
    mix,
    normal,
    slopes,
    softmax,
    tokens,
    weights_of,
)

T = 9
FAR = np.arange(T)[:, None] - np.arange(T)[None]  # query - key
SEES = FAR >= 0


# --- ALiBi ------------------------------------------------------------------------------------------------------------


@both
def test_e52_alibi_slopes_of_head_counts_that_are_no_power_of_two(run: Run):
    """The slopes of 8, then every other slope of 16."""
    found = slopes(run, 12)
    assert deviation(found[:8], slopes(run, 8)) < 1e-13
    assert found[8:] == pytest.approx([0.70711, 0.35355, 0.17678, 0.08839], abs=5e-6)


@both
def test_bloom_alibi_slopes_of_112_heads(run: Run):
    attention = qkv.preset("bloom-176b").decoder.layers[0].attention
    assert (attention.n_heads, attention.positions) == (112, c.Alibi())
    found = slopes(run, 112)
    assert deviation(found[:64], 2.0 ** (-8 * np.arange(1, 65) / 64)) < 1e-12
    assert deviation(found[64:], 2.0 ** (-8 * np.arange(1, 97, 2) / 128)) < 1e-12
    assert len(set(found.round(12))) == 112


@both
def test_bloom_alibi_bias_is_minus_slope_times_distance(run: Run):
    q, k = normal(T, 2, 4, seed=1), normal(T, 2, 4, seed=2)
    scores = np.einsum("thf,shf->hts", q, k) / 2 - np.array([2**-4, 2**-8])[:, None, None] * np.abs(FAR)
    causal = attention_matrix(run, q, k, heads(n_heads=2, head_dim=4, positions=c.Alibi()))
    assert deviation(causal, softmax(scores, SEES)) < 1e-13
    two_sided = attention_matrix(run, q, k, heads(c.Bidirectional(), n_heads=2, head_dim=4, positions=c.Alibi()))
    assert deviation(two_sided, softmax(scores, np.full((T, T), True))) < 1e-13


# --- T5 ---------------------------------------------------------------------------------------------------------------

# The first distance of each bucket, for 32 buckets and distances up to 128: one per distance, then 16 * 8^(j/16) (one
# side) or 8 * 2^(j/2) (two sides), rounded up.
ONE_SIDE = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
TWO_SIDES = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]


def buckets(run: Run, positions: c.T5Buckets, distances: np.ndarray) -> np.ndarray:
    """The bucket of each distance key - query, read off a table whose row b is b/8: weights grow by e^(b/8)."""
    places = 200 + np.append(distances, 0)  # the query is the last token
    nothing, table = np.zeros((len(places), 1, 1)), np.arange(32.0)[:, None] / 8
    config = heads(c.Bidirectional(), n_heads=1, head_dim=1, positions=positions.override({"shared": False}))
    weights = attention_matrix(run, nothing, nothing, config, extra={"weight": table}, positions=places)[0, -1]
    return (8 * np.log(weights[:-1] / weights[-1])).round(9)


BORDERS = [*range(33), 35, 39, 40, 45, 46, 51, 52, 58, 59, 63, 64, 66, 67, 76, 77, 86, 87, 90, 91, 98, 99, 112, 113]


@both
def test_t5_buckets(run: Run):
    distances = np.array([-d for d in BORDERS] + BORDERS[1:])  # key - query
    before = np.searchsorted(ONE_SIDE, np.maximum(-distances, 0), side="right") - 1
    assert buckets(run, c.T5Buckets(bidirectional=False), distances).tolist() == before.tolist()
    either = np.searchsorted(TWO_SIDES, np.abs(distances), side="right") - 1 + 16 * (distances > 0)
    assert buckets(run, c.T5Buckets(bidirectional=True), distances).tolist() == either.tolist()


@both
def test_t5_buckets_bias_is_the_row_of_the_bucket(run: Run):
    positions = c.T5Buckets(bidirectional=False, n_buckets=4, max_distance=6, shared=False)
    table, q, k, v = (normal(*shape, seed=5) for shape in ((4, 2), (T, 2, 4), (T, 2, 4), (T, 2, 4)))
    # Rows 0 and 1 hold distances 0 and 1; 2 * (6/2)^(j/2) starts row 2 at 2 and row 3 at 3.46.
    rows = np.clip(np.select([FAR >= 4, FAR >= 2], [3, 2], FAR), 0, 3)
    scores = np.einsum("thf,shf->hts", q, k) / 2 + table[rows].transpose(2, 0, 1)
    expected = np.einsum("hts,shf->thf", softmax(scores, SEES), v)
    cfg_heads = heads(n_heads=2, head_dim=4, positions=positions)
    assert deviation(mix(run, q, k, v, cfg_heads, {"weight": table}), expected) < 1e-13


# --- Shaw -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [True, False])
@both
def test_shaw_relative_equals_brute_force(run: Run, values: bool):
    k_max, width = 2, 4
    config = heads(c.Bidirectional(), n_heads=2, head_dim=width, positions=c.Shaw(max_distance=k_max, values=values))
    a, b = normal(2 * k_max + 1, width, seed=3), normal(2 * k_max + 1, width, seed=4)
    q, k, v = (normal(T, 2, width, seed=s) for s in (0, 1, 2))
    expected = np.zeros((T, 2, width))
    for h in range(2):
        for i in range(T):
            row = [min(max(j - i, -k_max), k_max) + k_max for j in range(T)]
            scores = np.array([q[i, h] @ (k[j, h] + a[row[j]]) / width**0.5 for j in range(T)])
            weights = np.exp(scores) / np.exp(scores).sum()
            expected[i, h] = sum(weights[j] * (v[j, h] + (b[row[j]] if values else 0)) for j in range(T))
    extra = {"key": a, "value": b} if values else {"key": a}
    assert deviation(mix(run, q, k, v, config, extra), expected) < 1e-13


def test_shaw_relative_has_2k_plus_1_rows():
    cfg = decoder(block(attention=heads(head_dim=6, positions=c.Shaw(max_distance=16))))
    for name in ("key", "value"):
        assert cfg.shapes()[f"decoder.layers.0.attention.positions.{name}"].shape == (33, 6)


# --- Transformer-XL ---------------------------------------------------------------------------------------------------


def rel_shift(by_distance: np.ndarray) -> np.ndarray:
    """Dai 2019, appendix B: entry (i, j) of the result is entry (i, T-1-i+j); a column of zeros, and a new shape."""
    length = len(by_distance)
    padded = np.concatenate([np.zeros((length, 1)), by_distance], axis=1)
    return padded.reshape(length + 1, length)[1:]


@pytest.mark.parametrize("clamp", [None, 3])
@both
def test_transformer_xl_rel_shift_equals_the_direct_gather(run: Run, clamp: int | None):
    """The scores ((q + u) . k + (q + v) . r) / sqrt(F), the second part once by shifting and once pair by pair."""
    n_heads, width = 2, 4
    d_model = 4 * n_heads * width  # that of `mix`
    config = heads(n_heads=n_heads, head_dim=width, positions=c.TransformerXL(clamp=clamp))
    u, v_bias = normal(n_heads, width, seed=6), normal(n_heads, width, seed=7)
    r_proj = normal(n_heads * width, d_model, seed=8) / d_model**0.5
    distance = np.arange(T - 1, -1, -1)  # columns of the paper's matrix: farthest first
    counted = distance if clamp is None else np.minimum(distance, clamp)
    angles = counted[:, None] * 10_000.0 ** (-np.arange(0, d_model, 2) / d_model)
    r = (np.concatenate([np.sin(angles), np.cos(angles)], axis=1) @ r_proj.T).reshape(T, n_heads, width)
    q, k, v = (normal(T, n_heads, width, seed=s) for s in (0, 1, 2))
    expected, gathered = np.zeros((T, n_heads, width)), np.zeros((T, n_heads, width))
    for h in range(n_heads):
        content = (q[:, h] + u[h]) @ k[:, h].T
        far = (q[:, h] + v_bias[h]) @ r[:, h].T
        direct = np.array([[far[i, T - 1 - max(i - j, 0)] for j in range(T)] for i in range(T)])
        expected[:, h] = softmax((content + rel_shift(far)) / width**0.5, SEES) @ v[:, h]
        gathered[:, h] = softmax((content + direct) / width**0.5, SEES) @ v[:, h]
    assert deviation(gathered, expected) < 1e-14
    extra = {"u": u, "v": v_bias, "r_proj.weight": r_proj}
    assert deviation(mix(run, q, k, v, config, extra), expected) < 1e-13


def test_e51_shaw_and_transformer_xl_are_two_methods():
    shaw, xl = (
        decoder(block(attention=heads(positions=p))).shapes() for p in (c.Shaw(max_distance=4), c.TransformerXL())
    )
    at = "decoder.layers.0.attention.positions."
    assert {name.removeprefix(at) for name in shaw if name.startswith(at)} == {"key", "value"}
    assert {name.removeprefix(at) for name in xl if name.startswith(at)} == {"u", "v", "r_proj.weight"}


@pytest.mark.parametrize(
    "positions",
    [c.Alibi(), c.T5Buckets(bidirectional=False), c.Shaw(max_distance=3), c.TransformerXL(), c.Rotary()],
    ids=lambda p: p.kind,
)
@both
def test_position_schemes_inside_attention_are_relative(run: Run, positions: c.Positions):
    """All positions moved by 100: nothing changes. A gap between two tokens: something does."""
    cfg = decoder(block(attention=heads(positions=positions)))
    weights, ids, places = weights_of(cfg), tokens(1, 6), np.arange(6)[None]
    expected = run(cfg, weights, ids).logits
    assert deviation(run(cfg, weights, ids, positions=places + 100).logits, expected) < 1e-12
    assert deviation(run(cfg, weights, ids, positions=places + (places > 2)).logits, expected) > 1e-4
