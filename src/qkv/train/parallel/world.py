"""The processes of one run: who they are, how they reach each other, and who goes first.

`torchrun` starts them and says in the environment who each is. They stand on a mesh of three axes, data x context x
tensor; ranks that follow each other share a tensor, for these talk most and should be on one machine.

    rank = (data * context_size + context) * tensor_size + tensor
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from qkv.config.parallel import Parallel
from qkv.errors import ConfigError, TrainingError

DATA, CONTEXT, TENSOR = "data", "context", "tensor"
"""The axes of the mesh."""
_ANSWER = timedelta(minutes=30)  # the longest that one process may keep the others waiting in a step
_PREPARED = timedelta(days=3)  # and while it tokenises the texts
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_opened: list[World] = []


@dataclass
class World:
    """All processes, and this one."""

    rank: int
    size: int
    store: Store
    turns: int = 0
    """How often one went first."""

    @contextmanager
    def first(self) -> Iterator[None]:
        """Within the block, rank 0 first and alone, after all have come here; then the others."""
        dist.barrier()
        self.turns += 1
        key = f"qkv/first/{self.turns}"
        if self.rank:
            self.store.wait([key], _PREPARED)
            yield
            return
        yield
        self.store.set(key, "done")

    def mesh(self, parallel: Parallel) -> DeviceMesh:
        """The processes in their order."""
        inner = parallel.tensor * parallel.context
        if self.size % inner:
            what = f"tensor {parallel.tensor} x context {parallel.context}"
            raise ConfigError(
                f"parallel: {self.size} processes cannot be divided by {what}; start a multiple of {inner}"
            )
        shape = (self.size // inner, parallel.context, parallel.tensor)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return init_device_mesh(device, shape, mesh_dim_names=(DATA, CONTEXT, TENSOR))


def replicas_of(mesh: DeviceMesh) -> DeviceMesh:
    """Data x context as one axis: the processes between which gradients are added up."""
    if mesh[CONTEXT].size() == 1:
        return mesh[DATA]
    return mesh[DATA, CONTEXT]._flatten("replicas")


def launched() -> bool:
    """Whether torchrun, or something that speaks as it does, has started this process."""
    return all(name in os.environ for name in _NAMES)


def open_world(device: str) -> World:
    """Join the others; the second time, what is open already. `device`: the recipe's."""
    if _opened:
        return _opened[0]
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    local = int(os.environ["LOCAL_RANK"])
    if on_gpu and local >= torch.cuda.device_count():
        raise ConfigError(
            f"run.device: process {local} of this machine finds {torch.cuda.device_count()} GPUs; "
            "start as many processes as there are GPUs (torchrun --nproc-per-node), or take cpu"
        )
    if on_gpu:
        torch.cuda.set_device(local)
    try:
        store, rank, size = next(rendezvous("env://"))
        backend, device_id = ("nccl", torch.device("cuda", local)) if on_gpu else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_ANSWER, device_id=device_id)
    except (RuntimeError, ValueError) as error:
        what = " ".join(str(error).split())[:200]
        raise TrainingError(f"processes: they do not find each other ({what}); start them with torchrun") from None
    _opened.append(World(rank, size, store))
    return _opened[0]


def close_world() -> None:
    """Leave, at the end of a run that went well; where one failed, torchrun ends the others."""
    if _opened:
        _opened.clear()
        dist.destroy_process_group()
