"""The model under test, and what the paths need of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from qkv.config import ModelConfig, Rotary
from qkv.nn import Transformer
from qkv.verify.certificate import compare
from qkv.verify.sample import Sample, sample

EXACT = 1e-9  # float64 paths: another order of summation, nothing else
FLOAT32 = 1e-5  # float32 paths at least: rounding also happens inside their sums, which `bound` does not see
LENGTH, BATCH = 24, 2


@dataclass
class Subject:
    """The model under test (its first layers, if it is large), in float64 and float32."""

    config: ModelConfig
    model: Transformer
    """As given: its own dtype."""
    _bounds: dict[torch.dtype, float] = field(default_factory=dict)

    @cached_property
    def exact(self) -> Transformer:
        """In float64."""
        return copy.deepcopy(self.model).double()

    @cached_property
    def fast(self) -> Transformer:
        """In float32."""
        return copy.deepcopy(self.model).float()

    @cached_property
    def weights(self) -> dict[str, object]:
        """For the oracle."""
        return {name: tensor.double().numpy() for name, tensor in self.model.state_dict().items()}

    @cached_property
    def inputs(self) -> Sample:
        """What most paths are run on."""
        return sample(self.config, BATCH, LENGTH, seed=0)

    @cached_property
    def expected(self) -> Tensor:
        """The float64 model's result on them."""
        return self.inputs.run(self.exact)

    @cached_property
    def regrown(self) -> str | None:
        """Why a text of `LENGTH` tokens is not what its beginnings were: its angles change as it grows."""
        blocks = [block for stack in self.config.stacks.values() for block in stack.blocks]
        positions = [block.attention.positions for block in blocks]
        rules = [one.scaling for one in positions if isinstance(one, Rotary)]
        turned = [rule.kind for rule in rules if len({rule.regime(n) for n in range(1, LENGTH + 1)}) > 1]
        return f"{turned[0]!r} turns a longer row by other angles" if turned else None

    def bound(self, dtype: torch.dtype) -> float:
        """4 x the deviation of the float64 model whose weights and module outputs are rounded to `dtype`: the worst of
        three inputs."""
        if dtype not in self._bounds:
            self._bounds[dtype] = self._bound(dtype)
        return self._bounds[dtype]

    def _bound(self, dtype: torch.dtype) -> float:
        rounded = copy.deepcopy(self.exact)
        worst = 0.0
        with torch.no_grad():
            for parameter in rounded.parameters():
                parameter.copy_(parameter.to(dtype).double())
        for module in rounded.modules():  # blocks too: their output is the residual stream
            module.register_forward_hook(lambda _module, _args, out: _rounded(out, dtype))
        for seed in range(3):
            given = sample(self.config, BATCH, LENGTH, seed)
            row = compare("", given.run(self.exact), given.run(rounded), 0.0)
            worst = max(worst, row.deviation or 0.0)
        return max(4 * worst, FLOAT32) if dtype == torch.float32 else 4 * worst


def _rounded(out: object, dtype: torch.dtype) -> object:
    return out.to(dtype).to(out.dtype) if isinstance(out, Tensor) and out.is_floating_point() else out


def view_of(model: Transformer) -> Transformer:
    """The same parameters in modules of its own, in which something may be exchanged."""
    shared: dict[int, nn.Parameter] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)
