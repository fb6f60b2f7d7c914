"""Seed 0, section 5: RMSNorm, and the two placements of a norm.

    RMSNorm(x) = gamma * x / sqrt(mean(x^2) + eps)

Sound. E46: it divides by the root mean square, which is no variance, for nothing is centred. E72: faster than
LayerNorm only when fused. The placements of section 5.1 are two pairs of lines; here they are functions of their two
sublayers.
"""

import torch
from torch import nn


def post_norm(x, LayerNorm, Attention, FFN):
    # Post-Norm (original Transformer)
    x = LayerNorm(x + Attention(x))
    x = LayerNorm(x + FFN(x))
    return x


def pre_norm(x, RMSNorm, Attention, FFN):
    # Pre-Norm (modern LLMs)
    x = x + Attention(RMSNorm(x))
    x = x + FFN(RMSNorm(x))
    return x


class RMSNorm(nn.Module):
    def __init__(self, d_model: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x):
        # RMS = root mean square
        rms = torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x / rms * self.weight
