"""Data ranks: each has rows of its own, and gradients are added up between them.

ddp     every rank has all weights; gradients are summed in buckets while the backward pass still runs (Li 2020)
fsdp    every rank has 1/n of each tensor. A block's weights are gathered when it runs, forwards and backwards, and
        dropped after; its gradients are summed and each rank keeps its n-th (FSDP2; ZeRO-3, Rajbhandari 2019)

Both divide sums by the number of ranks, while a step's loss is one sum that was divided by all targets already: so
losses are multiplied by that number before the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from qkv.nn import Output, Transformer
from qkv.nn.ffn import Router
from qkv.nn.init import draw
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.train.parallel.pieces import local, piece

_known: list[type] = []


def replicated(model: Transformer, mesh: DeviceMesh) -> DistributedDataParallel:
    """What calls the model in training, so that backward passes add up gradients."""
    # The correction of DeepSeek's router takes part in choices only, and never gets a gradient to wait for; nor does
    # BERT's second head where pairs are not trained. Buffers (the codes of quantised matrices) never change.
    names = [name for name, _ in model.named_parameters()]
    idle = [name for name in names if name.endswith("router.correction") or name.startswith("head.next_sentence.")]
    wrapper: Any = DistributedDataParallel  # torch leaves this untyped
    wrapper._set_params_and_buffers_to_ignore_for_model(model, [*idle, *(name for name, _ in model.named_buffers())])
    on_gpu = next(model.parameters()).device.type == "cuda"
    return DistributedDataParallel(
        model,
        device_ids=[torch.cuda.current_device()] if on_gpu else None,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
    )


def shard(model: Transformer, mesh: DeviceMesh, precision: str) -> None:
    """Divide the model's tensors among the ranks, in place; blocks are gathered one by one, the rest as one.

    In bf16 a block's matrices are rounded before they are sent, not after, and its gradients are added up in fp32. What
    is no factor of a product (norms, routers, embeddings) is sent in fp32, as it is computed with.
    """
    if not _known:  # hooks look for tensors in what the model gives
        pytree.register_dataclass(Output)
        _known.append(Output)
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            for block in stack.layers:
                for module in block.modules():
                    if precision == "bf16" and isinstance(module, LayerNorm | RMSNorm | Router):
                        fully_shard(module, mesh=mesh)
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


@torch.no_grad()
def fill(model: Transformer, seed: int, device: torch.device) -> None:
    """Give a divided model without weights its share of those that `qkv.build` would give it: one tensor at a time."""
    model.to_empty(device=device).eval()
    table = model.config.parameters()
    for name, parameter in model.named_parameters():
        shape, distribution = table[name]
        local(parameter).copy_(piece(draw(distribution, shape, seed, name), parameter))


def put_away(model: Transformer) -> None:
    """Drop what a pass without a backward pass left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
