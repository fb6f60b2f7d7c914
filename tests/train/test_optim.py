"""The schedule's values, and who decays."""

from __future__ import annotations

from itertools import pairwise

import pytest

import qkv
from qkv.train import learning_rate, optimizer


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    rates = [learning_rate(step, 110, 10, 1.0) for step in range(111)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)  # half way: the mean of peak and floor
    assert rates[110] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert learning_rate(500, 110, 10, 1.0) == pytest.approx(0.1)


def test_a_schedule_that_is_all_warm_up() -> None:
    assert learning_rate(3, 3, 3, 1.0) == 1.0


def test_matrices_decay_and_vectors_do_not() -> None:
    model = qkv.build(qkv.preset("gpt2").toy())
    matrices, vectors = optimizer(model, 0.1, (0.9, 0.95)).param_groups
    assert matrices["weight_decay"] == 0.1
    assert vectors["weight_decay"] == 0
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    counts = [p.numel() for group in (matrices, vectors) for p in group["params"]]
    assert sum(counts) == model.config.n_parameters
