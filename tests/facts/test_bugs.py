"""Bugs of other implementations that touch masks and positions of a model without a cache, each by its number."""

import math

import numpy as np
import pytest
import torch

from qkv import config as c
from qkv.errors import ConfigError, DataError
from qkv.reference import flash

from .small import (
    Run,
    Turn,
    at,
    attention_matrix,
    block,
    both,
    decoder,
    deviation,
    effective_base,
    encoder,
    encoder_decoder,
    frequencies,
    heads,
    masks,
    mix,
    nn,
    nn_in,
    nn_turn,
    normal,
    oracle,
    ratios,
    slopes,
    softmax,
    tokens,
    torch_model,
    turns,
    weights_of,
)

BACKENDS = ["eager", "sdpa", "window", "flash"]
T = 9
FAR = np.arange(T)[:, None] - np.arange(T)[None]  # query - key
YARN = c.YarnScaling(factor=8.0, original_max_seq_len=4096)
DYNAMIC = c.DynamicNtkScaling(factor=2.0, original_max_seq_len=8)


# --- Batches and padding ----------------------------------------------------------------------------------------------


@both
def test_b03_positions_belong_to_the_row(run: Run):
    """Rows of 5 and 9 tokens, padded on either side: row 0 is as if it were alone."""
    cfg = decoder(block(attention=heads(head_dim=8, positions=c.Rotary())))
    weights, short, long = weights_of(cfg), tokens(1, 5), tokens(1, 9)
    alone = run(cfg, weights, short).logits[0]
    filler = np.zeros((1, 4), dtype=int)
    for left in (False, True):
        parts = (filler, short) if left else (short, filler)
        real = np.arange(9) >= 4 if left else np.arange(9) < 5
        batch = np.concatenate([np.concatenate(parts, axis=1), long])
        found = run(cfg, weights, batch, valid=np.stack([real, np.full(9, True)])).logits
        assert deviation(found[0, real], alone) < 1e-12
        assert deviation(found[1], run(cfg, weights, long).logits[0]) < 1e-12


@both
def test_b18_padding_the_source_further_changes_nothing(run: Run):
    cfg = encoder_decoder()
    weights, source, target = weights_of(cfg), tokens(1, 6), tokens(1, 4, seed=1)
    alone = run(cfg, weights, target, source=source).logits
    for length in (10, 30):
        padded = np.pad(source, ((0, 0), (0, length - 6)))
        valid = np.arange(length)[None] < 6
        assert deviation(run(cfg, weights, target, source=padded, source_valid=valid).logits, alone) < 1e-12


@both
def test_b24_a_row_longer_than_the_table_of_positions_is_refused_by_name(run: Run):
    cfg = decoder(block(), embedding=c.Embedding(positions=c.Learned()), max_seq_len=1024)
    with pytest.raises(DataError, match="position"):
        run(cfg, weights_of(cfg), tokens(1, 1025))


# --- Windows ----------------------------------------------------------------------------------------------------------


def seen_by(backend: str, window: int, length: int, run: Run = nn) -> np.ndarray:
    """Which weights are not zero, by a backend of the torch model."""
    q, k = normal(length, 1, 4, seed=0), normal(length, 1, 4, seed=1)
    config = heads(c.SlidingWindow(window=window), n_heads=1, head_dim=4)
    return attention_matrix(run, q, k, config, backend=backend)[0] > 0


@pytest.mark.parametrize("backend", ["eager", "sdpa", "window"])
def test_b09_every_backend_sees_the_same_keys(backend: str):
    """A window of 4 counts the query's own key; 150 tokens are more than two chunks of the window backend."""
    for length in (16, 150):
        distance = np.arange(length)[:, None] - np.arange(length)
        assert np.array_equal(seen_by(backend, 4, length), (distance >= 0) & (distance < 4))


