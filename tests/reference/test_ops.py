"""Linear, softmax, activations and norms against numbers worked out by hand."""

import math

import numpy as np
import pytest

import qkv.config as c
from qkv.reference.ops import activation, below, linear, log_softmax, norm, softcap, softmax


def test_linear_multiplies_by_the_transpose_and_adds_the_bias():
    weights = {"weight": np.array([[1.0, 2.0], [0.0, 3.0], [-1.0, 1.0]])}  # (fan_out 3, fan_in 2)
    x = np.array([[10.0, 1.0]])
    assert linear(weights, x).tolist() == [[12.0, 3.0, -9.0]]
    assert linear(weights | {"bias": np.array([0.5, 0.0, 1.0])}, x).tolist() == [[12.5, 3.0, -8.0]]


def test_below_takes_whole_names():
    weights = {"a.b.weight": np.ones(1), "a.bc.weight": np.zeros(1), "a.b": np.zeros(1)}
    assert list(below(weights, "a.b")) == ["weight"]


def test_softmax_of_logarithms_is_their_shares():
    scores = np.log([[1.0, 2.0, 3.0], [5.0, 5.0, 1.0]])
    assert softmax(scores, scores > -9) == pytest.approx(np.array([[1 / 6, 2 / 6, 3 / 6], [5 / 11, 5 / 11, 1 / 11]]))


def test_softmax_hides_what_is_not_visible():
    scores = np.log([[1.0, 2.0, 3.0]])
    assert softmax(scores, np.array([[True, False, True]])).tolist() == [pytest.approx([1 / 4, 0, 3 / 4])]
    assert softmax(scores, np.array([[True, False, True]]))[0, 1] == 0.0


def test_softmax_of_a_row_that_sees_nothing_is_zero():
    """Not uniform, as with -1e9, and not NaN, as with 0 * -inf."""
    visible = np.array([[False, False], [True, True]])
    assert softmax(np.array([[3.0, 4.0], [1.0, 1.0]]), visible).tolist() == [[0.0, 0.0], [0.5, 0.5]]


def test_softmax_of_huge_scores_does_not_overflow():
    assert softmax(np.array([[1e5, 1e5 + math.log(3)]]), np.full((1, 2), True)) == pytest.approx(
        np.array([[0.25, 0.75]])
    )


def test_log_softmax():
    assert log_softmax(np.log([[1.0, 2.0, 3.0]]) + 800) == pytest.approx(np.log([[1 / 6, 2 / 6, 3 / 6]]))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("relu", {-2.0: 0.0, 0.0: 0.0, 2.0: 2.0}),
        ("relu2", {-2.0: 0.0, 0.5: 0.25, 3.0: 9.0}),
        ("gelu", {-1.0: -0.15865525393145707, 1.0: 0.8413447460685429, 2.0: 1.9544997361036416}),
        ("gelu-tanh", {-1.0: -0.15880800939172324, 1.0: 0.8411919906082768}),
        ("quick-gelu", {1.0: 1 / (1 + math.exp(-1.702)), -2.0: -2 / (1 + math.exp(3.404))}),
        ("silu", {-1.0: -0.2689414213699951, 1.0: 0.7310585786300049, -800.0: 0.0}),
        ("sigmoid", {0.0: 0.5, 1.0: 0.7310585786300049, -800.0: 0.0, 800.0: 1.0}),
        ("tanh", {1.0: 0.7615941559557649}),
    ],
)
def test_activation(name: str, values: dict[float, float]):
    x = np.array([list(values)])
    assert activation(name, x)[0] == pytest.approx(list(values.values()), abs=1e-15)


def test_softcap():
    assert softcap(np.array([[100.0, 0.001]]), 2.0) == pytest.approx(np.array([[2.0, 0.001]]), abs=1e-9)
    assert softcap(np.array([[2.0]]), 2.0)[0, 0] == pytest.approx(2 * math.tanh(1))
    assert softcap(np.array([[100.0]]), None)[0, 0] == 100.0


def test_layer_norm_uses_the_population_variance():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    plain = norm(c.LayerNorm(weight=False, bias=False), {}, x)
    assert plain == pytest.approx([-1.342, -0.447, 0.447, 1.342], abs=5e-4)
    weights = {"weight": np.array([1.0, 2.0, 1.0, 1.0]), "bias": np.array([0.0, 0.0, 0.0, 5.0])}
    assert norm(c.LayerNorm(), weights, x) == pytest.approx(plain * [1, 2, 1, 1] + [0, 0, 0, 5])


def test_eps_stands_inside_the_root():
    """A constant vector has variance 0: (x - mean) is 0, and rmsnorm divides by sqrt(x^2 + eps)."""
    assert norm(c.LayerNorm(weight=False, bias=False), {}, np.full(4, 7.0)).tolist() == [0.0] * 4
    assert norm(c.RMSNorm(eps=3.0), {"weight": np.ones(2)}, np.ones(2)) == pytest.approx([0.5, 0.5])
    assert norm(c.LayerNorm(eps=3.0, weight=False, bias=False), {}, np.array([1.0, -1.0])) == pytest.approx([0.5, -0.5])


def test_rms_norm():
    x = np.array([[3.0, 4.0]])
    root = math.sqrt(12.5 + 1e-5)
    assert norm(c.RMSNorm(), {"weight": np.array([1.0, 2.0])}, x) == pytest.approx(np.array([[3 / root, 8 / root]]))
    offset = norm(c.RMSNorm(unit_offset=True), {"weight": np.array([0.0, 1.0])}, x)
    assert offset == pytest.approx(np.array([[3 / root, 8 / root]]))


def test_no_norm_is_the_identity():
    x = np.array([[3.0, -4.0]])
    assert norm(c.NoNorm(), {}, x) is x
