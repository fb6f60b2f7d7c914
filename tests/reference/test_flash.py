"""Tiled attention and the log-sum-exp merge against dense attention and torch autograd in float64."""

import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.reference.flash import merge, tiled_attention, tiled_attention_backward

Arrays = tuple[np.ndarray, ...]


def deviation(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest deviation over largest absolute value; a result that should be all 0 must be exactly that."""
    assert actual.shape == expected.shape
    largest = np.abs(expected).max(initial=0.0)
    difference = np.abs(actual - expected).max(initial=0.0)
    return float(difference / largest if largest else difference)


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """The whole T x S matrix at once, row by row; out and lse."""
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for t in range(len(q)):
        keys = np.flatnonzero(allowed[t])
        if len(keys):
            scores = scale * (k[keys] @ q[t])
            exponentials = np.exp(scores - scores.max())
            out[t] = exponentials @ v[keys] / exponentials.sum()
            lse[t] = scores.max() + math.log(exponentials.sum())
    return out, lse


def dense_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, d_out: np.ndarray, scale: float
) -> Arrays:
    """torch autograd. Dead rows are given all keys and then weight 0, so that autograd meets no NaN."""
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    alive = torch.tensor(allowed.any(1, keepdims=True))
    scores = scale * tensors[0] @ tensors[1].T
    weights = scores.masked_fill(~torch.tensor(allowed) & alive, -torch.inf).softmax(-1) * alive
    gradients = torch.autograd.grad(weights @ tensors[2], tensors, torch.tensor(d_out))
    return tuple(gradient.numpy() for gradient in gradients)


def problem(
    t: int, s: int, width: int, value_width: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v, d_out."""
    rng = np.random.default_rng([seed, t, s, width, value_width])
    q, k = rng.normal(size=(t, width)), rng.normal(size=(s, width))
    return q, k, rng.normal(size=(s, value_width)), rng.normal(size=(t, value_width))


def mask(kind: str, t: int, s: int) -> np.ndarray:
    """Queries are the last t of s positions, as in decoding with a cache: with t > s the first rows have no key."""
    row, column = np.arange(t)[:, None] + s - t, np.arange(s)[None, :]
    random = np.random.default_rng([t, s]).random((t, s)) < 0.3
    if kind == "random, rows 0 and 2 dead, key 1 dead":
        random[[0, min(2, t - 1)]] = False
        random[:, min(1, s - 1)] = False
    masks = {
        "all": np.ones((t, s), dtype=bool),
        "none": np.zeros((t, s), dtype=bool),
        "causal": column <= row,
        "window": (column <= row) & (column > row - 3),
        "random, rows 0 and 2 dead, key 1 dead": random,
    }
    return masks[kind]


KINDS = ["all", "none", "causal", "window", "random, rows 0 and 2 dead, key 1 dead"]
SIZES = [(1, 1), (13, 13), (5, 17), (17, 5), (16, 16)]


# --- Forward and backward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t", "s"), SIZES)
@pytest.mark.parametrize("block", [1, 4, 7, 64])
def test_equals_dense_attention(kind: str, t: int, s: int, block: int) -> None:
    q, k, v, d_out = problem(t, s, 6, 9)
    allowed = mask(kind, t, s)
    out, lse = tiled_attention(q, k, v, allowed, scale=0.7, block=block)
    expected_out, expected_lse = dense(q, k, v, allowed, 0.7)
    assert deviation(out, expected_out) < 1e-12
    dead = ~allowed.any(1)
    assert np.array_equal(np.isneginf(lse), dead)
    assert deviation(lse[~dead], expected_lse[~dead]) < 1e-12

    gradients = tiled_attention_backward(q, k, v, allowed, out, lse, d_out, scale=0.7, block=block)
    expected = dense_backward(q, k, v, allowed, d_out, 0.7)
    for ours, theirs in zip(gradients, expected, strict=True):
        # Where each row has at most one key, d_q and d_k are 0 in exact arithmetic; both sides then hold only rounding.
        if np.abs(theirs).max() < 1e-14:
            assert np.abs(ours).max() < 1e-14
        else:
            assert deviation(ours, theirs) < 1e-12


@pytest.mark.parametrize("value_width", [1, 3, 16])
@pytest.mark.parametrize("width", [1, 8])
def test_value_width_is_free(width: int, value_width: int) -> None:
    q, k, v, d_out = problem(9, 11, width, value_width)
    allowed = mask("causal", 9, 11)
    out, lse = tiled_attention(q, k, v, allowed, scale=0.5, block=4)
    assert deviation(out, dense(q, k, v, allowed, 0.5)[0]) < 1e-12
    gradients = tiled_attention_backward(q, k, v, allowed, out, lse, d_out, scale=0.5, block=4)
    for ours, theirs in zip(gradients, dense_backward(q, k, v, allowed, d_out, 0.5), strict=True):
        assert deviation(ours, theirs) < 1e-12


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 14), st.integers(0, 2**16), st.floats(0.0, 1.0))
def test_equals_dense_attention_on_random_masks(t: int, s: int, block: int, seed: int, density: float) -> None:
    q, k, v, d_out = problem(t, s, 4, 3, seed)
    allowed = np.random.default_rng(seed).random((t, s)) < density
    out, lse = tiled_attention(q, k, v, allowed, scale=1.0, block=block)
    assert deviation(out, dense(q, k, v, allowed, 1.0)[0]) < 1e-12
    gradients = tiled_attention_backward(q, k, v, allowed, out, lse, d_out, scale=1.0, block=block)
    for ours, theirs in zip(gradients, dense_backward(q, k, v, allowed, d_out, 1.0), strict=True):
        # Rows with a single key give d_q = d_k = 0 up to rounding, so measure against the size of the terms: O(1).
        assert np.abs(ours - theirs).max() < 1e-12 * max(1.0, np.abs(theirs).max())


