"""What must not change a result: padding, packing, batching, the future, where a row starts, the order of tokens."""

import numpy as np
import pytest

import qkv.config as c
from qkv import reference

from .small import EXPERTS, attention, block, deviation, encoder, encoder_decoder, model, stack, tokens

LONG = c.DynamicNtkScaling(factor=2.0, original_max_seq_len=4)
CAUSAL: dict[str, c.MultiHead | c.Latent] = {
    "none": attention(),
    "rotary": attention(positions=c.Rotary()),
    "rotary-dynamic": attention(positions=c.Rotary(scaling=LONG), log_n=3),
    "alibi": attention(positions=c.Alibi()),
    "t5": attention(positions=c.T5Buckets(n_buckets=4, max_distance=6, bidirectional=False)),
    "shaw": attention(positions=c.Shaw(max_distance=2)),
    "transformer-xl": attention(positions=c.TransformerXL(clamp=3)),
    "window-sinks": attention(pattern=c.SlidingWindow(window=2, sinks=1), sinks=True, softcap=2.0),
    "chunked": attention(pattern=c.Chunked(chunk=3), qk_norm=c.RMSNorm()),
    "dilated": attention(pattern=c.Dilated(window=2, dilation=2)),
    "latent": c.Latent(
        n_heads=2, q_rank=6, kv_rank=5, nope_dim=4, rope_dim=2, v_head_dim=3, pattern=c.Causal(), positions=c.Rotary()
    ),
}
BOTH_SIDES = {
    "none": attention(pattern=c.Bidirectional()),
    "t5": attention(pattern=c.Bidirectional(), positions=c.T5Buckets(n_buckets=8, max_distance=6, bidirectional=True)),
    "shaw": attention(pattern=c.Bidirectional(), positions=c.Shaw(max_distance=2)),
    "bigbird": attention(pattern=c.BigBird(block=1, random_blocks=1), positions=c.Alibi()),
}


def lm(name: str) -> c.ModelConfig:
    """A two-layer causal language model, the second layer with experts, with learned positions where it knows none."""
    own = CAUSAL[name]
    positions = c.Learned() if own.positions.kind == "none" else c.NoPositions()
    blocks = block(attention=own), block(attention=own, ffn=EXPERTS)
    return model(stack(*blocks), embedding=c.Embedding(positions=positions))


@pytest.mark.parametrize("name", CAUSAL)
def test_no_future_token_reaches_the_past(name: str):
    cfg = lm(name)
    weights = reference.random_weights(cfg, seed=7)
    one = tokens(1, 9)
    other = one.copy()
    other[0, 6:] = (other[0, 6:] + 1) % 20
    a, b = reference.forward(cfg, weights, one), reference.forward(cfg, weights, other)
    assert np.array_equal(a[:, :6], b[:, :6])
    assert np.abs(a[:, 6:] - b[:, 6:]).min() > 0


@pytest.mark.parametrize("name", CAUSAL)
def test_padding_left_right_and_none_agree(name: str):
    cfg = lm(name)
    weights = reference.random_weights(cfg, seed=8)
    check_padding(cfg, weights)


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_padding_of_an_encoder_agrees(name: str):
    cfg = encoder(block(attention=BOTH_SIDES[name]), head=c.TokenClassifier(n_classes=3))
    check_padding(cfg, reference.random_weights(cfg, seed=9))


def check_padding(cfg: c.ModelConfig, weights: dict[str, np.ndarray]) -> None:
    row = tokens(7, seed=1)
    alone = reference.forward(cfg, weights, row[None])[0]
    padding, real = np.array([3, 5]), np.array([False, True])
    batch = np.stack([np.append(padding, row), np.append(row, padding), [*row[:3], 3, *row[3:6], 5, row[6]]])
    valid = np.stack([np.repeat(real, (2, 7)), np.repeat(~real, (7, 2)), [1, 1, 1, 0, 1, 1, 1, 0, 1]]).astype(bool)
    padded = reference.forward(cfg, weights, batch, valid=valid)
    for b in range(3):
        assert deviation(padded[b][valid[b]], alone) < 1e-12


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_documents_agree_with_each_alone(name: str):
    cfg = lm(name)
    check_packing(cfg, reference.random_weights(cfg, seed=10))


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_packed_documents_of_an_encoder_agree_with_each_alone(name: str):
    cfg = encoder(block(attention=BOTH_SIDES[name]), head=c.TokenClassifier(n_classes=3))
    check_packing(cfg, reference.random_weights(cfg, seed=11))


def check_packing(cfg: c.ModelConfig, weights: dict[str, np.ndarray]) -> None:
    row = tokens(1, 12, seed=2)
    documents = np.array([[7] * 3 + [2] * 8 + [9]])
    packed = reference.forward(cfg, weights, row, documents=documents)[0]
    for start, stop in [(0, 3), (3, 11), (11, 12)]:
        alone = reference.forward(cfg, weights, row[:, start:stop])[0]
        assert deviation(packed[start:stop], alone) < 1e-12


@pytest.mark.parametrize("name", CAUSAL)
def test_a_row_of_a_batch_is_the_row_alone(name: str):
    cfg = lm(name)
    weights, batch = reference.random_weights(cfg, seed=12), tokens(3, 5, seed=3)
    together = reference.forward(cfg, weights, batch)
    assert np.array_equal(together, np.concatenate([reference.forward(cfg, weights, row[None]) for row in batch]))


@pytest.mark.parametrize("name", ["rotary", "alibi", "t5", "shaw", "transformer-xl"])
def test_relative_schemes_do_not_see_where_a_row_starts(name: str):
    cfg = lm(name)
    weights, row = reference.random_weights(cfg, seed=13), tokens(1, 6)
    shifted = reference.forward(cfg, weights, row, positions=np.arange(100, 106)[None])
    assert deviation(shifted, reference.forward(cfg, weights, row)) < 1e-11