def test_b09_the_window_backend_sees_the_same_keys_of_interleaved_documents():
    """Every other token belongs to the other document: a window of 4 positions is 8 tokens long."""
    length, config = 150, heads(c.SlidingWindow(window=4), n_heads=1, head_dim=4)
    q, k, v = (normal(length, 1, 4, seed=s) for s in range(3))
    found, expected = (
        mix(nn, q, k, v, config, documents=np.arange(length) % 2, backend=name) for name in ("auto", "eager")
    )
    assert deviation(found, expected) < 1e-13


@pytest.mark.parametrize("is_global", [False, True])
def test_b09_the_window_backend_sees_sinks_beside_global_tokens(is_global: bool):
    length, marked = 150, np.arange(150) == 70
    pattern = c.AnyOf(patterns=(c.SlidingWindow(window=4, sinks=2), c.Longformer(window=4)))
    q, k, v = (normal(length, 1, 4, seed=s) for s in range(3))
    found, expected = (
        mix(nn, q, k, v, heads(pattern, n_heads=1, head_dim=4), global_tokens=marked & is_global, backend=name)
        for name in ("auto", "eager")
    )
    assert deviation(found, expected) < 1e-13


@pytest.mark.unhooked
def test_b09_the_compiled_backend_sees_the_same_keys():
    """On a CPU it runs in float32."""
    assert np.array_equal(seen_by("flex", 4, 16, nn_in(torch.float32)), seen_by("eager", 4, 16))


@pytest.mark.parametrize("window", [16, 17, 40])
@both
def test_b10_a_window_as_long_as_the_row_is_causal(run: Run, window: int):
    """Other libraries call this window 15: they do not count the query's own key."""
    q, k, v = (normal(16, 2, 4, seed=s) for s in range(3))
    found = mix(run, q, k, v, heads(c.SlidingWindow(window=window), n_heads=2, head_dim=4))
    assert np.array_equal(found, mix(run, q, k, v, heads(n_heads=2, head_dim=4)))
    shorter = mix(run, q, k, v, heads(c.SlidingWindow(window=15), n_heads=2, head_dim=4))
    assert np.array_equal(shorter[:15].round(12), found[:15].round(12))
    assert np.abs(shorter[15] - found[15]).max() > 1e-3


@masks
def test_b32_a_query_at_the_end_sees_the_last_keys(mask):
    """One query, six keys, a window of four: keys 2 to 5."""
    assert np.flatnonzero(mask(c.SlidingWindow(window=4), at([5]), at(range(6)))[0]).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_b33_a_window_longer_than_the_row_stays_causal(backend: str):
    assert np.array_equal(seen_by(backend, 16, 5), np.tri(5, dtype=bool))


@masks
def test_b33_the_mask_of_a_window_longer_than_the_row_is_causal(mask):
    assert np.array_equal(mask(c.SlidingWindow(window=16), at(range(5)), at(range(5))), np.tri(5, dtype=bool))


@both
def test_b41_any_length_and_any_number_of_global_tokens(run: Run):
    """513 tokens with windows of 512: neither is a multiple of the other. Two global tokens see and are seen by all."""
    length, is_global = 513, np.zeros(513, dtype=bool)
    is_global[[0, 300]] = True
    q, k, v = (normal(length, 1, 4, seed=s) for s in range(3))
    seen = (np.abs(np.arange(length)[:, None] - np.arange(length)) <= 256) | is_global | is_global[:, None]
    expected = softmax((q[:, 0] @ k[:, 0].T) / 2, seen) @ v[:, 0]
    config = heads(c.Longformer(window=512), n_heads=1, head_dim=4)
    assert deviation(mix(run, q, k, v, config, global_tokens=is_global)[:, 0], expected) < 1e-12
    weights = attention_matrix(run, q[:40], k[:40], config.override({"pattern": c.Longformer(window=8)}))
    assert weights.shape == (1, 40, 40)