def test_dead_rows_are_zero_and_silent() -> None:
    q, k, v, d_out = problem(6, 8, 4, 4)
    allowed = mask("all", 6, 8)
    allowed[[1, 4]] = False
    allowed[:, 3] = False
    with np.errstate(all="raise", under="ignore"):
        out, lse = tiled_attention(q, k, v, allowed, scale=1.0, block=3)
        d_q, d_k, d_v = tiled_attention_backward(q, k, v, allowed, out, lse, d_out, scale=1.0, block=3)
    assert not out[[1, 4]].any()
    assert np.isneginf(lse[[1, 4]]).all()
    assert not d_q[[1, 4]].any()
    assert not d_k[3].any()
    assert not d_v[3].any()
    others = [0, 2, 3, 5]
    alone, _ = tiled_attention(q[others], k, v, allowed[others], scale=1.0, block=3)
    assert deviation(out[others], alone) < 1e-15


def test_no_keys_at_all() -> None:
    q, k, v, d_out = problem(3, 0, 4, 2)
    out, lse = tiled_attention(q, k, v, np.zeros((3, 0), dtype=bool), scale=1.0, block=2)
    assert np.array_equal(out, np.zeros((3, 2)))
    assert np.isneginf(lse).all()
    d_q, d_k, d_v = tiled_attention_backward(q, k, v, np.zeros((3, 0), dtype=bool), out, lse, d_out, scale=1.0, block=2)
    assert not d_q.any()
    assert d_k.shape == (0, 4)
    assert d_v.shape == (0, 2)


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_extreme_scores(order: str) -> None:
    """Scores of +-1e4, where e^1e4 overflows. Rising, each tile raises the maximum; falling, none after the first does.

    Keys come in pairs half a unit apart, so that the best two share the weight and the gradients do not vanish.
    """
    rising = np.linspace(-1e4, 1e4, 6)
    levels = {"rising": rising, "falling": rising[::-1], "mixed": 1e4 * np.cos(np.arange(6))}
    k = np.repeat(levels[order], 2)[:, None] + np.tile([0.0, 0.5], 6)[:, None]
    q, (_, _, v, d_out) = np.ones((12, 1)), problem(12, 12, 1, 3)
    allowed = mask("causal", 12, 12)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        out, lse = tiled_attention(q, k, v, allowed, scale=1.0, block=3)
        d_q, d_k, d_v = tiled_attention_backward(q, k, v, allowed, out, lse, d_out, scale=1.0, block=3)
    expected_out, expected_lse = dense(q, k, v, allowed, 1.0)
    assert deviation(out, expected_out) < 1e-12
    assert deviation(lse, expected_lse) < 1e-12
    expected_q, expected_k, expected_v = dense_backward(q, k, v, allowed, d_out, 1.0)
    # lse is about 1e4, so w = e^(s - lse) carries the relative error 1e4 eps; d_q sums terms d_s k that nearly cancel.
    error = 1e4 * np.finfo(float).eps
    d_s = 2.0 * np.abs(d_out @ v.T).max()
    assert np.abs(expected_q).max() > 0.01
    assert np.abs(d_q - expected_q).max() < error * d_s * np.abs(k).max()
    assert np.abs(expected_k).max() > 0.01
    assert np.abs(d_k - expected_k).max() < error * d_s * np.abs(q).sum()
    assert np.abs(expected_v).max() > 0.01
    assert np.abs(d_v - expected_v).max() < error * np.abs(d_out).sum()


