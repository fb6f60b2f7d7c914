"""The layers of `adapters`: a matrix that may be kept as codes, and low-rank differences beside it.

    Adapted      base (x) + the sum of its active adapters
    Adapter      (alpha / rank) B A x                           A (rank, in), B (out, rank), in float32 or more
    Quantised    a linear layer with codes of `qkv.cache.codec` for its matrix, in groups of 32 along the inputs

An adapted layer's `state_dict` is that of its base, by the base's names. Layers are composed, not derived from
`nn.Linear`, so that whoever looks for linear layers finds the base, A and B, each with the matrix that it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkv.cache.codec import Int4, Int8
from qkv.errors import ConfigError, TrainingError
from qkv.nn.codec import decode, encode

CODECS = {codec.name: codec for codec in (Int8(), Int4())}
PREFIX = "lora_"
"""Of the name that an adapter has as a module."""


@dataclass(frozen=True)
class Lora:
    """What an adapter is, apart from its tensors."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        wrong = [
            f"{name}: {value!r} {what}"
            for name, value, fits, what in (
                ("rank", self.rank, isinstance(self.rank, int) and self.rank >= 1, "is no rank; take 1, 2, 3 or more"),
                ("alpha", self.alpha, math.isfinite(self.alpha), "is no number; take one, such as twice the rank"),
                ("dropout", self.dropout, 0 <= self.dropout < 1, "is no share; take 0 or more, below 1"),
            )
            if not fits
        ]
        if wrong:
            raise ConfigError(f"adapter: {'; '.join(wrong)}")

    @property
    def factor(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Factor(nn.Linear):
    """A or B. It stands in `parameters()`, but not in the model's `state_dict`; a dict that has it may be loaded."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}weight" in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *rest)


class Adapter(nn.Module):
    """factor B A, beside one matrix."""

    def __init__(self, lora: Lora, base: nn.Linear | Quantised) -> None:
        super().__init__()
        self.lora = lora
        like = base.weight
        # 16 bits cannot take the small steps of training; next to them, float32 costs little.
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.A = Factor(base.in_features, lora.rank, bias=False, device=like.device, dtype=dtype)
        self.B = Factor(lora.rank, base.out_features, bias=False, device=like.device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        x = F.dropout(x.to(self.A.weight.dtype), self.lora.dropout, self.training)
        out: Tensor = self.lora.factor * self.B(self.A(x))
        return out

    @property
    def update(self) -> Float[Tensor, "out in"]:
        """What it adds to the matrix."""
        return self.lora.factor * (self.B.weight @ self.A.weight)


class Quantised(nn.Module):
    """A linear layer whose matrix is kept as codes. Its `state_dict` has the decoded matrix, as `weight`."""

    codes: Tensor
    scales: Tensor
    like: Tensor

    def __init__(self, linear: nn.Linear, codec: str) -> None:
        super().__init__()
        self.codec, self.in_features, self.out_features = CODECS[codec], linear.in_features, linear.out_features
        self.bias = linear.bias
        # Scales as bits: converting the model to another dtype must not round them. `like` remembers dtype and device.
        for name in ("codes", "scales", "like"):
            self.register_buffer(name, linear.weight.detach().new_empty(0), persistent=False)
        self._keep(linear.weight.detach())

    def _keep(self, weight: Tensor) -> None:
        parts = encode(self.codec, weight)
        self.codes, self.scales = parts["codes"], parts["scales"].view(torch.int16)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The decoded matrix."""
        parts = {"codes": self.codes, "scales": self.scales.view(torch.float16)}
        return decode(self.codec, parts, self.in_features, self.like.dtype)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        return F.linear(x, self.weight, self.bias)

    def with_weight(self, weight: Float[Tensor, "out in"]) -> Quantised:
        """The same layer around another matrix."""
        return Quantised(_linear(weight, self.bias), self.codec.name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        name = f"{prefix}weight"
        if name in state_dict:
            self._keep(state_dict[name].to(self.like))
        elif strict:
            missing.append(name)
        others = {key: value for key, value in state_dict.items() if key != name}
        super()._load_from_state_dict(others, prefix, metadata, strict, missing, *rest)


class Adapted(nn.Module):
    """A linear layer with adapters. `base` is what is computed with; while merged, `stored` is the layer as it was."""

    def __init__(self, base: nn.Linear | Quantised) -> None:
        super().__init__()
        self.base, self.active = base, tuple[str, ...]()
        self.stored: nn.Linear | Quantised | None = None
        untyped: Any = self  # torch gives these two no types
        untyped.register_state_dict_post_hook(_without_base)
        untyped.register_load_state_dict_pre_hook(_with_base)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        out: Tensor = self.base(x)
        if self.stored is None:
            for name in self.active:
                out = out + self.adapters[name](x).to(out.dtype)
        return out

    @property
    def adapters(self) -> dict[str, Adapter]:
        """By name, in the order in which they came."""
        return {
            name.removeprefix(PREFIX): module for name, module in self._modules.items() if isinstance(module, Adapter)
        }

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The whole matrix, for callers that multiply it themselves (latent attention)."""
        base = self.base.weight
        return base if self.stored is not None or not self.active else base + self.update.to(base.dtype)

    @property
    def update(self) -> Float[Tensor, "out in"]:
        """What the active adapters add to the matrix."""
        found = self.adapters
        return torch.stack([found[name].update for name in self.active]).sum(0)

    @torch.no_grad()
    def merge(self) -> float:
        """Put the active adapters into the matrix; how far it is then from the exact sum."""
        if not self.active:
            return 0.0
        base, exact = self.base, self.base.weight.double() + self.update.double()
        new = exact.to(base.weight.dtype)
        merged = base.with_weight(new) if isinstance(base, Quantised) else _linear(new, base.bias)
        self.stored, self.base = base, merged
        apart = float((merged.weight.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-300))
        return apart

    def unmerge(self) -> None:
        """Put the stored layer back."""
        if self.stored is not None:
            self.base, self.stored = self.stored, None


def _linear(weight: Tensor, bias: nn.Parameter | None) -> nn.Linear:
    """A layer around a matrix that is there already."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    linear.register_parameter("bias", bias)
    return linear


def _without_base(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Names as without adapters; what lies beside a merged matrix is not the model's."""
    for name in [name for name in state if name.startswith(prefix)]:
        kind, _, rest = name.removeprefix(prefix).partition(".")
        value = state.pop(name)
        if kind == "base":
            state[prefix + rest] = value


def _with_base(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert isinstance(module, Adapted)
    if module.stored is not None:
        raise TrainingError("load_state_dict: adapters are merged into this model's matrices; unmerge it first")
    for name in ("weight", "bias"):
        if prefix + name in state:
            state[f"{prefix}base.{name}"] = state.pop(prefix + name)
