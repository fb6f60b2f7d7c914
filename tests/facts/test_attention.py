"""Scaled dot-product attention: masks, scale, symmetry, order."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from qkv import config as c
from qkv.nn.backends import Scoring, attention_weights
from qkv.nn.context import AttentionPlan
from qkv.reference import flash, ops

from .small import (
    Run,
    array,
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
    normal,
    oracle,
    tokens,
    torch_model,
    watched,
    weights_of,
)

T = 7


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(F)) v, entry by entry; a row that sees nothing is 0."""
    out = np.zeros(q.shape)
    for t, h in np.ndindex(q.shape[:2]):
        power = {s: np.exp(q[t, h] @ k[s, h] / q.shape[2] ** 0.5) for s in range(len(k)) if seen[t, s]}
        for s, p in power.items():
            out[t, h] += p / sum(power.values()) * v[s, h]
    return out


# --- The formula and its masks ----------------------------------------------------------------------------------------


@both
def test_scaled_dot_product_attention(run: Run):
    q, k, v = (normal(T, 2, 4, seed=s) for s in range(3))
    valid = np.array([True, True, False, True, True, True, False])
    causal, everything = np.tri(T, dtype=bool), np.full((T, T), True)
    for pattern, seen in ((c.Causal(), causal), (c.Bidirectional(), everything)):
        config = heads(pattern, n_heads=2, head_dim=4)
        assert deviation(mix(run, q, k, v, config), by_hand(q, k, v, seen)) < 1e-13
        expected = by_hand(q, k, v, seen & valid & valid[:, None])
        assert deviation(mix(run, q, k, v, config, valid=valid), expected) < 1e-13


@both
def test_scaled_dot_product_attention_rows_sum_to_one_or_zero(run: Run):
    q, k = normal(T, 2, 4, seed=0), normal(T, 2, 4, seed=1)
    valid = np.array([False, True, True, False, True, True, False])
    weights = attention_matrix(run, q, k, heads(n_heads=2, head_dim=4), valid=valid)
    assert deviation(weights[:, valid].sum(-1), np.ones((2, 4))) < 1e-14
    assert not weights[:, ~valid].any()
    assert not weights[:, :, ~valid].any()


@pytest.mark.parametrize("pattern", [c.Causal(), c.SlidingWindow(window=3), c.Bidirectional()], ids=lambda p: p.kind)
@masks
def test_e33_one_type_of_mask_and_both_of_pytorchs_conventions(mask, pattern: c.Pattern):
    """Booleans, True = may look: torch's scaled_dot_product_attention as it is, MultiheadAttention inverted."""
    x = normal(T, 8)
    seen = mask(pattern, at(range(T)), at(range(T)))
    assert seen.dtype == np.bool_
    there, ids = torch.from_numpy(x)[None], torch.from_numpy(seen)
    expected = by_hand(x[:, None], x[:, None], x[:, None], seen)[:, 0]
    assert deviation(functional.scaled_dot_product_attention(there, there, there, attn_mask=ids)[0], expected) < 1e-13
    module = torch.nn.MultiheadAttention(8, 1, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(8))
        assert deviation(module(there, there, there, attn_mask=~ids)[0][0], expected) < 1e-13
    tiled, _ = flash.tiled_attention(x, x, x, seen, scale=8**-0.5, block=4)
    assert deviation(tiled, expected) < 1e-13


def test_e33_an_additive_mask_is_refused_where_a_boolean_one_is_meant():
    x, additive = normal(5, 4), np.where(np.tri(5), 0.0, -np.inf)
    with pytest.raises(ValueError, match="boolean"):
        flash.tiled_attention(x, x, x, additive, scale=0.5, block=4)


PRINTED = """
0. -inf -inf -inf -inf
0. 0. -inf -inf -inf
0. 0. 0. -inf -inf
0. 0. 0. 0. -inf
0. 0. 0. 0. 0."""


@masks
def test_causal_mask_demo_prints_what_the_text_prints(mask):
    additive = np.where(mask(c.Causal(), at(range(5)), at(range(5))), 0.0, -np.inf)
    rows = [" ".join("-inf" if np.isneginf(x) else f"{x:.0f}." for x in row) for row in additive]
    assert "\n".join(["", *rows]) == PRINTED


