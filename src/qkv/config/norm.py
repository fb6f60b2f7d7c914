"""Norms: how a vector's scale is taken out of it."""

from __future__ import annotations

from typing import Literal

from qkv.config.base import PositiveFloat, Variant
from qkv.config.parameter import Parameter, Table


class Norm(Variant):
    """The union of normalisations over the last axis."""

    def parameters(self, width: int) -> Table:
        """The norm's own tensors."""
        return {}


class NoNorm(Norm):
    """The identity."""

    kind: Literal["none"] = "none"


class LayerNorm(Norm):
    """weight * (x - mean) / sqrt(variance + eps) + bias, with the population variance (Ba 2016)."""

    kind: Literal["layernorm"] = "layernorm"
    eps: PositiveFloat = 1e-5
    weight: bool = True
    bias: bool = True

    def parameters(self, width: int) -> Table:
        weight = {"weight": Parameter((width,), "ones")} if self.weight else {}
        return weight | ({"bias": Parameter((width,), "zeros")} if self.bias else {})


class RMSNorm(Norm):
    """weight * x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019)."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: PositiveFloat = 1e-5
    unit_offset: bool = False
    """Gemma: the factor is 1 + weight, and the weight starts at zero."""
    cast: Literal["before", "after"] = "before"
    """In low precision: whether the result is rounded to it before (Llama) or after (Gemma) the weight multiplies."""

    def parameters(self, width: int) -> Table:
        return {"weight": Parameter((width,), "zeros" if self.unit_offset else "ones")}


Norm.members = (NoNorm, LayerNorm, RMSNorm)