# --- The mask as a function; what is held in memory -------------------------------------------------------------------


def test_a_function_equals_its_array_and_is_asked_for_tiles_only() -> None:
    q, k, v, d_out = problem(13, 22, 5, 4)
    asked = np.zeros((13, 22), dtype=int)

    def window(row: np.ndarray, column: np.ndarray) -> np.ndarray:
        assert row.shape[1] == column.shape[0] == 1
        assert row.size <= 4
        assert column.size <= 4
        asked[row, column] += 1
        return (column <= row + 9) & (column > row + 3)

    allowed = (np.arange(22) <= np.arange(13)[:, None] + 9) & (np.arange(22) > np.arange(13)[:, None] + 3)
    forward = tiled_attention(q, k, v, window, scale=0.4, block=4)
    assert (asked == 1).all()
    backward = tiled_attention_backward(q, k, v, window, *forward, d_out, scale=0.4, block=4)
    assert (asked == 2).all()
    out, lse = tiled_attention(q, k, v, allowed, scale=0.4, block=4)
    expected = out, lse, *tiled_attention_backward(q, k, v, allowed, out, lse, d_out, scale=0.4, block=4)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(forward + backward, expected, strict=True))


def test_a_function_of_the_key_alone_is_broadcast() -> None:
    q, k, v, _ = problem(6, 7, 3, 3)
    out, _ = tiled_attention(q, k, v, lambda row, column: column >= 2, scale=1.0, block=4)
    assert deviation(out, dense(q, k[2:], v[2:], np.ones((6, 5), dtype=bool), 1.0)[0]) < 1e-12


