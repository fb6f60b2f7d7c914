"""The optimizer and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn


def optimizer(model: nn.Module, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2017); norms, biases and other vectors do not decay."""
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    assert len(matrices) + len(vectors) == len(parameters), "each parameter is in exactly one group"
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, fused=True)


def learning_rate(step: int, steps: int, warmup: int, peak: float, floor: float = 0.1) -> float:
    """A linear rise over `warmup` steps, then half a cosine down to `floor` * peak (Loshchilov and Hutter 2016)."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)