@masks
def test_e01_the_mask_is_chosen_and_never_multiplied(mask):
    seen = mask(c.Causal(), at(range(5)), at(range(5)))
    weights = ops.softmax(np.zeros((5, 5)), seen)
    assert deviation(weights, np.tri(5) / np.arange(1, 6)[:, None]) < 1e-15
    with np.errstate(invalid="ignore"):
        assert np.isnan(np.triu(np.ones((5, 5)), k=1) * -np.inf).sum() == 15, "0 times infinity"


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_causal_mask_demo_is_safe_in_half_precision(dtype: torch.dtype, backend: str):
    cfg = decoder()
    model = torch_model(cfg, weights_of(cfg), dtype)
    ids = torch.from_numpy(tokens(1, 9))
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 23
    with torch.no_grad():
        before, after = (model(x, backend=backend).logits for x in (ids, changed))
    assert before.isfinite().all()
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_e30_minus_1e9_is_minus_infinity_in_float16_and_our_masks_do_not_use_it():
    assert torch.tensor(-1e9).half() == -torch.inf
    cfg = encoder()
    model, ids = torch_model(cfg, weights_of(cfg), torch.float16), torch.from_numpy(tokens(2, 6))
    valid = torch.tensor([[True] * 6, [False] * 6])
    for backend in ("eager", "sdpa"):
        with torch.no_grad():
            assert model(ids, valid=valid, backend=backend).hidden.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
def test_e30_a_row_that_sees_nothing_is_zero_and_not_uniform(backend: str):
    q, k, v = (normal(T, 2, 4, seed=s) for s in range(3))
    valid = np.arange(T) != 3
    config = heads(c.Bidirectional(), n_heads=2, head_dim=4)
    assert not mix(nn, q, k, v, config, valid=valid, backend=backend)[3].any()
    assert not mix(oracle, q, k, v, config, valid=valid)[3].any()


@masks
def test_e61_position_i_sees_0_to_i(mask):
    """It predicts token i + 1: the logits of a row are about the token after it."""
    seen = mask(c.Causal(), at(range(6)), at(range(6)))
    for i in range(6):
        assert np.flatnonzero(seen[i]).tolist() == list(range(i + 1))


# --- The scale --------------------------------------------------------------------------------------------------------

TRIALS = 20_000