def test_b41_the_window_backend_takes_any_length():
    is_global = np.zeros(513, dtype=bool)
    is_global[[0, 300]] = True
    q, k, v = (normal(513, 2, 4, seed=s) for s in range(3))
    for window in (16, 64, 512):
        config = heads(c.Longformer(window=window), n_heads=2, head_dim=4)
        found, dense = (
            mix(nn, q, k, v, config, global_tokens=is_global, backend=backend) for backend in ("window", "eager")
        )
        assert deviation(found, dense) < 1e-13


# --- Masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_b29_a_row_that_sees_nothing_gives_zero_and_no_nan_backwards(dtype: torch.dtype, backend: str):
    """One row of the batch has no real token, and so nothing to see."""
    cfg = encoder(block(attention=heads(c.Bidirectional()), norm=c.NoNorm()), norm=c.NoNorm())
    model = torch_model(cfg, weights_of(cfg), dtype)
    ids, valid = torch.from_numpy(tokens(2, 5)), torch.tensor([[True] * 5, [False] * 5])
    attention = model.encoder.layers[0].attention
    outputs = []
    handle = attention.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    hidden = model(ids, valid=valid, backend=backend).hidden
    handle.remove()
    assert not outputs[0][1].any()
    assert hidden.isfinite().all()
    hidden[1].sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(g.isfinite().all() for g in gradients.values())
    for name in ("q_proj", "k_proj", "v_proj"):
        assert not gradients[f"encoder.layers.0.attention.{name}.weight"].any()


