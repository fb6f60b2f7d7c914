"""Heads: how many parameters and operations they cost, and which keys and values they read."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv import config as c

from .small import (
    Run,
    array,
    block,
    both,
    decoder,
    deviation,
    encoder_decoder,
    heads,
    mix,
    normal,
    tokens,
    torch_model,
    watched,
    weights_of,
)

T = 6


def of_512(n_heads: int, **options) -> c.ModelConfig:
    """One causal layer of width 512."""
    attention = heads(n_heads=n_heads, head_dim=512 // n_heads, **options)
    return decoder(block(attention=attention), n_layers=1, d_model=512)


def n_attention(cfg: c.ModelConfig) -> int:
    return sum(p.size for name, p in cfg.shapes().items() if ".attention." in name)


def flops(cfg: c.ModelConfig, length: int) -> int:
    """Operations of the matrix products of one forward pass, a multiplication and an addition counting as two."""
    model = torch_model(cfg, weights_of(cfg), torch.float32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long), backend="eager")
    return counter.get_total_flops()


@pytest.mark.parametrize("n_heads", [1, 8, 16])
def test_multi_head_attention_has_1048576_parameters(n_heads: int):
    cfg = of_512(n_heads)
    assert n_attention(cfg) == 4 * 512**2 == 1_048_576
    model = torch_model(cfg, weights_of(cfg))
    assert sum(p.numel() for p in model.decoder.layers[0].attention.parameters()) == 1_048_576


def test_e49_products_do_not_depend_on_the_number_of_heads_and_scores_do():
    """One head needs W_O as well. What grows with the heads are the scores: h n^2 numbers to store and to normalise."""
    assert flops(of_512(1), 16) == flops(of_512(8), 16) == flops(of_512(16), 16)
    for n_heads in (1, 8, 16):
        name = "decoder.layers.0.attention.weights"
        assert watched(of_512(n_heads), tokens(1, 10), name)[name].numel() == n_heads * 10**2


@pytest.mark.parametrize("n_heads", [1, 8])
@both
def test_multi_head_attention_equals_head_by_head(run: Run, n_heads: int):
    """d_k = d_v = 64 / h; head i owns rows i d_k to (i + 1) d_k of each projection."""
    width = 64 // n_heads
    cfg = decoder(block(attention=heads(n_heads=n_heads, head_dim=width)), n_layers=1, d_model=64)
    weights, ids = weights_of(cfg), tokens(1, T)
    at = "decoder.layers.0.attention."
    silent = {name: np.zeros_like(w) for name, w in weights.items() if ".ffn." in name}
    plain = cfg.override({"decoder.layers.*.norm": c.NoNorm(), "decoder.norm": c.NoNorm()})
    kept = {name: w for name, w in (weights | silent).items() if name in plain.shapes()}
    x = weights["embed.tokens.weight"][ids[0]]
    joined = []
    for i in range(n_heads):
        rows = slice(i * width, (i + 1) * width)
        q, k, v = (x @ weights[f"{at}{name}.weight"][rows].T for name in ("q_proj", "k_proj", "v_proj"))
        scores = np.where(np.tri(T, dtype=bool), q @ k.T / width**0.5, -np.inf)
        power = np.exp(scores - scores.max(axis=1, keepdims=True))
        joined.append(power / power.sum(axis=1, keepdims=True) @ v)
    expected = x + np.concatenate(joined, axis=1) @ weights[f"{at}o_proj.weight"].T
    assert deviation(run(plain, kept, ids).hidden[0], expected) < 1e-13


def test_e31_attention_across_two_sequences_exists():
    """Queries of the decoder (T), keys and values of the encoder (S)."""
    ids = tokens(2, 5)
    name = "decoder.layers.0.cross_attention.weights"
    cross = watched(encoder_decoder(), ids, name, source=tokens(2, 8))[name]
    assert cross.shape == (2, 4, 5, 8)
    assert deviation(array(cross).sum(-1), np.ones((2, 4, 5))) < 1e-14


def test_e70_heads_need_not_fill_the_model():
    wide = {"t5-3b": 4096, "t5-11b": 16_384, "palm-540b": 12_288, "gemma-3-270m": 1024}
    widths = {"t5-3b": 1024, "t5-11b": 1024, "palm-540b": 18_432, "gemma-3-270m": 640}
    for name, total in wide.items():
        cfg = qkv.preset(name)
        attention = cfg.decoder.layers[0].attention
        assert (attention.n_heads * attention.head_dim, cfg.d_model) == (total, widths[name])


@both
def test_e70_a_model_whose_heads_are_wider_runs(run: Run):
    cfg = decoder(block(attention=heads(n_heads=3, head_dim=10)))
    assert run(cfg, weights_of(cfg), tokens(1, 4)).hidden.shape == (1, 4, 16)


# --- Grouped and single keys and values -------------------------------------------------------------------------------


def grouped(n_heads: int, n_kv_heads: int | None) -> c.MultiHead:
    return heads(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=4)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4, 8])
@both
def test_grouped_query_attention_head_j_reads_key_value_head_j_g_over_h(run: Run, n_kv_heads: int):
    """The values of key-value head i are all i: each head's output names the one that it read."""
    q, k = normal(T, 8, 4, seed=0), normal(T, n_kv_heads, 4, seed=1)
    v = np.broadcast_to(np.arange(n_kv_heads)[:, None], (T, n_kv_heads, 4)).astype(float)
    read = mix(run, q, k, v, grouped(8, n_kv_heads))
    expected = np.broadcast_to((np.arange(8) * n_kv_heads // 8)[:, None], (T, 8, 4))
    assert np.array_equal(read.round(12), expected), "repeated in place, not tiled"


@both
def test_grouped_query_attention_with_all_heads_is_multi_head_to_the_bit(run: Run):
    q, k, v = (normal(T, 4, 4, seed=s) for s in range(3))
    assert np.array_equal(mix(run, q, k, v, grouped(4, 4)), mix(run, q, k, v, grouped(4, None)))
    cfg, ids = decoder(block(attention=grouped(4, 4))), tokens(2, T)
    explicit = decoder(block(attention=grouped(4, None)))
    assert np.array_equal(run(cfg, weights_of(cfg), ids).logits, run(explicit, weights_of(cfg), ids).logits)


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@both
def test_grouped_query_attention_is_multi_head_with_repeated_keys_to_the_bit(run: Run, n_kv_heads: int):
    """With one group it is multi-query attention: all heads read the same keys and values."""
    q, k, v = normal(T, 4, 4, seed=0), normal(T, n_kv_heads, 4, seed=1), normal(T, n_kv_heads, 4, seed=2)
    repeated = (np.repeat(x, 4 // n_kv_heads, axis=1) for x in (k, v))
    assert np.array_equal(mix(run, q, k, v, grouped(4, n_kv_heads)), mix(run, q, *repeated, grouped(4, 4)))


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
def test_grouped_query_attention_in_every_backend(backend: str):
    from .small import nn

    q, k, v = normal(T, 4, 4, seed=0), normal(T, 2, 4, seed=1), normal(T, 2, 4, seed=2)
    repeated = (np.repeat(x, 2, axis=1) for x in (k, v))
    found = mix(nn, q, k, v, grouped(4, 2), backend=backend)
    assert deviation(found, mix(nn, q, *repeated, grouped(4, 4), backend=backend)) < 1e-14


def test_grouped_query_attention_saves_keys_and_values():
    """Projections of 8 heads over 8, 2 and 1 of width 64: d^2 (2 + 2 g/h)."""
    for n_kv_heads, expected in ((8, 4), (2, 2.5), (1, 2.25)):
        assert n_attention(of_512(8, n_kv_heads=n_kv_heads)) == expected * 512**2


def test_e14_e42_which_llamas_group_their_keys():
    groups = {
        "llama-7b": 32, "llama-13b": 40, "llama-33b": 52, "llama-65b": 64, "llama-2-7b": 32, "llama-2-13b": 40,
        "llama-2-70b": 8, "codellama-34b": 8, "llama-3-8b": 8, "llama-3-70b": 8, "llama-3-405b": 8,
    }  # fmt: skip
    for name, n_kv_heads in groups.items():
        assert qkv.preset(name).decoder.layers[0].attention.kv_heads == n_kv_heads, name
