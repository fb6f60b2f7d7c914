"""Attention in tiles, on several ranks, and what attention costs."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qkv import config as c
from qkv.errors import BackendError
from qkv.reference import flash

from .small import (
    block,
    decoder,
    deviation,
    encoder,
    heads,
    mix,
    nn_in,
    normal,
    oracle,
    peak_bytes,
    tokens,
    torch_model,
    watched,
    weights_of,
)

N, WIDTH = 50, 8


def problem() -> tuple[np.ndarray, ...]:
    """q, k, v, d_out, normal."""
    return tuple(normal(N, WIDTH, seed=s) for s in range(4))


def dense_gradients(allowed: np.ndarray, scale: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """The output and d_q, d_k, d_v by torch's autograd over the whole matrix of scores."""
    *inputs, d_out = (torch.tensor(x) for x in problem())
    q, k, v = (x.requires_grad_() for x in inputs)
    scores = (q @ k.T * scale).masked_fill(~torch.from_numpy(allowed), -torch.inf)
    out = scores.softmax(-1) @ v
    return out.detach().numpy(), [g.numpy() for g in torch.autograd.grad(out, (q, k, v), d_out)]


# --- FlashAttention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
def test_flash_attention_in_tiles_equals_the_dense_formula_forward_and_backward(block_size: int):
    q, k, v, d_out = problem()
    allowed = np.tri(N, dtype=bool)
    out, lse = flash.tiled_attention(q, k, v, allowed, scale=0.3, block=block_size)
    expected, gradients = dense_gradients(allowed, 0.3)
    assert deviation(out, expected) < 1e-13
    found = flash.tiled_attention_backward(q, k, v, allowed, out, lse, d_out, scale=0.3, block=block_size)
    for mine, theirs in zip(found, gradients, strict=True):
        assert deviation(mine, theirs) < 1e-12


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("pattern", [c.Causal(), c.Bidirectional()], ids=lambda p: p.kind)
def test_flash_attention_of_the_model_equals_the_oracle(pattern: c.Pattern, dtype: torch.dtype, bound: float):
    """Inputs are rounded to the precision first, so that both sides are given the same numbers."""
    q, k, v = (np.asarray(torch.from_numpy(normal(40, 2, 8, seed=s)).to(dtype).double()) for s in range(3))
    config = heads(pattern, n_heads=2, head_dim=8)
    expected = mix(oracle, q, k, v, config)
    assert deviation(mix(nn_in(dtype), q, k, v, config, backend="flash"), expected) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_flash_attention_gradients_equal_those_of_the_eager_formula(dtype: torch.dtype, bound: float):
    """Of the attention's inputs; the reference runs in float64 on the same rounded weights."""
    cfg = decoder(block(attention=heads(n_heads=2, head_dim=8), norm=c.NoNorm()), n_layers=1, norm=c.NoNorm())
    weights = {name: np.asarray(torch.from_numpy(w).to(dtype).double()) for name, w in weights_of(cfg).items()}
    weights = {name: w if ".attention." in name or "embed" in name else 0 * w for name, w in weights.items()}
    ids = torch.from_numpy(tokens(1, 24))
    gradients = []
    for precision, backend in ((torch.float64, "eager"), (dtype, "flash")):
        model = torch_model(cfg, weights, precision)
        model(ids, backend=backend).hidden.sum().backward()
        attention = model.decoder.layers[0].attention
        gradients.append([getattr(attention, name).weight.grad for name in ("q_proj", "k_proj", "v_proj")])
    for mine, theirs in zip(gradients[1], gradients[0], strict=True):
        assert deviation(mine, theirs) < bound


def test_flash_attention_gives_zero_to_rows_that_see_nothing():
    q, k, v, d_out = problem()
    allowed = np.tri(N, dtype=bool)
    allowed[[4, 30]] = False
    out, lse = flash.tiled_attention(q, k, v, allowed, scale=0.3, block=16)
    assert not out[[4, 30]].any()
    assert np.isneginf(lse[[4, 30]]).all()
    d_q, d_k, d_v = flash.tiled_attention_backward(q, k, v, allowed, out, lse, d_out, scale=0.3, block=16)
    assert not d_q[[4, 30]].any()
    assert np.isfinite(d_k).all()
    assert np.isfinite(d_v).all()


@pytest.mark.parametrize("backwards", [False, True])
def test_flash_attention_memory_grows_with_the_length(backwards: bool, tmp_path):
    """Peak memory of the model above its fixed buffers, as torch's allocator records it; the formula's is quadratic."""
    cfg = decoder(block(attention=heads(n_heads=2, head_dim=8)), n_layers=1, max_seq_len=4096)
    model = torch_model(cfg, weights_of(cfg), torch.float32)

    def peak(length: int, backend: str = "auto") -> int:
        ids = torch.from_numpy(tokens(1, length))

        def work() -> None:
            with torch.set_grad_enabled(backwards):
                hidden = model(ids, backend=backend).hidden
            if backwards:
                hidden.sum().backward()

        work()
        return peak_bytes(work, tmp_path)

    one, two, four = (peak(length) for length in (1024, 2048, 4096))
    assert four - two < 2.2 * (two - one)
    assert four < 4096**2 * 4, "less than the scores of one head alone"
    assert peak(2048, "eager") > 2 * 2048**2 * 4 > 4 * two, "which the formula holds for both heads"


