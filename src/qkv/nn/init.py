"""Initialisation from the config's table: every tensor from its own generator, so that a seed gives the same tensor
whatever else the model has, in whatever order."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from qkv.config import Constant, ModelConfig, Normal, Uniform
from qkv.config.init import Distribution


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill the parameters of `model` in place from `config.parameters()`."""
    table = config.parameters()
    for name, tensor in model.named_parameters():
        shape, distribution = table[name]
        assert tuple(tensor.shape) == shape, f"{name}: the module has {tuple(tensor.shape)}, the table {shape}"
        tensor.copy_(draw(distribution, shape, seed, name))


def draw(distribution: Distribution, shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """A float32 tensor on the CPU, a function of the arguments alone."""
    out = torch.empty(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    match distribution:
        case Constant(value):
            return out.fill_(value)
        case Normal(std, 0.0):
            return out.normal_(0.0, std, generator=generator)
        case Normal(std, cut):
            return nn.init.trunc_normal_(out, 0.0, std, -cut * std, cut * std, generator=generator)
        case Uniform(bound):
            return out.uniform_(-bound, bound, generator=generator)