def peak_bytes(work: Callable[[], object]) -> int:
    """What `work` allocates on top of its inputs, results included."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def peaks(t: int, width: int) -> dict[str, int]:
    q, k, v, d_out = problem(t, t, width, width)

    def near(row: np.ndarray, column: np.ndarray) -> np.ndarray:
        return (column <= row) & (column > row - 100)

    out, lse = tiled_attention(q, k, v, near, scale=1.0, block=32)
    return {
        "forward": peak_bytes(lambda: tiled_attention(q, k, v, near, scale=1.0, block=32)),
        "backward": peak_bytes(lambda: tiled_attention_backward(q, k, v, near, out, lse, d_out, scale=1.0, block=32)),
        "dense": peak_bytes(lambda: q @ k.T),
    }


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    """Doubling the length adds the bytes of the longer results and per-row vectors, and no more: tiles stay the same.

    As a control, the same measurement sees the dense product grow fourfold.
    """
    t, width = 1024, 8
    small, large = peaks(t, width), peaks(2 * t, width)
    assert large["dense"] / small["dense"] > 3.9
    # Forward: out and lse. Backward: d_q, d_k, d_v, the product whose row sum is delta, delta and the shift.
    numbers_per_position = {"forward": width + 1, "backward": 3 * width + width + 2}
    for name, numbers in numbers_per_position.items():
        assert large[name] - small[name] < 1.1 * 8 * numbers * t, name
        assert large[name] < 0.03 * large["dense"], name


# --- Merge and the ring -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**16), st.floats(0.0, 1.0))
def test_merge_of_two_key_sets_is_the_whole(t: int, cut: int, rest: int, seed: int, density: float) -> None:
    """Low densities make rows dead in one part, in the other, and in both; a part may also be empty."""
    s = cut + rest
    q, k, v, _ = problem(t, s, 4, 3, seed)
    allowed = np.random.default_rng(seed).random((t, s)) < density
    first = tiled_attention(q, k[:cut], v[:cut], allowed[:, :cut], scale=1.0, block=5)
    second = tiled_attention(q, k[cut:], v[cut:], allowed[:, cut:], scale=1.0, block=5)
    expected_out, expected_lse = dense(q, k, v, allowed, 1.0)
    for a, b in [(first, second), (second, first)]:
        with np.errstate(all="raise", under="ignore"):
            out, lse = merge(*a, *b)
        assert deviation(out, expected_out) < 1e-12
        alive = allowed.any(1)
        assert np.array_equal(np.isneginf(lse), ~alive)
        assert deviation(lse[alive], expected_lse[alive]) < 1e-12


def test_merge_is_associative_and_takes_leading_axes() -> None:
    parts = []
    for seed in range(3):
        q, k, v, _ = problem(5, 6, 4, 3)
        _, k, v, _ = problem(5, 6, 4, 3, seed + 1)
        parts.append(tiled_attention(q, k, v, mask("all", 5, 6), scale=300.0, block=2))  # lse of some hundreds, apart
    left = merge(*merge(*parts[0], *parts[1]), *parts[2])
    right = merge(*parts[0], *merge(*parts[1], *parts[2]))
    assert deviation(left[0], right[0]) < 1e-12
    assert deviation(left[1], right[1]) < 1e-12
    (out_a, lse_a), (out_b, lse_b) = parts[:2]
    stacked = merge(
        np.stack([out_a, out_b]), np.stack([lse_a, lse_b]), np.stack([out_b, out_a]), np.stack([lse_b, lse_a])
    )
    assert np.array_equal(stacked[0][0], merge(out_a, lse_a, out_b, lse_b)[0])
    assert np.array_equal(stacked[0][1], merge(out_b, lse_b, out_a, lse_a)[0])


def shares(n: int, ranks: int, layout: str) -> list[np.ndarray]:
    """The positions of each rank: contiguous pieces, or every ranks-th position (striped attention)."""
    positions = np.arange(n)
    return np.array_split(positions, ranks) if layout == "contiguous" else [positions[r::ranks] for r in range(ranks)]


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("n", "ranks"), [(n, ranks) for n, ranks in itertools.product([13, 23], [1, 2, 3, 4])])
def test_ring_of_ranks_equals_dense(n: int, ranks: int, window: int | None, layout: str) -> None:
    """Each rank keeps its queries while the keys go round; the mask speaks of positions, so any layout will do."""
    assert ranks == 1 or n % ranks
    q, k, v, d_out = problem(n, n, 6, 5)
    owned = shares(n, ranks, layout)

    def see(of: np.ndarray, at: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        return lambda row, column: (at[column] <= of[row]) & (at[column] > of[row] - (window or n))

    out, lse = np.zeros((n, 5)), np.full(n, -np.inf)
    for rank, step in itertools.product(range(ranks), range(ranks)):
        mine, theirs = owned[rank], owned[(rank - step) % ranks]
        part = tiled_attention(q[mine], k[theirs], v[theirs], see(mine, theirs), scale=0.6, block=4)
        out[mine], lse[mine] = merge(out[mine], lse[mine], *part)
    everything = np.arange(n)
    allowed = see(everything, everything)(everything[:, None], everything[None, :])
    expected_out, expected_lse = dense(q, k, v, allowed, 0.6)
    assert deviation(out, expected_out) < 1e-12
    assert deviation(lse, expected_lse) < 1e-12

    # Backward: the whole row's out and lse with one part of the keys give that part's share of the gradients.
    d_q, d_k, d_v = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for mine, theirs in itertools.product(owned, owned):
        d_part = tiled_attention_backward(
            q[mine], k[theirs], v[theirs], see(mine, theirs), out[mine], lse[mine], d_out[mine], scale=0.6, block=4
        )
        d_q[mine] += d_part[0]
        d_k[theirs] += d_part[1]
        d_v[theirs] += d_part[2]
    for ours, theirs in zip((d_q, d_k, d_v), dense_backward(q, k, v, allowed, d_out, 0.6), strict=True):
        assert deviation(ours, theirs) < 1e-12


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named() -> None:
    q, k, v, _ = problem(3, 4, 2, 2)
    allowed = mask("all", 3, 4)
    with pytest.raises(
        ValueError, match=r"need shapes \(T, F\), \(S, F\), \(S, Fv\), got \(3, 2\), \(4, 2\), \(3, 2\)"
    ):
        tiled_attention(q, k, v[:3], allowed, scale=1.0, block=2)
    with pytest.raises(ValueError, match=r"call once per head"):
        tiled_attention(q[None], k[None], v[None], allowed, scale=1.0, block=2)
    with pytest.raises(ValueError, match="block: must be at least 1, got 0"):
        tiled_attention(q, k, v, allowed, scale=1.0, block=0)
    with pytest.raises(ValueError, match=r"boolean array of shape \(3, 4\).*got bool of shape \(4, 3\)"):
        tiled_attention(q, k, v, allowed.T, scale=1.0, block=2)
    additive: Any = np.zeros((3, 4))  # where 0 would mean "allowed" and False means "forbidden"
    with pytest.raises(ValueError, match="got float64 of shape"):
        tiled_attention(q, k, v, additive, scale=1.0, block=2)
    function: Any = np.subtract  # a distance, not a yes or no
    with pytest.raises(ValueError, match="the function must return booleans"):
        tiled_attention(q, k, v, function, scale=1.0, block=2)
