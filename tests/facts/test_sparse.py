"""Sparse patterns: sliding windows, Longformer, BigBird."""

import itertools

import numpy as np
import pytest
import torch

import qkv
from qkv import config as c
from qkv.nn.backends import window as window_backend

from .small import (
    Run,
    at,
    attention_matrix,
    block,
    both,
    decoder,
    deviation,
    encoder,
    heads,
    masks,
    mix,
    nn,
    nn_mask,
    normal,
    oracle_mask,
    peak_bytes,
    softmax,
    tokens,
    torch_model,
    weights_of,
)


def distance(length: int) -> np.ndarray:
    """Query - key."""
    return np.arange(length)[:, None] - np.arange(length)[None]


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """All scores, of which the mask keeps some: (T, H, F)."""
    return np.einsum("hts,shf->thf", softmax(np.einsum("thf,shf->hts", q, k) / q.shape[2] ** 0.5, seen), v)


def some_heads(length: int) -> tuple[np.ndarray, ...]:
    return tuple(normal(length, 2, 4, seed=s) for s in range(3))


def globals_at(length: int, *places: int) -> np.ndarray:
    return np.isin(np.arange(length), places)


# --- Windows ----------------------------------------------------------------------------------------------------------


@masks
def test_e39_a_causal_window_counts_the_query_and_longformers_has_half_on_each_side(mask):
    """W keys with the own one; w/2 before, w/2 after and the own one, w + 1 in all."""
    here = at(range(20))
    causal = mask(c.SlidingWindow(window=4), here, here)
    assert np.array_equal(causal, (distance(20) >= 0) & (distance(20) < 4))
    assert causal.sum(axis=1).tolist() == [1, 2, 3, *[4] * 17]
    both_sides = mask(c.Longformer(window=4), here, here)
    assert np.array_equal(both_sides, np.abs(distance(20)) <= 2)
    assert both_sides[10].sum() == 5


@pytest.mark.parametrize("length", [3, 4, 5, 150])
@both
def test_mistral_window_equals_the_masked_full_attention(run: Run, length: int):
    q, k, v = some_heads(length)
    found = mix(run, q, k, v, heads(c.SlidingWindow(window=4), n_heads=2, head_dim=4))
    assert deviation(found, dense(q, k, v, (distance(length) >= 0) & (distance(length) < 4))) < 1e-13


def test_mistral_window_is_that_of_v0_1_only():
    """v0.1: window 4096, theta 10,000; v0.3, like v0.2: no window, theta 1,000,000."""
    first, third = (qkv.preset(name).decoder.layers[0].attention for name in ("mistral-7b", "mistral-7b-v0.3"))
    assert (first.pattern, first.positions) == (c.SlidingWindow(window=4096), c.Rotary(theta=1e4))
    assert (third.pattern, third.positions) == (c.Causal(), c.Rotary(theta=1e6))
    assert first.kv_heads == third.kv_heads == 8


# --- Longformer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [(), (0,), (0, 77, 149)])
@both
def test_longformer_equals_dense_attention_under_the_mask(run: Run, places: tuple[int, ...]):
    length, is_global = 150, globals_at(150, *places)
    q, k, v = some_heads(length)
    seen = (np.abs(distance(length)) <= 4) | is_global | is_global[:, None]
    config = heads(c.Longformer(window=8), n_heads=2, head_dim=4)
    assert deviation(mix(run, q, k, v, config, global_tokens=is_global), dense(q, k, v, seen)) < 1e-13


@pytest.mark.parametrize("places", [(), (3,), (0, 299)])
def test_longformer_window_backend_equals_eager(places: tuple[int, ...]):
    length, is_global = 300, globals_at(300, *places)
    config = heads(c.Longformer(window=20), n_heads=2, head_dim=4)
    found, expected = (
        mix(nn, *some_heads(length), config, global_tokens=is_global, backend=name) for name in ("window", "eager")
    )
    assert deviation(found, expected) < 1e-13


@both
def test_longformer_global_tokens_have_projections_of_their_own(run: Run):
    """Only the rows of global tokens change when these projections do, and they change in all three."""
    cfg = encoder(block(attention=heads(c.Longformer(window=4), global_projections=True)), n_layers=1)
    weights, ids = weights_of(cfg), tokens(1, 12)
    is_global = globals_at(12, 3, 8)[None]
    expected = run(cfg, weights, ids, global_tokens=is_global).hidden[0]
    for name in ("q", "k", "v"):
        key = f"encoder.layers.0.attention.{name}_global_proj.weight"
        moved = np.abs(run(cfg, weights | {key: 2 * weights[key]}, ids, global_tokens=is_global).hidden[0] - expected)
        assert np.array_equal(moved.max(axis=1) > 1e-9, is_global[0])
        ordinary = key.replace("_global", "")
        moved = np.abs(
            run(cfg, weights | {ordinary: 2 * weights[ordinary]}, ids, global_tokens=is_global).hidden[0] - expected
        )
        assert np.array_equal(moved.max(axis=1) > 1e-9, ~is_global[0])


