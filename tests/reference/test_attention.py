"""Attention: a case by hand, formulas per pair, and the special cases that must coincide."""

import math
from typing import Any

import numpy as np
import pytest

import qkv.config as c
from qkv.reference import attention as oracle
from qkv.reference.position import scheme

from .small import attention, deviation, here

D = 8


def weights_of(config: c.Attention, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(parameter.shape) * 0.5
        for name, parameter in config.parameters(c.Sizes(D, 16)).items()
    }


def run(config: c.Attention, weights: dict[str, np.ndarray], x: np.ndarray, **fields: Any) -> np.ndarray:
    at = here(np.arange(len(x)), **fields)
    function = oracle.latent if isinstance(config, c.Latent) else oracle.multi_head
    return function(config, weights, x, x, oracle.View(at, at))


def noise(*shape: int, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def identity(config: c.MultiHead) -> dict[str, np.ndarray]:
    """Weights that pass x through every projection of a one-headed attention of full width."""
    return {f"{name}_proj.weight": np.eye(config.head_dim) for name in "qkvo"}


def test_two_tokens_by_hand():
    """x0 = (1, 0), x1 = (0, 2), scale 1: row 0 sees itself; row 1 weighs scores 0 and 4."""
    config = c.MultiHead(n_heads=1, head_dim=2, pattern=c.Causal(), scale=1.0)
    out = run(config, identity(config), np.array([[1.0, 0.0], [0.0, 2.0]]))
    share = 1 / (1 + math.exp(4))
    assert out[0].tolist() == [1.0, 0.0]
    assert out[1] == pytest.approx([share, 2 * (1 - share)])


def test_the_default_scale_is_one_over_the_root_of_the_width():
    config = c.MultiHead(n_heads=1, head_dim=4, pattern=c.Bidirectional())
    explicit = c.MultiHead(n_heads=1, head_dim=4, pattern=c.Bidirectional(), scale=0.5)
    weights, x = weights_of(config), noise(5, D)
    assert np.array_equal(run(config, weights, x), run(explicit, weights, x))
    assert deviation(run(config, weights, x), run(config.override({"scale": 1.0}), weights, x)) > 0.01


def brute_force(config: c.MultiHead, weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Causal multi-head attention written out element by element, with biases, softcap and sinks."""

    def project(name: str, t: int, row: int) -> float:
        w, b = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        return sum(w[row, d] * x[t, d] for d in range(D)) + (0.0 if b is None else b[row])

    F, group = config.head_dim, config.n_heads // config.kv_heads
    mixed = np.zeros((len(x), config.n_heads * F))
    for h in range(config.n_heads):
        for t in range(len(x)):
            scores = []
            for s in range(t + 1):
                q = [project("q_proj", t, h * F + f) for f in range(F)]
                k = [project("k_proj", s, (h // group) * F + f) for f in range(F)]
                score = sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(F)
                scores.append(config.softcap * math.tanh(score / config.softcap) if config.softcap else score)
            total = sum(map(math.exp, scores)) + (math.exp(weights["sinks"][h]) if config.sinks else 0.0)
            for f in range(F):
                values = [project("v_proj", s, (h // group) * F + f) for s in range(t + 1)]
                mixed[t, h * F + f] = sum(math.exp(a) / total * v for a, v in zip(scores, values, strict=True))
    out = mixed @ weights["o_proj.weight"].T
    return out + weights["o_proj.bias"] if config.o_bias else out


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_kv_heads": 1},
        {"n_kv_heads": 4},
        {"qkv_bias": True, "o_bias": True},
        {"softcap": 0.7},
        {"sinks": True},
        {"sinks": True, "softcap": 0.7, "qkv_bias": True},
    ],
    ids=str,
)
def test_equals_the_formula_element_by_element(fields: dict[str, Any]):
    config = attention(**fields)
    weights, x = weights_of(config), noise(4, D)
    assert deviation(run(config, weights, x), brute_force(config, weights, x)) < 1e-13


def test_grouped_with_as_many_key_value_heads_is_multi_head():
    weights, x = weights_of(attention(n_kv_heads=4)), noise(5, D)
    assert np.array_equal(run(attention(n_kv_heads=4), weights, x), run(attention(n_kv_heads=None), weights, x))


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_is_multi_head_with_repeated_keys_and_values(groups: int):
    """Repeated, not tiled, to the bit: query head h reads key-value head h // (H / G)."""
    at, none = here(np.arange(5)), scheme(c.NoPositions(), {})
    q, k, v = noise(5, 4, 6, seed=1), noise(5, groups, 6, seed=2), noise(5, groups, 6, seed=3)

    def attend(k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return oracle.attend(q, k, v, oracle.View(at, at), none, attention(), None)

    grouped = attend(k, v)
    assert np.array_equal(grouped, attend(np.repeat(k, 4 // groups, axis=1), np.repeat(v, 4 // groups, axis=1)))
    if groups > 1:
        assert deviation(grouped, attend(np.tile(k, (1, 2, 1)), np.tile(v, (1, 2, 1)))) > 0.01


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_is_multi_head_with_repeated_weights(groups: int):
    """Not to the bit: a product with a taller matrix may sum in another order."""
    grouped = attention(n_kv_heads=groups)
    weights, x = weights_of(grouped), noise(5, D)
    full = dict(weights)
    for name in ("k_proj.weight", "v_proj.weight"):
        per_head = weights[name].reshape(groups, grouped.head_dim, D)
        full[name] = np.repeat(per_head, 4 // groups, axis=0).reshape(-1, D)
    assert deviation(run(grouped, weights, x), run(attention(n_kv_heads=4), full, x)) < 1e-14


def test_scores_are_symmetric_only_if_queries_and_keys_share_their_weights():
    config = c.MultiHead(n_heads=1, head_dim=D, pattern=c.Bidirectional(), scale=1.0)
    weights, x = weights_of(config), noise(3, D)
    q, k = x @ weights["q_proj.weight"].T, x @ weights["k_proj.weight"].T
    assert np.abs(q @ k.T - k @ q.T).max() > 0.1
    assert np.allclose(q @ q.T, (q @ q.T).T)


def test_attention_is_linear_in_values_for_fixed_weights_but_not_in_x():
    config = attention()
    weights, x = weights_of(config), noise(4, D)
    doubled = weights | {"v_proj.weight": 2 * weights["v_proj.weight"]}
    assert deviation(run(config, doubled, x), 2 * run(config, weights, x)) < 1e-14
    assert deviation(run(config, weights, 2 * x), 2 * run(config, weights, x)) > 0.01


def test_qk_norm_normalises_each_head_before_positions():
    """Queries ten times as long give the same result, and the norm's weight acts per element of a head."""
    config = attention(qk_norm=c.RMSNorm(eps=1e-12), positions=c.Rotary())
    weights, x = weights_of(config), noise(4, D)
    longer = weights | {"q_proj.weight": 10 * weights["q_proj.weight"]}
    assert deviation(run(config, longer, x), run(config, weights, x)) < 1e-9
    at = here(np.arange(4))
    q = (x @ weights["q_proj.weight"].T).reshape(4, 4, 6)
    k = (x @ weights["k_proj.weight"].T).reshape(4, 2, 6)
    q, k = (
        v / np.sqrt((v**2).mean(axis=-1, keepdims=True)) * weights[f"{n}_norm.weight"] for v, n in ((q, "q"), (k, "k"))
    )
    rotary = scheme(c.Rotary(), {})
    values = (x @ weights["v_proj.weight"].T).reshape(4, 2, 6)
    by_hand = oracle.attend(
        rotary.turn(q, at), rotary.turn(k, at), values, oracle.View(at, at), rotary, attention(), None
    )
    assert deviation(run(config, weights, x), by_hand.reshape(4, -1) @ weights["o_proj.weight"].T) < 1e-9


def test_log_n_lengthens_queries_beyond_the_trained_length_only():
    config = c.MultiHead(n_heads=1, head_dim=2, pattern=c.Causal(), scale=1.0, log_n=2)
    x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.0]])
    out = run(config, identity(config), x)
    plain = run(c.MultiHead(n_heads=1, head_dim=2, pattern=c.Causal(), scale=1.0), identity(config), x)
    assert np.array_equal(out[:2], plain[:2])  # ln(2) / ln(2) = 1
    scores = np.exp(2 * np.array([0.5, 0.0, 0.5, 0.25]))  # ln(4) / ln(2) = 2
    assert out[3] == pytest.approx((scores / scores.sum()) @ x)


def test_global_queries_use_projections_of_their_own_for_everything():
    config = c.MultiHead(n_heads=2, head_dim=4, pattern=c.Longformer(window=2), global_projections=True, qkv_bias=True)
    weights, x = weights_of(config), noise(6, D)
    is_global = np.array([True, False, False, False, True, False])
    out = run(config, weights, x, is_global=is_global)
    ordinary = c.MultiHead(n_heads=2, head_dim=4, pattern=c.Longformer(window=2), qkv_bias=True)
    special = weights | {f"{n}_proj.{p}": weights[f"{n}_global_proj.{p}"] for n in "qkv" for p in ("weight", "bias")}
    assert np.array_equal(out[~is_global], run(ordinary, weights, x, is_global=is_global)[~is_global])
    assert np.array_equal(out[is_global], run(ordinary, special, x, is_global=is_global)[is_global])


def test_cross_attention_reads_keys_and_values_from_memory():
    config = attention(pattern=c.Bidirectional())
    weights, x, memory = weights_of(config), noise(2, D), noise(3, D, seed=4)
    out = oracle.multi_head(config, weights, x, memory, oracle.View(here([0, 1]), here([0, 1, 2])))
    both = np.concatenate([x, memory])
    mask_out_x = oracle.View(here([0, 1, 2, 3, 4]), here([-1, -1, 0, 1, 2]))
    assert deviation(out, oracle.multi_head(config, weights, both, both, mask_out_x)[:2]) < 1e-14


def test_keys_turn_by_their_own_positions():
    config = attention(pattern=c.Bidirectional(), positions=c.Rotary())
    weights, x, memory = weights_of(config), noise(2, D), noise(3, D, seed=4)
    plain = oracle.multi_head(config, weights, x, memory, oracle.View(here([7, 5]), here([2, 0, 4])))
    moved = oracle.multi_head(config, weights, x, memory, oracle.View(here([17, 15]), here([12, 10, 14])))
    closer = oracle.multi_head(config, weights, x, memory, oracle.View(here([7, 5]), here([3, 1, 5])))
    assert deviation(moved, plain) < 1e-13
    assert deviation(closer, plain) > 1e-3


def test_a_query_that_sees_nothing_gives_zero():
    config = attention(pattern=c.Bidirectional(), sinks=True)
    weights, x = weights_of(config), noise(3, D)
    at = oracle.View(here([0, 1, -1]), here([-1, -1, -1]))
    assert not oracle.multi_head(config, weights, x, x, at).any()
    plain = attention(pattern=c.Bidirectional())
    at = oracle.View(here([0, -1, 1]), here([0, 1, -1]))
    out = oracle.multi_head(plain, weights, x, x, at)
    assert not out[1].any()
    assert np.abs(out[[0, 2]]).min() > 0


def test_visible_needs_both_tokens_one_document_and_the_pattern():
    query = here([0, 1, -1], document=np.array([0, 0, 0]))
    key = here([0, 1, -1, 0], document=np.array([0, 0, 0, 1]))
    assert oracle.visible(c.Bidirectional(), oracle.View(query, key)).tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, False, False],
    ]
    assert oracle.visible(c.Causal(), oracle.View(query, key))[0].tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    "positions", [c.Alibi(), c.T5Buckets(n_buckets=4, max_distance=4, bidirectional=False, shared=False)]
)
def test_biases_join_after_the_scale_and_before_the_softcap(positions: c.Positions):
    config = attention(positions=positions, scale=0.3, softcap=0.8)
    weights, x = weights_of(config), noise(4, D)
    out = run(config, weights, x)
    q, k, v = ((x @ weights[f"{n}_proj.weight"].T).reshape(4, heads, 6) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    at = here(np.arange(4))
    bias = scheme(positions, {"weight": weights.get("positions.weight")}).bias(4, at, at)
    mixed = np.zeros((4, 24))
    for h in range(4):
        scores = 0.8 * np.tanh((q[:, h] @ k[:, h // 2].T * 0.3 + bias[h]) / 0.8)
        for t in range(4):
            power = np.exp(scores[t, : t + 1])
            mixed[t, 6 * h : 6 * h + 6] = power / power.sum() @ v[: t + 1, h // 2]
    assert deviation(out, mixed @ weights["o_proj.weight"].T) < 1e-14


def test_shaw_equals_the_paper_per_pair():
    """e_ij = q_i (k_j + a_ij) / sqrt(F), z_i = sum_j alpha_ij (v_j + b_ij), with grouped keys."""
    config = attention(positions=c.Shaw(max_distance=2), pattern=c.Bidirectional())
    weights, x = weights_of(config), noise(5, D)
    q, k, v = ((x @ weights[f"{n}_proj.weight"].T).reshape(5, heads, 6) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    a, b = weights["positions.key"], weights["positions.value"]
    mixed = np.zeros((5, 24))
    for h in range(4):
        for i in range(5):
            row = [max(-2, min(2, j - i)) + 2 for j in range(5)]
            power = np.exp([q[i, h] @ (k[j, h // 2] + a[row[j]]) / math.sqrt(6) for j in range(5)])
            alpha = power / power.sum()
            mixed[i, 6 * h : 6 * h + 6] = sum(alpha[j] * (v[j, h // 2] + b[row[j]]) for j in range(5))
    assert deviation(run(config, weights, x), mixed @ weights["o_proj.weight"].T) < 1e-13


def test_transformer_xl_scales_its_relative_terms_too():
    config = attention(positions=c.TransformerXL(), n_kv_heads=None)
    weights, x = weights_of(config), noise(4, D)
    q, k, v = ((x @ weights[f"{n}_proj.weight"].T).reshape(4, 4, 6) for n in "qkv")
    u, w = weights["positions.u"], weights["positions.v"]
    mixed = np.zeros((4, 24))
    for i in range(4):
        for h in range(4):
            scores = []
            for j in range(i + 1):
                angles = [(i - j) / 10_000 ** (m / 4) for m in range(4)]
                r = weights["positions.r_proj.weight"] @ ([math.sin(z) for z in angles] + [math.cos(z) for z in angles])
                scores.append(((q[i, h] + u[h]) @ k[j, h] + (q[i, h] + w[h]) @ r[6 * h : 6 * h + 6]) / math.sqrt(6))
            power = np.exp(scores)
            mixed[i, 6 * h : 6 * h + 6] = power / power.sum() @ v[: i + 1, h]
    assert deviation(run(config, weights, x), mixed @ weights["o_proj.weight"].T) < 1e-13


def latent(**fields: Any) -> c.Latent:
    plain = {"n_heads": 3, "kv_rank": 5, "nope_dim": 4, "rope_dim": 2, "v_head_dim": 3, "pattern": c.Causal()}
    return c.Latent(**{**plain, "positions": c.Rotary(layout="pairs"), **fields})


@pytest.mark.parametrize("q_rank", [None, 4])
def test_latent_equals_the_paper_per_pair(q_rank: int | None):
    config = latent(q_rank=q_rank)
    weights, x = weights_of(config), noise(4, D)

    def rms(v: np.ndarray, name: str) -> np.ndarray:
        return v / math.sqrt((v**2).mean() + 1e-6) * weights[f"{name}_norm.weight"]

    def rotated(v: np.ndarray, position: int) -> np.ndarray:
        """One pair, frequency 1."""
        cos, sin = math.cos(position), math.sin(position)
        return np.array([v[0] * cos - v[1] * sin, v[0] * sin + v[1] * cos])

    out = np.zeros((4, D))
    for i in range(4):
        if q_rank is None:
            query = weights["q_proj.weight"] @ x[i]
        else:
            query = weights["q_up_proj.weight"] @ rms(weights["q_down_proj.weight"] @ x[i], "q")
        heads = []
        for h in range(3):
            own = query[6 * h : 6 * h + 6]
            scores, values = [], []
            for j in range(i + 1):
                down = weights["kv_down_proj.weight"] @ x[j]
                rebuilt = (weights["kv_up_proj.weight"] @ rms(down[:5], "kv"))[7 * h : 7 * h + 7]
                turned = rotated(own[4:], i) @ rotated(down[5:], j)
                scores.append((own[:4] @ rebuilt[:4] + turned) / math.sqrt(6))
                values.append(rebuilt[4:])
            power = np.exp(scores)
            heads.append(sum(p * v for p, v in zip(power / power.sum(), values, strict=True)))
        out[i] = weights["o_proj.weight"] @ np.concatenate(heads)
    assert deviation(run(config, weights, x), out) < 1e-13


def test_latent_scores_scale_by_the_whole_query():
    weights, x = weights_of(latent()), noise(4, D)
    assert np.array_equal(run(latent(), weights, x), run(latent(scale=6**-0.5), weights, x))
