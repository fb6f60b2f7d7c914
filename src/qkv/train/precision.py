"""Number formats of a step: products in bfloat16 or float16, weights and optimizer in float32.

Micikevicius 2017, arXiv 1710.03740: in float16 small gradients vanish, so the loss is scaled up before the backward
pass, and the gradient down again before it is clipped; a step whose gradient overflowed is left out, and the scale
halved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qkv.config.recipe import Run
from qkv.nn import Output, Transformer
from qkv.train.parallel.strategy import ALONE, Strategy


@dataclass
class Precision:
    """How a model is called in training, and how its gradient becomes a step."""

    model: Transformer
    dtype: torch.dtype | None
    """None: float32 throughout."""
    scaler: torch.amp.GradScaler | None
    strategy: Strategy = ALONE

    @classmethod
    def of(cls, run: Run, model: Transformer, strategy: Strategy = ALONE) -> Precision:
        """What the recipe asks for; blocks are compiled and recomputed here, too."""
        device = next(model.parameters()).device.type
        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[run.precision]
        blocks = [layer for stack in (model.encoder, model.decoder) if stack is not None for layer in stack.layers]
        for block in blocks:
            if run.checkpoint_activations:
                block.forward = partial(_recomputed, block.forward)
            if run.compile:
                block.compile()
        return cls(model, dtype, torch.amp.GradScaler(device) if run.precision == "fp16" else None, strategy)

    def call(self, **inputs: Any) -> Output:
        """The model in its precision; what leaves it is float32."""
        if self.dtype is None:
            return self.strategy.call(self.model, inputs)
        with torch.autocast(next(self.model.parameters()).device.type, self.dtype):
            output = self.strategy.call(self.model, inputs)
        logits = None if output.logits is None else output.logits.float()
        return replace(output, logits=logits, hidden=output.hidden.float())

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as its backward pass takes it."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self, optimizer: torch.optim.Optimizer, clip: float) -> float:
        """One step, clipped once on the true gradient (0: not at all), unless it is not finite; the gradient's norm."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        total = self.strategy.norm(self.model, [p.grad for p in parameters if p.grad is not None])
        norm = float(total)
        if clip and math.isfinite(norm) and norm + 1e-6 > clip:  # below, the factor is 1
            self.strategy.clip(parameters, clip, total)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        elif math.isfinite(norm):
            optimizer.step()
        return norm

    @property
    def exhausted(self) -> bool:
        """Whether a gradient that is not finite cannot be mended by scaling the loss less."""
        return self.scaler is None or self.scaler.get_scale() < 1.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def _recomputed(forward: Any, *arguments: Any) -> Any:
    """A block whose inner values are computed again in the backward pass (Chen 2016, arXiv 1604.06174)."""
    return checkpoint(forward, *arguments, use_reentrant=False)