def test_absolute_positions_do_see_it():
    cfg = model(embedding=c.Embedding(positions=c.Sinusoidal()))
    weights, row = reference.random_weights(cfg, seed=14), tokens(1, 6)
    shifted = reference.forward(cfg, weights, row, positions=np.arange(3, 9)[None])
    assert deviation(shifted, reference.forward(cfg, weights, row)) > 0.01


def test_without_positions_an_encoder_is_permutation_equivariant():
    cfg = encoder(head=c.TokenClassifier(n_classes=3))
    weights, row, order = reference.random_weights(cfg, seed=15), tokens(6), np.array([3, 0, 5, 1, 4, 2])
    plain, permuted = (reference.forward(cfg, weights, r[None])[0] for r in (row, row[order]))
    assert deviation(permuted, plain[order]) < 1e-12
    assert deviation(permuted, plain) > 0.01  # equivariant, not invariant


@pytest.mark.parametrize(("n_layers", "blind"), [(1, True), (2, False)])
def test_one_causal_layer_is_blind_to_the_order_of_the_past_and_two_are_not(n_layers: int, blind: bool):
    cfg = model(stack(n_layers=n_layers))
    weights, row = reference.random_weights(cfg, seed=16), np.array([1, 2, 3, 4, 5])
    last, other = (reference.forward(cfg, weights, r[None])[0, -1] for r in (row, row[[2, 0, 3, 1, 4]]))
    assert deviation(other, last) < 1e-14 if blind else deviation(other, last) > 0.01


def test_a_prefix_is_seen_by_all_and_the_rest_is_causal():
    cfg = model(stack(block(attention=attention(pattern=c.Prefix(), positions=c.Rotary()))))
    weights, one = reference.random_weights(cfg, seed=17), tokens(2, 6)
    late, early = one.copy(), one.copy()
    late[:, 4] = (late[:, 4] + 1) % 20
    early[:, 2] = (early[:, 2] + 1) % 20
    prefix = np.array([3, 0])
    a, b, d = (reference.forward(cfg, weights, row, prefix_length=prefix) for row in (one, late, early))
    assert np.array_equal(a[:, :4], b[:, :4])
    assert np.abs(a[0, :2] - d[0, :2]).max() > 1e-3  # row 0: token 2 lies in the prefix
    assert np.array_equal(a[1, :2], d[1, :2])
    causal = model(stack(block(attention=attention(positions=c.Rotary()))))
    assert np.array_equal(a[1], reference.forward(causal, weights, one)[1])


def test_global_tokens_are_heard_from_afar():
    own = attention(pattern=c.Longformer(window=2), global_projections=True)
    cfg = encoder(block(attention=own))
    cfg = cfg.override({"encoder.n_layers": 1})
    weights, one = reference.random_weights(cfg, seed=18), tokens(1, 9)
    other = one.copy()
    other[0, 0] = (other[0, 0] + 1) % 20
    for is_global, reach in [([False] * 9, 2), ([True] + [False] * 8, 9), ([False] * 6 + [True] + [False] * 2, 2)]:
        flags = np.array([is_global])
        a, b = (reference.run(cfg, weights, row, global_tokens=flags).hidden for row in (one, other))
        changed = set(np.flatnonzero(np.abs(a - b).max(axis=(0, 2)) > 0))
        assert changed == set(range(reach)) | ({6} if is_global[6] else set())
    none = reference.run(cfg, weights, one).hidden
    assert np.array_equal(none, reference.run(cfg, weights, one, global_tokens=np.zeros((1, 9), dtype=bool)).hidden)


def test_the_decoder_sees_the_source_and_its_own_past_only():
    cfg = encoder_decoder()
    weights, target, source = reference.random_weights(cfg, seed=19), tokens(1, 5), tokens(1, 4, seed=4)
    plain = reference.forward(cfg, weights, target, source=source)
    later, other = target.copy(), source.copy()
    later[0, 3] = (later[0, 3] + 1) % 20
    other[0, 3] = (other[0, 3] + 1) % 20
    assert np.array_equal(reference.forward(cfg, weights, later, source=source)[:, :3], plain[:, :3])
    assert np.abs(reference.forward(cfg, weights, target, source=other) - plain).max(axis=2).min() > 1e-4


def test_padding_of_the_source_does_not_matter():
    cfg = encoder_decoder()
    weights, target, source = reference.random_weights(cfg, seed=20), tokens(1, 5), tokens(1, 4, seed=5)
    plain = reference.forward(cfg, weights, target, source=source)
    for before, after in [(0, 3), (2, 0), (1, 4)]:
        padded = np.pad(source, ((0, 0), (before, after)), constant_values=9)
        valid = np.pad(np.ones((1, 4), dtype=bool), ((0, 0), (before, after)))
        assert deviation(reference.forward(cfg, weights, target, source=padded, source_valid=valid), plain) < 1e-12


def test_a_source_without_any_token_gives_a_cross_attention_of_zero():
    cfg = encoder_decoder()
    weights, target, source = reference.random_weights(cfg, seed=21), tokens(1, 5), tokens(1, 4, seed=6)
    out = reference.run(cfg, weights, target, source=source, source_valid=np.zeros((1, 4), dtype=bool))
    silent = {n: np.zeros_like(w) if ".cross_attention.o_proj" in n else w for n, w in weights.items()}
    assert np.array_equal(out.hidden, reference.run(cfg, silent, target, source=source).hidden)