def test_flash_attention_memory_of_the_tiles_grows_with_the_length():
    def peak(length: int) -> int:
        q, k, v, d_out = (normal(length, WIDTH, seed=s) for s in range(4))
        tracemalloc.start()
        out, lse = flash.tiled_attention(q, k, v, lambda row, column: column <= row, scale=0.3, block=64)
        flash.tiled_attention_backward(q, k, v, lambda row, column: column <= row, out, lse, d_out, scale=0.3, block=64)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    one, two = peak(512), peak(1024)
    assert two < 2.2 * one
    assert two < 1024**2 * 8 / 4


def test_e41_the_backend_depends_on_the_call_and_none_is_taken_in_silence():
    """A mask that torch's fused kernel cannot have: forced, it refuses; left free, another is taken, and is exact."""
    cfg = decoder(block(attention=heads(c.SlidingWindow(window=3), n_heads=2, head_dim=8)))
    weights, ids = weights_of(cfg), tokens(1, 12)
    model = torch_model(cfg, weights)
    with pytest.raises(BackendError, match=r"flash.*sliding-window.*capable: .*eager"):
        model(torch.from_numpy(ids), backend="flash")
    out = model(torch.from_numpy(ids)).logits
    assert deviation(out, oracle(cfg, weights, ids).logits) < 1e-12


def test_e41_the_backward_pass_computes_the_scores_again():
    """One tile-sized product of queries and keys forward, and as many again backward: nothing but lse is kept."""
    asked = []

    def allowed(row: np.ndarray, column: np.ndarray) -> np.ndarray:
        asked.append(row.size * column.size)
        return column <= row

    q, k, v, d_out = problem()
    out, lse = flash.tiled_attention(q, k, v, allowed, scale=0.3, block=10)
    forward = sum(asked)
    flash.tiled_attention_backward(q, k, v, allowed, out, lse, d_out, scale=0.3, block=10)
    assert forward == N**2
    assert sum(asked) == 2 * forward


# --- Ring attention ---------------------------------------------------------------------------------------------------


def ring(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, ranks: int) -> np.ndarray:
    """Each rank holds a part of the rows; the parts of keys and values go round, and results are merged."""
    edges = [len(q) * rank // ranks for rank in range(ranks + 1)]
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    merged = []
    for rank, rows in enumerate(parts):
        total = np.zeros((rows.stop - rows.start, v.shape[1])), np.full(rows.stop - rows.start, -np.inf)
        for step in range(ranks):
            held = parts[(rank + step) % ranks]
            piece = flash.tiled_attention(q[rows], k[held], v[held], allowed[rows, held], scale=0.3, block=8)
            total = flash.merge(*total, *piece)
        merged.append(total[0])
    return np.concatenate(merged)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("documents", [1, 5])
def test_ring_attention_equals_one_rank(ranks: int, documents: int):
    """50 rows are not a multiple of 3, 4 or 7. With packed documents a row sees its own document only."""
    q, k, v, _ = problem()
    document = np.arange(N) * documents // N
    allowed = np.tri(N, dtype=bool) & (document[:, None] == document)
    whole, _ = flash.tiled_attention(q, k, v, allowed, scale=0.3, block=N)
    assert deviation(ring(q, k, v, allowed, ranks), whole) < 1e-12


# --- What attention costs ---------------------------------------------------------------------------------------------


def layer_flops(length: int, d_model: int, n_heads: int) -> int:
    """Operations of the products of one layer, counted by torch: a model of two layers less one of one."""

    def count(n_layers: int) -> int:
        layer = block(
            attention=heads(c.Bidirectional(), n_heads=n_heads, head_dim=d_model // n_heads),
            ffn=c.Dense(d_ff=4 * d_model, activation="relu"),
        )
        cfg = encoder(layer, n_layers=n_layers, d_model=d_model)
        model = torch_model(cfg, weights_of(cfg), torch.float32)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.long), backend="eager")
        return counter.get_total_flops()

    return count(2) - count(1)


@pytest.mark.parametrize(("length", "d_model", "n_heads"), [(8, 16, 1), (8, 16, 4), (40, 16, 2), (96, 16, 4)])
def test_e40_a_layer_costs_24_n_d2_and_4_n2_d(length: int, d_model: int, n_heads: int):
    """Projections add n d^2 to attention's n^2 d, and the two halves are equal at n = 6 d, here 96."""
    linear, quadratic = 24 * length * d_model**2, 4 * length**2 * d_model
    assert layer_flops(length, d_model, n_heads) == linear + quadratic
    assert (linear == quadratic) == (length == 6 * d_model)


def test_e40_scores_are_stored_per_head():
    name = "encoder.layers.0.attention.weights"
    for n_heads in (1, 4):
        cfg = encoder(block(attention=heads(c.Bidirectional(), n_heads=n_heads)), n_layers=1)
        assert watched(cfg, tokens(1, 10), name)[name].numel() == n_heads * 10**2


def test_complexity_four_times_the_context_is_sixteen_times_the_scores():
    name = "encoder.layers.0.attention.weights"
    sizes = [watched(encoder(), tokens(1, length), name)[name].numel() for length in (8, 32)]
    assert sizes[1] == 16 * sizes[0]