@pytest.fixture(scope="module")
def trials() -> tuple[np.ndarray, np.ndarray]:
    """One query and ten keys of width 64, standard normal, many times: (20000, 1, 64) and (20000, 10, 64)."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((TRIALS, 1, 64)), rng.standard_normal((TRIALS, 10, 64))


def within(values: np.ndarray, *claims: float) -> bool:
    """Whether the mean of the trials is that of each claim but for chance: four standard errors of the difference of
    two such experiments, since the figures come from one too.
    """
    error = values.std() / TRIALS**0.5
    return all(abs(values.mean() - claim) < 4 * 2**0.5 * error for claim in claims)


def test_why_sqrt_d_k_variance(trials):
    q, k = trials
    scores = (q @ k.transpose(0, 2, 1))[:, 0]
    scale = heads(head_dim=64).score_scale
    assert scale == 1 / 8
    assert within((scores**2).mean(axis=1), 64, 63.4)
    assert within(((scores * scale) ** 2).mean(axis=1), 1, 0.99)


def top_by_torch(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    places = c.Coordinates(torch.arange(10)[None])
    plan = AttentionPlan(c.Bidirectional(), places, places, "all", True, "eager")
    found = attention_weights(torch.from_numpy(q)[:, None], torch.from_numpy(k)[:, None], plan, Scoring(scale))
    return found[:, 0, 0].max(-1).values.numpy()


def top_by_oracle(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    scores = (q @ k.transpose(0, 2, 1))[:, 0] * scale
    return ops.softmax(scores, np.full(scores.shape, True)).max(axis=1)


@pytest.mark.parametrize("top", [top_by_torch, top_by_oracle])
def test_e48_the_largest_of_ten_weights(trials, top):
    """Mean 0.865 for raw scores, 0.318 for scaled ones: far from one-hot, and far from flat."""
    q, k = trials
    assert within(top(q, k, 1.0), 0.865)
    scaled = top(q, k, heads(head_dim=64).score_scale)
    assert within(scaled, 0.318)
    assert (scaled > 0.18).mean() > 0.9, "the text shows a row whose largest weight is 0.18"


# --- What attention is, and is not ------------------------------------------------------------------------------------


@both
def test_e19_it_finds_itself(run: Run):
    """Six random vectors as queries, keys and values: "it" looks at itself, and at "cat" third."""
    x = np.random.RandomState(42).randn(6, 8)[:, None]
    config = heads(c.Bidirectional(), n_heads=1, head_dim=8)
    weights = attention_matrix(run, x, x, config)[0]
    assert weights[3] == pytest.approx([0.071, 0.096, 0.028, 0.550, 0.068, 0.187], abs=6e-4)
    assert weights.argmax(axis=1).tolist() == list(range(6))


@both
def test_e20_scores_are_symmetric_only_where_queries_are_keys(run: Run):
    q, k = normal(T, 1, 4, seed=0), normal(T, 1, 4, seed=1)
    config = heads(c.Bidirectional(), n_heads=1, head_dim=4)

    def scores(k: np.ndarray) -> np.ndarray:
        """Logarithms of the weights, shifted to the score that each row has with itself."""
        logs = np.log(attention_matrix(run, q, k, config)[0])
        return logs - np.diagonal(logs)[:, None] + (q * k).sum(-1) / 2

    assert deviation(scores(q), scores(q).T) < 1e-13
    assert deviation(scores(k), scores(k).T) > 0.1
    weights = attention_matrix(run, q, q, config)[0]
    assert deviation(weights, weights.T) > 0.1, "even then each row has its own denominator"


@both
def test_e20_attention_is_equivariant_and_not_invariant(run: Run):
    cfg, order = encoder(), np.array([3, 1, 5, 0, 2, 4])
    weights, ids = weights_of(cfg), tokens(1, 6)
    expected = run(cfg, weights, ids).hidden
    moved = run(cfg, weights, ids[:, order]).hidden
    assert deviation(moved, expected[:, order]) < 1e-12
    assert deviation(moved, expected) > 0.1


@both
def test_e47_attention_is_linear_in_values_and_not_in_its_input(run: Run):
    x, other = normal(T, 1, 4, seed=0), normal(T, 1, 4, seed=1)
    config = heads(n_heads=1, head_dim=4)

    def out(q: np.ndarray, v: np.ndarray) -> np.ndarray:
        return mix(run, q, q, v, config)

    assert deviation(out(x, 2 * x + 3 * other), 2 * out(x, x) + 3 * out(x, other)) < 1e-13
    assert deviation(out(2 * x, 2 * x), 2 * out(x, x)) > 0.01


@both
def test_order_blindness_of_the_dog_and_the_man(run: Run):
    """The same three tokens in the other order: each has the same vector as before, without positions."""
    cfg = encoder()
    weights, dog_bites_man = weights_of(cfg), np.array([[4, 7, 11]])
    expected = run(cfg, weights, dog_bites_man).hidden
    assert deviation(run(cfg, weights, dog_bites_man[:, ::-1].copy()).hidden, expected[:, ::-1]) < 1e-12
    seeing = encoder(embedding=c.Embedding(positions=c.Sinusoidal()))
    told = run(seeing, weights, dog_bites_man).hidden
    assert deviation(run(seeing, weights, dog_bites_man[:, ::-1].copy()).hidden, told[:, ::-1]) > 0.01


@pytest.mark.parametrize(("n_layers", "blind"), [(1, True), (2, False)])
@both
def test_e69_two_causal_layers_see_the_order_of_earlier_tokens(run: Run, n_layers: int, blind: bool):
    cfg = decoder(n_layers=n_layers)
    weights = weights_of(cfg)
    one, other = (run(cfg, weights, np.array([row])).hidden[0, -1] for row in ([1, 2, 3, 4, 5, 6], [5, 3, 1, 2, 4, 6]))
    assert (deviation(other, one) < 1e-14) is blind
    assert blind or deviation(other, one) > 0.01


def test_e35_keys_and_values_depend_on_their_token_alone_in_the_first_layer_only():
    cfg, ids = decoder(block(attention=heads(positions=c.Rotary()))), tokens(1, 6)
    for changed in range(6):
        others = ids.copy()
        others[0, changed] = (ids[0, changed] + 1) % 23
        before, after = (watched(cfg, x, "decoder.layers.*.attention.[kv]") for x in (ids, others))
        for layer in range(2):
            for point in ("k", "v"):
                name = f"decoder.layers.{layer}.attention.{point}"
                moved = np.abs(array(before[name]) - array(after[name])).max(axis=(0, 1, 3)) > 0
                expected = range(changed, changed + 1) if layer == 0 else range(changed, 6)
                assert np.flatnonzero(moved).tolist() == list(expected), name


@both
def test_e35_a_layer_never_depends_on_later_tokens(run: Run):
    cfg, ids = decoder(block(attention=heads(positions=c.Rotary())), n_layers=3), tokens(1, 6)
    weights = weights_of(cfg)
    expected = run(cfg, weights, ids).hidden[0]
    for changed in range(1, 6):
        others = ids.copy()
        others[0, changed] = (ids[0, changed] + 1) % 23
        found = run(cfg, weights, others).hidden[0]
        assert deviation(found[:changed], expected[:changed]) < 1e-14
        assert (np.abs(found[changed:] - expected[changed:]).max(axis=1) > 1e-6).all()
