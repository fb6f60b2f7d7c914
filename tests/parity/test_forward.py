"""The torch model equals the oracle, for every member of every union and every preset at toy size.

Equality is the largest deviation over the largest absolute value. float64 must agree to rounding (1e-10): the two are
written separately, so that any larger difference is a difference of meaning. float32, the fast path, to 1e-5.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parity.cases import CASES, INPUTS, Arrays, inputs, presets
from qkv import reference
from qkv.config import ModelConfig
from qkv.nn import Output, Transformer

MODELS = CASES | presets()


def model_with(config: ModelConfig, weights: dict[str, np.ndarray], dtype: torch.dtype) -> Transformer:
    """The torch model holding the oracle's weights."""
    model = Transformer(config).to(dtype).eval()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model


def float32_weights(config: ModelConfig, seed: int = 1) -> dict[str, np.ndarray]:
    """Random float64 weights that float32 holds exactly, so that both paths run the very same model.

    T5 does not scale its scores and keeps 1/sqrt(head_dim) in its query matrices instead; without it scores of 50 would
    lose 50 * 2^-24 in float32, and the softmax would hand that to every output.
    """
    weights = reference.random_weights(config, seed)
    for name, parameter in config.shapes().items():
        if parameter.role == "query" and config.init.kind == "t5":
            weights[name] = weights[name] * (parameter.fan_out / parameter.heads) ** -0.5
    return {name: weight.astype(np.float32).astype(np.float64) for name, weight in weights.items()}


def tensors(given: Arrays) -> dict[str, torch.Tensor]:
    """The inputs for torch."""
    return {name: torch.from_numpy(value) for name, value in given.items()}


def deviation(oracle: np.ndarray, ours: torch.Tensor, valid: np.ndarray) -> float:
    """Largest deviation over largest absolute value, on real tokens."""
    found = ours.detach().double().numpy()
    if oracle.shape[:2] == valid.shape:
        oracle, found = oracle[valid], found[valid]
    return float(np.abs(oracle - found).max() / np.abs(oracle).max())


def compare(expected: reference.Output, found: Output, valid: np.ndarray) -> float:
    """The largest deviation among the outputs that exist; both must have the same ones."""
    worst = 0.0
    for name in ("hidden", "logits", "pooled"):
        oracle, ours = getattr(expected, name), getattr(found, name)
        assert (oracle is None) == (ours is None), name
        if oracle is not None and ours is not None:
            worst = max(worst, deviation(oracle, ours, valid))
    for oracle, ours in zip(expected.routing, found.routing, strict=True):
        np.testing.assert_array_equal(np.asarray(oracle[1]), ours.experts.numpy())
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_the_table_is_the_state_dict(name: str) -> None:
    config = MODELS[name]
    model = Transformer(config)
    table = {key: parameter.shape for key, parameter in config.shapes().items()}
    assert {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()} == table
    assert sum(p.numel() for p in model.parameters()) == config.n_parameters


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", MODELS)
def test_forward_equals_the_oracle(name: str, kind: str) -> None:
    config = MODELS[name]
    given = inputs(config, kind)
    if given is None:
        return  # an encoder-decoder takes no packed documents: tests/nn/test_inputs.py shows that it says so
    weights = float32_weights(config)
    expected = reference.run(config, weights, **given)
    valid = given.get("valid", np.ones(given["tokens"].shape, dtype=bool))
    with torch.no_grad():
        exact = model_with(config, weights, torch.float64)(**tensors(given))
        assert compare(expected, exact, valid) < 1e-10
        fast = model_with(config, weights, torch.float32)(**tensors(given))
        assert compare(expected, fast, valid) < 1e-5
