"""The training loop: next-token cross-entropy, AdamW, warm-up and cosine, gradients clipped by their common norm.

It is a generator of `Step`s, so that whoever runs it decides what to show, and stops it by not asking for more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv.nn import Transformer
from qkv.train.optim import learning_rate, optimizer


@dataclass(frozen=True)
class Plan:
    """How to train, and for how long."""

    steps: int
    learning_rate: float
    warmup: int
    seconds: float = math.inf
    """If the steps would take longer on this machine, fewer are made, with the schedule shortened to fit."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0


@dataclass(frozen=True)
class Step:
    """What one step of the loop did."""

    number: int
    """Counted from 1."""
    steps: int
    """How many there will be."""
    loss: float
    """Nats per token, before the update."""
    tokens: int
    """How many tokens the step read."""
    seconds: float
    """Since the loop began."""


def train(model: Transformer, batches: Iterator[tuple[Tensor, Tensor]], plan: Plan) -> Iterator[Step]:
    """Train `model` in place on batches of (inputs, targets); leaves it in evaluation mode."""
    optim = optimizer(model, plan.weight_decay, plan.betas)
    model.train()
    start, steps, number, first = time.monotonic(), plan.steps, 0, 0.0
    try:
        while number < steps:
            rate = learning_rate(number, steps, plan.warmup, plan.learning_rate)
            inputs, targets = next(batches)
            loss = _update(model, optim, inputs, targets, rate, plan.clip)
            number, elapsed = number + 1, time.monotonic() - start
            if number == 1:
                first = elapsed  # up to 2 s: memory is taken and libraries start
            elif number == plan.warmup:  # the schedule has not looked at `steps` yet, so it can still be shortened
                pace = (number - 1) / (elapsed - first)
                steps = int(min(steps, number + max(plan.seconds - elapsed, 0) * pace))
            if elapsed >= plan.seconds:
                steps = number
            yield Step(number, steps, loss, inputs.numel(), elapsed)
    finally:
        model.eval()


def _update(
    model: Transformer, optim: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, rate: float, clip: float
) -> float:
    for group in optim.param_groups:
        group["lr"] = rate
    logits = model(inputs).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    optim.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optim.step()
    return loss.item()