def test_b29_the_oracle_and_the_tiled_form_give_zero_too():
    x, nothing = normal(5, 4), np.zeros((5, 5), dtype=bool)
    out, lse = flash.tiled_attention(x, x, x, nothing, scale=0.5, block=2)
    assert not out.any()
    for gradient in flash.tiled_attention_backward(x, x, x, nothing, out, lse, x, scale=0.5, block=2):
        assert not gradient.any()
    q = normal(5, 2, 4)
    assert not mix(oracle, q, q, q, heads(n_heads=2, head_dim=4), valid=np.full(5, False)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
def test_b31_the_future_does_not_leak_by_a_single_bit(backend: str, dtype: torch.dtype):
    cfg = decoder(block(attention=heads(head_dim=8, positions=c.Rotary())))
    model, ids = torch_model(cfg, weights_of(cfg), dtype), torch.from_numpy(tokens(1, 12))
    with torch.no_grad():
        before = model(ids, backend=backend).logits
        for place in (1, 6, 11):
            changed = ids.clone()
            changed[0, place] = (ids[0, place] + 1) % 23
            after = model(changed, backend=backend).logits
            assert torch.equal(after[:, :place], before[:, :place])
            assert not torch.equal(after[:, place], before[:, place])


def test_b31_nor_in_the_oracle():
    cfg = decoder()
    weights, ids = weights_of(cfg), tokens(1, 8)
    changed = ids.copy()
    changed[0, 5] = (ids[0, 5] + 1) % 23
    assert np.array_equal(oracle(cfg, weights, changed).logits[:, :5], oracle(cfg, weights, ids).logits[:, :5])


def test_b37_two_blocks_of_keys_merged_by_their_denominators_are_one():
    """Queries of the first block see none of the second: causality across blocks is by absolute position."""
    q, k, v = (normal(8, 4, seed=s) for s in range(3))
    whole, _ = flash.tiled_attention(q, k, v, np.tri(8, dtype=bool), scale=0.5, block=8)
    parts = [
        flash.tiled_attention(q, k[keys], v[keys], np.tri(8, dtype=bool)[:, keys], scale=0.5, block=3)
        for keys in (slice(0, 4), slice(4, 8))
    ]
    assert not parts[1][0][:4].any()
    assert deviation(flash.merge(*parts[0], *parts[1])[0], whole) < 1e-14


# --- Heads ------------------------------------------------------------------------------------------------------------


@both
def test_b39_keys_are_repeated_over_heads_and_not_over_time(run: Run):
    """As many heads as tokens, where the two axes could be taken for each other without an error."""
    q, k, v = normal(4, 4, 4, seed=0), normal(4, 2, 4, seed=1), normal(4, 2, 4, seed=2)
    expected = np.zeros((4, 4, 4))
    for t, h in np.ndindex(4, 4):
        power = np.exp(k[: t + 1, h // 2] @ q[t, h] / 2)
        expected[t, h] = power @ v[: t + 1, h // 2] / power.sum()
    assert deviation(mix(run, q, k, v, heads(n_heads=4, n_kv_heads=2, head_dim=4)), expected) < 1e-13


@both
def test_b40_28_heads_over_4_map_7_to_1_and_7_over_2_are_refused(run: Run):
    q, k = normal(T, 28, 4, seed=0), normal(T, 4, 4, seed=1)
    v = np.broadcast_to(np.arange(4)[:, None], (T, 4, 4)).astype(float)
    read = mix(run, q, k, v, heads(n_heads=28, n_kv_heads=4, head_dim=4)).round(12)
    assert read[0, :, 0].tolist() == [0] * 7 + [1] * 7 + [2] * 7 + [3] * 7
    with pytest.raises(ConfigError, match="n_kv_heads: must divide n_heads"):
        heads(n_heads=7, n_kv_heads=2, head_dim=4)


# --- Positions --------------------------------------------------------------------------------------------------------


@turns
def test_b48_positions_stay_exact(turn: Turn):
    """bfloat16 would make 15936 of 15962: the cosine of pair 0 is -0.908, not -0.268."""
    turned = turn(c.Rotary(), np.array([[[1.0, 0.0]]]), np.array([15_962]))[0, 0]
    assert turned[0] == pytest.approx(math.cos(15_962), abs=1e-12)
    assert round(float(turned[0]), 3) == -0.908
    assert round(math.cos(15_936), 3) == -0.268


def test_b48_positions_stay_exact_in_a_bfloat16_model():
    turned = nn_turn(c.Rotary(), np.array([[[1.0, 0.0]]]), np.array([15_962]), torch.bfloat16)[0, 0]
    assert turned[0] == pytest.approx(-0.908, abs=2**-8), "only the cosine itself is rounded"


@both
def test_b50_a_long_row_does_not_change_a_short_one_after_it(run: Run):
    """Dynamic rules look at the row: nothing is remembered, and rows of a batch do not meet."""
    cfg = decoder(block(attention=heads(head_dim=8, positions=c.Rotary(scaling=DYNAMIC))))
    weights, short, long = weights_of(cfg), tokens(1, 6), tokens(1, 30)
    first, between, third = (run(cfg, weights, ids).logits for ids in (short, long, short))
    assert between.shape[1] == 30
    assert np.array_equal(first, third)
    padded = np.concatenate([short, np.zeros((1, 24), dtype=int)], axis=1)
    valid = np.arange(30)[None] < np.array([[6], [30]])
    batch = run(cfg, weights, np.concatenate([padded, long]), valid=valid).logits
    assert deviation(batch[0, :6], first[0]) < 1e-12
    assert deviation(batch[1], between[0]) < 1e-12


@turns
def test_b51_dynamic_ntk_base(turn: Turn):
    scaling = c.DynamicNtkScaling(factor=2.0, original_max_seq_len=2048)
    assert effective_base(turn, scaling, length=8192) == pytest.approx(72_195.86, abs=0.005)
    assert effective_base(turn, scaling, length=2048) == pytest.approx(10_000, rel=1e-12)
    assert effective_base(turn, scaling, length=5001) > 10_000, "position 5000 needs no table"


@both
def test_b51_positions_beyond_the_trained_length_need_no_table(run: Run):
    scaling = c.DynamicNtkScaling(factor=2.0, original_max_seq_len=4)
    cfg = decoder(block(attention=heads(head_dim=8, positions=c.Rotary(scaling=scaling))), max_seq_len=4)
    places = np.array([[0, 1, 5000]])
    assert np.isfinite(run(cfg, weights_of(cfg), tokens(1, 3), positions=places).logits).all()


@turns
def test_b52_without_scaling_the_scale_is_one(turn: Turn):
    assert np.array_equal(ratios(turn, c.NoScaling()), np.ones(64))
    assert c.Rotary.from_dict({"kind": "rotary"}).scaling == c.NoScaling()
    plain = c.Rotary(scaling=c.DynamicNtkScaling(factor=2.0, original_max_seq_len=64))
    assert deviation(frequencies(turn, plain, 128, length=64)[0], frequencies(turn, c.Rotary(), 128)[0]) < 1e-13, (
        "dynamic: nothing to scale yet"
    )


@turns
def test_b54_yarn_without_rounding_the_ends_of_the_ramp(turn: Turn):
    """The ends are the pairs with 32 turns and with 1 turn; rounded they are 20 and 46."""

    def pair_with(n: float) -> float:
        return 128 * math.log(4096 / (n * 2 * math.pi)) / (2 * math.log(10_000))

    low, high = pair_with(32), pair_with(1)
    assert (math.floor(low), math.ceil(high)) == (20, 46)
    ramp = np.clip((np.arange(64) - low) / (high - low), 0, 1)
    exact = YARN.override({"truncate": False})
    assert deviation(ratios(turn, exact), 1 - ramp + ramp / 8) < 1e-13
    assert deviation(ratios(turn, exact), ratios(turn, YARN)) > 1e-3


@turns
def test_b54_the_attention_factor_multiplies_cosines_and_not_the_exponent(turn: Turn):
    other = YARN.override({"attention_factor": 1.0})
    found, factor = frequencies(turn, c.Rotary(scaling=other), 128)
    assert factor == pytest.approx(1, abs=1e-15)
    assert deviation(found, frequencies(turn, c.Rotary(scaling=YARN), 128)[0]) < 1e-14


@both
def test_b58_alibi_slopes_of_8_heads_start_at_one_half(run: Run):
    assert deviation(slopes(run, 8), 2.0 ** -np.arange(1, 9)) < 1e-13


@both
def test_b59_a_bias_of_slope_times_key_position_is_the_same_where_attention_is_causal_only(run: Run):
    """Rows differ by a constant, slope times the query's position, which the softmax does not see."""
    q, k = normal(T, 2, 4, seed=1), normal(T, 2, 4, seed=2)
    by_key = np.einsum("thf,shf->hts", q, k) / 2 + np.array([2**-4, 2**-8])[:, None, None] * np.arange(T)
    causal = attention_matrix(run, q, k, heads(n_heads=2, head_dim=4, positions=c.Alibi()))
    assert deviation(causal, softmax(by_key, FAR >= 0)) < 1e-13
    two_sided = attention_matrix(run, q, k, heads(c.Bidirectional(), n_heads=2, head_dim=4, positions=c.Alibi()))
    assert deviation(two_sided, softmax(by_key, np.full((T, T), True))) > 0.01


@pytest.mark.parametrize("left", [0, 3])
@both
def test_b62_the_first_real_token_reads_row_2_of_a_table_with_two_rows_more(run: Run, left: int):
    """RoBERTa's and BART's tables hold positions from row 2 on, also where padding stands before the text."""
    silent = block(norm=c.NoNorm())
    cfg = encoder(silent, norm=c.NoNorm(), embedding=c.Embedding(positions=c.Learned(offset=2)), max_seq_len=10)
    weights = {name: np.zeros(shape) for name, (shape, _) in cfg.parameters().items()}
    weights["embed.positions.weight"] = np.repeat(np.arange(12.0)[:, None], 16, axis=1)
    valid = np.arange(7)[None] >= left
    found = run(cfg, weights, tokens(1, 7), valid=valid).hidden[0, left:, 0]
    assert found.tolist() == list(range(2, 9 - left))
