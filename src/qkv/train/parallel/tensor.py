"""Tensor parallel: several processes share each matrix of attention and feed-forward networks (Shoeybi 2019, Megatron).

    q, k, v, gate, up    by columns of the output: each process has some heads, some hidden units
    o, down              by rows of the input: each gives a part of the sum, and the parts are added

So a block's inner values are never whole. A forward pass adds up twice per block, after o_proj and after down_proj, and
a backward pass twice, where attention and the feed-forward network begin.
Norms, embeddings and the head are on every process alike. What lies between the heads of one process and belongs to
all (norms of queries and keys) gets a part of its gradient on each; `sum_parts` adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from qkv.nn import Transformer
from qkv.nn.attention import MultiHead
from qkv.nn.ffn import Dense, Gated
from qkv.train.parallel.pieces import local

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")
_BETWEEN = (".q_norm.", ".k_norm.")


def divide(model: Transformer, mesh: DeviceMesh) -> None:
    """Divide the matrices of every block, in place. `Parallel.misfits` has said that this model's can be."""
    for module in model.modules():
        if isinstance(module, MultiHead | Dense | Gated):
            parallelize_module(module, mesh, plan_of(module))
            module.register_forward_pre_hook(_entrance(mesh))
        if isinstance(module, MultiHead):
            module.n_heads //= mesh.size()
            module.kv_heads //= mesh.size()


def _entrance(mesh: DeviceMesh) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """What enters is on every process alike; marked as such once, its gradients are added up once, for all matrices."""

    def enter(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        marked: dict[int, Tensor] = {}
        for argument in arguments:
            if isinstance(argument, Tensor) and id(argument) not in marked:
                marked[id(argument)] = DTensor.from_local(argument, mesh, [Replicate()], run_check=False)
        return tuple(marked.get(id(argument), argument) for argument in arguments)

    return enter


def plan_of(module: nn.Module) -> dict[str, ParallelStyle]:
    """How each matrix below a module is divided."""
    plan: dict[str, ParallelStyle] = {}
    for name, _ in module.named_children():
        if name in _COLUMNS:
            plan[name] = ColwiseParallel()
        if name in _ROWS:
            plan[name] = RowwiseParallel()
    return plan


def sum_parts(model: Transformer, mesh: DeviceMesh) -> None:
    """Complete the gradients of which each process has a part."""
    parts: list[Tensor] = [
        local(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and any(part in name for part in _BETWEEN)
    ]
    for part in parts:
        dist.all_reduce(part, group=mesh.get_group())