def scored_pairs(length: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many scores the window backend computes for a row with two global tokens."""
    counted = []
    plain = window_backend.dot_product

    def counting(q, k, v, *rest, **named):
        counted.append(q.shape[2] * k.shape[2])
        return plain(q, k, v, *rest, **named)

    monkeypatch.setattr(window_backend, "dot_product", counting)
    config = heads(c.Longformer(window=32), n_heads=2, head_dim=4)
    mix(nn, *some_heads(length), config, global_tokens=globals_at(length, 0, 5), backend="window")
    monkeypatch.undo()
    return sum(counted)


def test_longformer_cost_is_linear_in_scores(monkeypatch):
    counts = [scored_pairs(length, monkeypatch) for length in (512, 1024, 2048)]
    assert counts[1] / counts[0] < 2.2
    assert counts[2] / counts[1] < 2.2
    assert counts[2] < 2048**2 / 10, "of the scores of dense attention"


def test_longformer_cost_is_linear_in_memory(tmp_path):
    """Peak memory of a forward pass; the dense formula's grows fourfold."""
    cfg = encoder(block(attention=heads(c.Longformer(window=32), n_heads=2, head_dim=8)), n_layers=1, max_seq_len=4096)
    model = torch_model(cfg, weights_of(cfg), torch.float32)

    def peak(length: int, backend: str) -> int:
        ids = torch.from_numpy(tokens(1, length))
        is_global = torch.from_numpy(globals_at(length, 0, 5))[None]
        with torch.no_grad():
            return peak_bytes(lambda: model(ids, global_tokens=is_global, backend=backend), tmp_path)

    sparse = [peak(length, "window") for length in (1024, 2048, 4096)]
    assert sparse[1] / sparse[0] < 2.2
    assert sparse[2] / sparse[1] < 2.2
    assert peak(2048, "eager") / peak(1024, "eager") > 3.5


# --- BigBird ----------------------------------------------------------------------------------------------------------

BLOCK, N_RANDOM = 2, 3
BIG = c.BigBird(block=BLOCK, random_blocks=N_RANDOM, seed=7)


def graph(mask, pattern: c.BigBird, length: int) -> np.ndarray:
    """Which block sees which: every token of a block sees the same."""
    here = at(range(length))
    seen = mask(pattern, here, here)
    n = length // pattern.block
    cells = seen.reshape(n, pattern.block, n, pattern.block)
    assert np.array_equal(cells.all(axis=(1, 3)), cells.any(axis=(1, 3)))
    return cells.all(axis=(1, 3))


@masks
def test_bigbird_graph_is_window_global_and_random_blocks(mask):
    n = 20
    seen = graph(mask, BIG, n * BLOCK)
    assert seen[[0, -1]].all()
    assert seen[:, [0, -1]].all()
    apart = np.abs(distance(n))
    for b in range(1, n - 1):
        assert seen[b, apart[b] <= 1].all()
        others = np.flatnonzero(seen[b] & (apart[b] > 1) & (np.arange(n) > 0) & (np.arange(n) < n - 1))
        assert len(others) == N_RANDOM, "distinct, neither neighbours nor global"


@masks
def test_bigbird_seed_fixes_the_graph(mask):
    assert np.array_equal(graph(mask, BIG, 40), graph(mask, c.BigBird(block=2, random_blocks=3, seed=7), 40))
    graphs = [graph(mask, BIG.override({"seed": seed}), 40) for seed in range(8)]
    assert all(not np.array_equal(one, other) for one, other in itertools.combinations(graphs, 2))
    assert np.array_equal(graph(nn_mask, BIG, 40), graph(oracle_mask, BIG, 40))


@both
def test_bigbird_equals_dense_attention_under_the_mask(run: Run):
    length = 44
    q, k, v = some_heads(length)
    seen = oracle_mask(BIG, at(range(length)), at(range(length)))
    assert 0.3 < seen.mean() < 0.7
    assert deviation(mix(run, q, k, v, heads(BIG, n_heads=2, head_dim=4)), dense(q, k, v, seen)) < 1e-13


@both
def test_bigbird_short_rows_are_attended_densely_and_the_pattern_says_so(run: Run):
    """2 global blocks, 3 near ones and the random ones twice over: below that there is nothing to draw."""
    assert BIG.dense_below == (2 + 3 + 2 * N_RANDOM) * BLOCK + 1 == 23
    assert (BIG.covers(22), BIG.covers(23)) == ("all", "partial")
    for length, everything in ((22, True), (23, False)):
        q, k, _ = some_heads(length)
        weights = attention_matrix(run, q, k, heads(BIG, n_heads=2, head_dim=4))
        assert (weights > 0).all() == everything


def test_bigbird_preset_has_the_papers_blocks():
    pattern = qkv.preset("bigbird-base").encoder.layers[0].attention.pattern
    assert pattern == c.BigBird(block=64, random_blocks=3)
    assert pattern.dense_below == 705


@both
def test_e39_sparse_patterns_of_a_causal_model_stay_causal(run: Run):
    """An all-of joins them: the mask of each holds."""
    pattern = c.AllOf(patterns=(c.Causal(), c.Dilated(window=3, dilation=2)))
    cfg = decoder(block(attention=heads(pattern)))
    weights, ids = weights_of(cfg), tokens(1, 10)
    changed = ids.copy()
    changed[0, 6] = (ids[0, 6] + 1) % 23
    found, expected = (run(cfg, weights, x).hidden[0] for x in (changed, ids))
    assert np.flatnonzero(np.abs(found - expected).max(axis=1) > 1e-9).tolist() == [6, 8]
