"""Initialisation: one table per scheme, from a tensor's role to its distribution.

`ones` and `zeros` are the same everywhere. A role that a scheme's table lacks takes the table's `default`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qkv.config.base import PositiveFloat, Variant
from qkv.config.parameter import Parameter, Role


@dataclass(frozen=True)
class Constant:
    """Every element is `value`."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Mean 0, standard deviation `std`; `cut` truncates at that many standard deviations (0: not at all)."""

    std: float
    cut: float = 0.0


@dataclass(frozen=True)
class Uniform:
    """Between -bound and bound."""

    bound: float


Distribution = Constant | Normal | Uniform


class Init(Variant):
    """The union of initialisation schemes."""

    def table(self, parameter: Parameter, n_layers: int) -> dict[Role | Literal["default"], Distribution]:
        """The scheme's table for a tensor of this shape, in a stack of `n_layers`."""
        raise NotImplementedError(f"{type(self).__name__} must define table(parameter, n_layers)")

    def distribution(self, parameter: Parameter, n_layers: int) -> Distribution:
        """How the tensor starts."""
        fixed = {"ones": Constant(1.0), "zeros": Constant(0.0)}
        if parameter.role in fixed:
            return fixed[parameter.role]
        table = self.table(parameter, n_layers)
        return table.get(parameter.role, table["default"])


class GPT2Init(Init):
    """Normal(0.02), and 0.02 / sqrt(2 n_layers) for what joins the residual stream (Radford 2019, section 2.3)."""

    kind: Literal["gpt2"] = "gpt2"
    std: PositiveFloat = 0.02

    def table(self, parameter: Parameter, n_layers: int) -> dict[Role | Literal["default"], Distribution]:
        residual = Normal(self.std / math.sqrt(2 * n_layers))
        return {"default": Normal(self.std), "attention_output": residual, "ffn_output": residual}


class LlamaInit(Init):
    """Normal(0.02) for every matrix and table (Touvron 2023: `initializer_range` of the published configurations)."""

    kind: Literal["llama"] = "llama"
    std: PositiveFloat = 0.02

    def table(self, parameter: Parameter, n_layers: int) -> dict[Role | Literal["default"], Distribution]:
        return {"default": Normal(self.std)}


class BertInit(Init):
    """Normal(0.02) cut at two standard deviations (Devlin 2018, the released code)."""

    kind: Literal["bert"] = "bert"
    std: PositiveFloat = 0.02

    def table(self, parameter: Parameter, n_layers: int) -> dict[Role | Literal["default"], Distribution]:
        return {"default": Normal(self.std, cut=2.0)}


class FanInInit(Init):
    """Normal(1/sqrt(fan_in)) matrices and Normal(1) embeddings (Chowdhery 2022, PaLM, section 5)."""

    kind: Literal["fan-in"] = "fan-in"

    def table(self, parameter: Parameter, n_layers: int) -> dict[Role | Literal["default"], Distribution]:
        return {"default": Normal(parameter.fan_in**-0.5), "token_embedding": Normal(1.0)}


class T5Init(Init):
    """T5 (Raffel 2019, its code): 1/sqrt(fan_in); queries 1/sqrt(d_model * head_dim), in place of scaled scores."""

    kind: Literal["t5"] = "t5"

    def table(self, parameter: Parameter, n_layers: int) -> dict[Role | Literal["default"], Distribution]:
        head_dim = parameter.fan_out // parameter.heads
        return {
            "default": Normal(parameter.fan_in**-0.5),
            "token_embedding": Normal(1.0),
            "segment_embedding": Normal(1.0),
            "query": Normal((parameter.fan_in * head_dim) ** -0.5),
        }


class XavierInit(Init):
    """Xavier-uniform matrices, bound sqrt(6 / (fan_in + fan_out)) (Glorot 2010); embeddings Normal(d_model^-0.5).

    The 2017 paper names no scheme; this is that of its released code.
    """

    kind: Literal["xavier"] = "xavier"

    def table(self, parameter: Parameter, n_layers: int) -> dict[Role | Literal["default"], Distribution]:
        embedding = Normal(parameter.fan_in**-0.5)
        return {
            "default": Uniform(math.sqrt(6 / (parameter.fan_in + parameter.fan_out))),
            "token_embedding": embedding,
            "segment_embedding": embedding,
            "position_embedding": embedding,
        }


Init.members = (GPT2Init, LlamaInit, BertInit, FanInInit, T5Init, XavierInit)
