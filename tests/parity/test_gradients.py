"""Gradients: float64 against the oracle, float32 against float64.

Along a random direction u of all weights, autograd's <gradient, u> must equal the oracle's central difference
(f(w + h u) - f(w - h u)) / 2h of f = sum(outputs * fixed random numbers). With h = 1e-5 the step's own error (h^2)
and the rounding of f (2^-53 f / h) both stay below 1e-8, so that 1e-6 tests the derivative. Where a step crosses a
kink (ReLU at 0) or changes a routing choice the function has no derivative: such models are tried in five directions,
of which most must agree.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parity.cases import CASES, Arrays, inputs, presets
from parity.test_forward import float32_weights, model_with, tensors
from qkv import reference
from qkv.config import ModelConfig

MODELS = CASES | presets()
OUTPUTS = ("logits", "hidden", "pooled")


def objective(outputs: object, kept: np.ndarray, numbers: list[np.ndarray]) -> float | torch.Tensor:
    """Sum of every output on real tokens, each element times its own random number."""
    total: float | torch.Tensor = 0.0
    for name, factor in zip(OUTPUTS, numbers, strict=True):
        value = getattr(outputs, name)
        if value is None:
            continue
        ranged = factor[: value.shape[0], : value.shape[1]]
        if value.ndim == 3:
            ranged = factor[: value.shape[0], : value.shape[1], None] * np.cos(np.arange(value.shape[2]))
            ranged = ranged * kept[: value.shape[0], : value.shape[1], None]
        weight = torch.from_numpy(ranged).to(value.dtype) if isinstance(value, torch.Tensor) else ranged
        total = total + (value * weight).sum()
    return total


def prepared(config: ModelConfig, kind: str) -> tuple[Arrays, np.ndarray, list[np.ndarray]]:
    """Inputs, which tokens count, and the fixed numbers."""
    given = inputs(config, kind, seed=3, length=9)
    assert given is not None
    kept = given.get("valid", np.ones(given["tokens"].shape, dtype=bool))
    rng = np.random.default_rng(5)
    return given, kept, [rng.normal(size=(2, 64)) for _ in OUTPUTS]


def autograd(config: ModelConfig, weights: Arrays, kind: str, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The gradient of the objective with respect to every weight."""
    given, kept, numbers = prepared(config, kind)
    model = model_with(config, weights, dtype)
    total = objective(model(**tensors(given)), kept, numbers)
    assert isinstance(total, torch.Tensor)
    total.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients[name] = gradient.double().numpy()
    return gradients


def directional(config: ModelConfig, weights: Arrays, direction: Arrays, kind: str) -> float:
    """The oracle's derivative along `direction`."""
    given, kept, numbers = prepared(config, kind)

    def f(step: float) -> float:
        moved = {name: weights[name] + step * direction[name] for name in weights}
        return float(objective(reference.run(config, moved, **given), kept, numbers))

    h = 1e-5
    return (f(h) - f(-h)) / (2 * h)


def smooth(config: ModelConfig) -> bool:
    """Whether the model has a derivative everywhere."""
    text = config.to_json()
    return not any(kink in text for kink in ('"relu"', "mixture-of-experts"))


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("plain", "padded-left", "positions")]


@pytest.mark.parametrize("kind", ["padded-right", "packed", *SLOW_KINDS])
@pytest.mark.parametrize("name", MODELS)
def test_float64_gradients_equal_the_oracles_differences(name: str, kind: str) -> None:
    config = MODELS[name]
    if kind == "packed" and len(config.stacks) == 2:
        kind = "plain"  # an encoder-decoder is not packed
    weights = float32_weights(config)
    gradients = autograd(config, weights, kind, torch.float64)
    tries = 1 if smooth(config) else 5
    agreed = 0
    for seed in range(tries):
        rng = np.random.default_rng(100 + seed)
        direction = {key: rng.normal(size=w.shape) / w.size**0.5 for key, w in weights.items()}
        expected = directional(config, weights, direction, kind)
        found = sum(float((gradients[key] * direction[key]).sum()) for key in weights)
        agreed += abs(found - expected) <= 1e-6 * abs(expected)
    assert agreed >= (tries + 1) // 2


@pytest.mark.parametrize("name", MODELS)
def test_float32_gradients_equal_float64s(name: str) -> None:
    config = MODELS[name]
    weights = float32_weights(config)
    exact = autograd(config, weights, "plain", torch.float64)
    fast = autograd(config, weights, "plain", torch.float32)
    everywhere = max(np.abs(gradient).max() for gradient in exact.values())
    for key, gradient in exact.items():
        # A bias is compared on the scale of its layer: the gradient of a key bias without rotary is exactly 0, a sum of
        # terms as large as the weight's that cancel, whose rounding is relative to the terms.
        layer = [np.abs(other).max() for name_, other in exact.items() if _layer(name_) == _layer(key)]
        assert np.isfinite(fast[key]).all(), key
        assert np.abs(fast[key] - gradient).max() <= 1e-4 * max(*layer, 1e-3 * everywhere), key


def _layer(key: str) -> str:
    return key.rsplit(".", 1)[0]


def test_every_weight_has_a_gradient() -> None:
    """A weight that no output depends on would pass the comparison above with zeros on both sides."""
    for name, config in CASES.items():
        gradients = autograd(config, float32_weights(config), "plain", torch.float64)
        everywhere = max(np.abs(gradient).max() for gradient in gradients.values())
        dead = {key for key, gradient in gradients.items() if np.abs(gradient).max() < 1e-12 * everywhere}
        dead = {key for key in dead if not key.endswith("router.correction")}  # it chooses, and carries no gradient
        if '"rotary"' not in config.to_json():
            dead = {
                key for key in dead if not key.endswith(("k_proj.bias", "k_global_proj.bias"))
            }  # shifts every score of a query alike
        assert not dead, name
