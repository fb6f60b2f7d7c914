"""Tensors that lie in pieces on several processes: this one's piece, and the norm of all pieces as one gradient.

torch's `clip_grad_norm_` takes tensors of one kind only. Here each process adds up the squares of what it has, once
per way of being divided, and the sums of pieces are added over the processes that hold different ones.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    own: Tensor = tensor.to_local()
    return own


def piece(whole: Tensor, like: Tensor) -> Tensor:
    """What this process has of a tensor that is divided as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    sizes, starts = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def divided_norm(gradients: list[Tensor]) -> Tensor:
    """() the norm of all of them as one vector."""
    alike: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[_holders(gradient)].append(local(gradient))
    squares = []
    for groups, pieces in alike.items():
        square = nn.utils.get_total_norm(pieces).double().square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def clip_divided(gradients: list[Tensor], limit: float, total: Tensor) -> None:
    """Scale them down to a norm of `limit`, if `total` is above it."""
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(factor)


def _holders(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose members hold different pieces."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(axis) for axis, placed in enumerate(tensor.placements) if not placed.is_replicate())
