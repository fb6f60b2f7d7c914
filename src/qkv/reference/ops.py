"""The small operations: linear, softmax, activations, norms. NumPy, float64.

linear      y = x W^T + b                                W is stored (fan_out, fan_in)
softmax     e^(s_j - max) / sum over the visible keys    a row that sees nothing is 0, not uniform and not NaN
layernorm   weight (x - mean) / sqrt(mean (x - mean)^2 + eps) + bias        (Ba 2016)
rmsnorm     weight x / sqrt(mean x^2 + eps)                                 (Zhang and Sennrich 2019)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from qkv.config import LayerNorm, NoNorm, Norm, RMSNorm
from qkv.reference.registry import function_of, register

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Weights = dict[str, Array]


def below(weights: Weights, prefix: str) -> Weights:
    """The tensors whose names start with `prefix` and a dot, without that start."""
    return {name.removeprefix(f"{prefix}."): w for name, w in weights.items() if name.startswith(f"{prefix}.")}


def linear(weights: Weights, x: Array) -> Array:
    """x (..., fan_in) -> (..., fan_out); the bias is added if there is one."""
    y = x @ weights["weight"].T
    return y + weights["bias"] if "bias" in weights else y


def softmax(scores: Array, visible: Mask) -> Array:
    """Over the last axis of (T, S), among the visible keys of each row."""
    weights = np.zeros(scores.shape)
    for row, (score, seen) in enumerate(zip(scores, visible, strict=True)):
        if seen.any():
            power = np.exp(score[seen] - score[seen].max())
            weights[row, seen] = power / power.sum()
    return weights


def log_softmax(scores: Array) -> Array:
    """The logarithm of the softmax over the last axis, all visible."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    logs: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


def softcap(scores: Array, cap: float | None) -> Array:
    """cap tanh(scores / cap): the identity near 0, never beyond +-cap (Gemma 2). None caps nothing."""
    return scores if cap is None else cap * np.tanh(scores / cap)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


_ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,  # x times the normal distribution function
    "gelu-tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick-gelu": lambda x: x * _sigmoid(1.702 * x),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
}


def activation(name: str, x: Array) -> Array:
    """The named function of every element."""
    function = _ACTIVATIONS[name]
    return np.array([function(float(element)) for element in x.ravel()], dtype=np.float64).reshape(x.shape)


def norm(config: Norm, weights: Weights, x: Array) -> Array:
    """x (..., width), normalised over its last axis as `config` says."""
    result: Array = function_of(config)(config, weights, x)
    return result


def _no_norm(config: NoNorm, weights: Weights, x: Array) -> Array:
    return x


def _layer_norm(config: LayerNorm, weights: Weights, x: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)  # of the population: divided by the width, not width - 1
    y: Array = centred / np.sqrt(variance + config.eps)
    if config.weight:
        y = y * weights["weight"]
    return y + weights["bias"] if config.bias else y


def _rms_norm(config: RMSNorm, weights: Weights, x: Array) -> Array:
    y: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.eps)
    return y * (weights["weight"] + (1.0 if config.unit_offset else 0.0))


register(NoNorm, _no_norm)
register(LayerNorm, _layer_norm)
register(RMSNorm, _rms_norm)
