"""Feed-forward networks by hand; experts: scores, groups, corrections, ties, weights."""

import math
from typing import Any

import numpy as np
import pytest

import qkv.config as c
from qkv.reference import ffn

from .small import deviation


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_dense_by_hand():
    weights = {
        "up_proj.weight": np.array([[1.0, 0.0], [0.0, -1.0]]),
        "up_proj.bias": np.array([0.5, 1.0]),
        "down_proj.weight": np.array([[2.0, 1.0], [0.0, 1.0]]),
        "down_proj.bias": np.array([0.0, 10.0]),
    }
    out = ffn.dense(c.Dense(d_ff=2, activation="relu", bias=True), weights, np.array([[1.0, 3.0]]), [])
    assert out.tolist() == [[3.0, 10.0]]  # relu(1.5, -2) = (1.5, 0)


def test_gated_by_hand():
    weights = {
        "gate_proj.weight": np.array([[1.0, 0.0]]),
        "up_proj.weight": np.array([[0.0, 1.0]]),
        "down_proj.weight": np.array([[1.0], [2.0]]),
    }
    out = ffn.gated(c.Gated(d_ff=1), weights, np.array([[2.0, 3.0]]), [])
    assert out[0] == pytest.approx([3 * silu(2), 6 * silu(2)])


def experts(scores: list[float], **fields: Any) -> tuple[np.ndarray, list[int], np.ndarray]:
    """One token through experts of which expert e gives e + 1: (output, choices in order, router scores).

    With width 1, x = 1 and gate = a large number, silu(gate) * up = gate * up; down undoes the gate.
    """
    n = len(scores)
    config = c.MixtureOfExperts(**{"n_experts": n, "d_ff": 1, **fields})
    weights = {
        "router.weight": np.array([[s] for s in scores]),
        "experts.gate_proj": np.full((n, 1, 1), 100.0),
        "experts.up_proj": np.ones((n, 1, 1)),
        "experts.down_proj": np.arange(1.0, n + 1).reshape(n, 1, 1) / 100,
    }
    routing: list[ffn.Routing] = []
    out = ffn.mixture_of_experts(config, weights, np.ones((1, 1)), routing)
    return out, routing[0][1][0].tolist(), routing[0][0][0]


def test_softmax_router_normalised():
    out, chosen, scores = experts([0.0, math.log(3), math.log(2), math.log(4)], top_k=2)
    assert chosen == [3, 1]
    assert scores == pytest.approx([0.1, 0.3, 0.2, 0.4])
    assert out[0, 0] == pytest.approx((0.4 * 4 + 0.3 * 2) / 0.7)


def test_softmax_router_as_it_is_and_scaled():
    out, _, _ = experts([0.0, math.log(3), math.log(2), math.log(4)], top_k=2, normalize=False, scale=2.5)
    assert out[0, 0] == pytest.approx(2.5 * (0.4 * 4 + 0.3 * 2))


def test_sigmoid_router():
    out, chosen, scores = experts([0.0, math.log(3), -math.log(3)], top_k=2, score="sigmoid", normalize=False)
    assert chosen == [1, 0]
    assert scores == pytest.approx([0.5, 0.75, 0.25])
    assert out[0, 0] == pytest.approx(0.75 * 2 + 0.5 * 1)


def test_ties_go_to_the_lower_index():
    assert experts([1.0, 2.0, 1.0, 2.0, 1.0], top_k=3)[1] == [1, 3, 0]
    assert experts([1.0] * 4, top_k=2, n_groups=2, top_groups=1)[1] == [0, 1]


def correction_case(correction: list[float]) -> tuple[np.ndarray, list[int], np.ndarray]:
    config = c.MixtureOfExperts(n_experts=3, top_k=1, d_ff=1, correction=True, normalize=False)
    weights = {
        "router.weight": np.log([[0.5], [0.3], [0.2]]),
        "router.correction": np.array(correction),
        "experts.gate_proj": np.full((3, 1, 1), 100.0),
        "experts.up_proj": np.ones((3, 1, 1)),
        "experts.down_proj": np.array([1.0, 2.0, 3.0]).reshape(3, 1, 1) / 100,
    }
    routing: list[ffn.Routing] = []
    out = ffn.mixture_of_experts(config, weights, np.ones((1, 1)), routing)
    return out, routing[0][1][0].tolist(), routing[0][0][0]


def test_the_correction_changes_the_choice_but_not_the_weight():
    out, chosen, scores = correction_case([0.0, 0.0, 0.35])
    assert chosen == [2]
    assert scores == pytest.approx([0.5, 0.3, 0.2])
    assert out[0, 0] == pytest.approx(0.2 * 3)
    assert correction_case([0.0, 0.0, 0.25])[1] == [0]


def test_groups_by_their_best_expert():
    """Groups (0, 1), (2, 3), (4, 5): the best experts are 5 and then 3, though 0 and 1 together outweigh 2 and 3."""
    logits = [3.9, 3.9, 0.0, 4.0, 0.1, 5.0]
    assert experts(logits, top_k=2, n_groups=3, top_groups=1)[1] == [5, 4]
    assert experts(logits, top_k=2, n_groups=3, top_groups=2)[1] == [5, 3]
    assert experts(logits, top_k=3, n_groups=3, top_groups=2)[1] == [5, 3, 4]


def test_groups_by_the_sum_of_their_two_best():
    """Sigmoids: group (0, 1) has 0.953 + 0.971, group (2, 3) 0.5 + 0.982, group (4, 5) 0.525 + 0.993."""
    logits = [3.0, 3.5, 0.0, 4.0, 0.1, 5.0]
    fields: dict[str, Any] = {"score": "sigmoid", "n_groups": 3, "group_score": "top2"}
    assert experts(logits, top_k=2, top_groups=1, **fields)[1] == [1, 0]
    assert experts(logits, top_k=2, top_groups=2, **fields)[1] == [5, 1]


def test_experts_and_the_shared_network_equal_the_formula():
    config = c.MixtureOfExperts(n_experts=4, top_k=2, d_ff=3, shared_d_ff=5, activation="gelu")
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(p.shape) for name, p in config.parameters(6).items()}
    x = rng.standard_normal((5, 6))
    routing: list[ffn.Routing] = []
    out = ffn.mixture_of_experts(config, weights, x, routing)

    def gelu(v: np.ndarray) -> np.ndarray:
        return np.array([a * (1 + math.erf(a / math.sqrt(2))) / 2 for a in v])

    for n in range(5):
        power = np.exp(weights["router.weight"] @ x[n])
        probability = power / power.sum()
        first, second = np.argsort(-probability)[:2]
        expected = weights["shared.down_proj.weight"] @ (
            gelu(weights["shared.gate_proj.weight"] @ x[n]) * (weights["shared.up_proj.weight"] @ x[n])
        )
        for e in (first, second):
            inner = gelu(weights["experts.gate_proj"][e] @ x[n]) * (weights["experts.up_proj"][e] @ x[n])
            share = probability[e] / (probability[first] + probability[second])
            expected += share * (weights["experts.down_proj"][e] @ inner)
        assert deviation(out[n], expected) < 1e-13
        assert routing[0][1][n].tolist() == [first, second]
        assert routing[0][0][n] == pytest.approx(probability)
    assert len(routing) == 1
    assert routing[0][0].shape == (5, 4)
