"""Feed-forward networks: what each position computes on its own. NumPy, float64.

    dense    down(activation(up(x)))                      (Vaswani 2017, equation 2)
    gated    down(activation(gate(x)) * up(x))            (Shazeer 2020)
    experts  shared(x) + sum over the chosen e of weight_e * down_e(activation(gate_e(x)) * up_e(x))

Experts, one token at a time: scores s = softmax or sigmoid of router(x). The choice goes by s + correction, first of
groups (the best `top_groups`, by their best expert or the sum of their two best), then of experts inside them (the best
`top_k`); ties go to the lower index. The weights are s itself, divided by their sum if `normalize`, times `scale`.
"""

from __future__ import annotations

import numpy as np

from qkv.config import Dense, Gated, MixtureOfExperts
from qkv.reference.ops import Array, Ints, Weights, activation, below, linear, softmax
from qkv.reference.registry import register

Routing = tuple[Array, Ints]
"""Scores (N, E) and the chosen experts (N, K), best first, of N tokens."""


def dense(config: Dense, weights: Weights, x: Array, routing: list[Routing]) -> Array:
    """x (N, D) -> (N, D)."""
    return linear(below(weights, "down_proj"), activation(config.activation, linear(below(weights, "up_proj"), x)))


def gated(config: Gated, weights: Weights, x: Array, routing: list[Routing]) -> Array:
    """x (N, D) -> (N, D)."""
    gate = activation(config.activation, linear(below(weights, "gate_proj"), x))
    return linear(below(weights, "down_proj"), gate * linear(below(weights, "up_proj"), x))


def mixture_of_experts(config: MixtureOfExperts, weights: Weights, x: Array, routing: list[Routing]) -> Array:
    """x (N, D) -> (N, D); appends what the router decided to `routing`."""
    gate, up, down = (weights[f"experts.{name}"] for name in ("gate_proj", "up_proj", "down_proj"))
    scores = _scores(config, weights, x)
    chosen = np.array([_choose(config, s + weights.get("router.correction", 0.0)) for s in scores], dtype=np.int64)
    routing.append((scores, chosen))
    out = np.zeros(x.shape)
    for n, token in enumerate(x):
        share = scores[n, chosen[n]]
        if config.normalize:
            share = share / share.sum()
        for e, weight in zip(chosen[n], share * config.scale, strict=True):
            out[n] += weight * (down[e] @ (activation(config.activation, gate[e] @ token) * (up[e] @ token)))
    if config.shared is not None:
        out += gated(config.shared, below(weights, "shared"), x, routing)
    return out


def _scores(config: MixtureOfExperts, weights: Weights, x: Array) -> Array:
    logits = x @ weights["router.weight"].T
    return softmax(logits, np.full(logits.shape, True)) if config.score == "softmax" else activation("sigmoid", logits)


def _choose(config: MixtureOfExperts, scores: Array) -> list[int]:
    """The experts of one token, best first, from its choosing scores (E,)."""
    size = config.n_experts // config.n_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.n_groups)]
    counted = 1 if config.group_score == "max" else 2
    worth = [sum(sorted((scores[e] for e in group), reverse=True)[:counted]) for group in groups]
    best = sorted(range(config.n_groups), key=lambda g: (-worth[g], g))[: config.top_groups]
    candidates = [e for g in best for e in groups[g]]
    return sorted(candidates, key=lambda e: (-scores[e], e))[: config.top_k]


register(Dense, dense)
register(Gated, gated)
register(MixtureOfExperts, mixture_of_experts)
