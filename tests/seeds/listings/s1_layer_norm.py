"""Seed 1, "Layer normalization and residual connections": LayerNorm, Add & Norm, and a demonstration with and without
residual.

    LayerNorm(x) = gamma * (x - mean) / sqrt(var + eps) + beta,    output = LayerNorm(x + Sublayer(x))

Sound code, wrong demonstration: E34 ("without residual" keeps the residual and drops the sublayer; the value called
"close to 1.000" is -1.256).
"""

import numpy as np


class LayerNorm:
    def __init__(self, d_model, eps=1e-6):
        # eps: against a division by 0
        self.gamma = np.ones(d_model)
        self.beta = np.zeros(d_model)
        self.eps = eps

    def forward(self, x):
        # gamma * (x - mean) / sqrt(var + eps) + beta, over the dimensions of each token, whatever the batch
        mean = x.mean(axis=-1, keepdims=True)
        var = x.var(axis=-1, keepdims=True)
        x_norm = (x - mean) / np.sqrt(var + self.eps)
        return self.gamma * x_norm + self.beta


def add_and_norm(x, sublayer_output, layer_norm):
    # Step 1: residual: add the sublayer's output to its input
    residual = x + sublayer_output
    # Step 2: layer normalization
    return layer_norm.forward(residual)


def demo():
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])  # (1, 1, 4): batch=1, seq=1, d_model=4
    sublayer_out = np.array([[[0.1, -0.2, 0.05, -0.1]]])  # small, nearly noise
    ln = LayerNorm(d_model=4)
    without_residual = ln.forward(x + sublayer_out * 0)  # the seed: "as if there were no residual"
    with_residual = add_and_norm(x, sublayer_out, ln)
    # the seed says of the first value of with_residual: "close to, but not, 1.000"
    return x, sublayer_out, without_residual, with_residual
