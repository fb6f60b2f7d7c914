"""One of several processes of a run: what it has of the model and of a batch, and how it agrees with the others.

Every process makes the same recipe's model and draws the same batches; the state of the data is one number everywhere.
Random numbers of the data come from (seed, step) and are the same on all; those of dropout are the same where
activations are, and others where rows are others: they come from (seed, step, replica).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from qkv.config import ModelConfig, MultiHead
from qkv.config.recipe import Recipe
from qkv.config.training import Masked
from qkv.errors import ConfigError
from qkv.model import TextModel
from qkv.nn import Output, Transformer
from qkv.train import checkpoints
from qkv.train.balance import Load
from qkv.train.batch import Batch
from qkv.train.journal import Journal, Silence
from qkv.train.loss import Setting
from qkv.train.parallel import replicas, sharded, tensor
from qkv.train.parallel.pieces import clip_divided, divided_norm, local
from qkv.train.parallel.ring import NAME, make_ring
from qkv.train.parallel.share import columns_of, rows_of
from qkv.train.parallel.strategy import Strategy, mixed
from qkv.train.parallel.world import CONTEXT, DATA, TENSOR, close_world, open_world, replicas_of
from qkv.train.precision import Precision


class Together(Strategy):
    """This process among the others."""

    def __init__(self, recipe: Recipe) -> None:
        self.parallel = recipe.parallel
        self.world = open_world(recipe.run.device)
        self.main, self.processes = self.world.rank == 0, self.world.size
        self.divided = recipe.parallel.splits_weights
        self.mesh = self.world.mesh(recipe.parallel)
        self.replicas, self.tensor = replicas_of(self.mesh), self.mesh[TENSOR]
        self.group = self.replicas.get_group()
        if self.parallel.context > 1:
            make_ring(self.mesh[CONTEXT].get_group())
        self._calls: DistributedDataParallel | None = None
        self._order: list[nn.Parameter] = []

    def first(self) -> AbstractContextManager[None]:
        return self.world.first()

    def journal(self, recipe: Recipe) -> Journal:
        return super().journal(recipe) if self.main else Silence()

    # The model

    def divide(self, recipe: Recipe, model: Transformer) -> None:
        problems = list(self._problems(recipe, model.config))
        if problems:
            raise ConfigError("\n  ".join(f"{path}: {what}" for path, what in problems))
        if self.parallel.tensor > 1:
            tensor.divide(model, self.tensor)
        if self.parallel.data == "fsdp":
            replicas.shard(model, self.replicas, recipe.run.precision)
        elif self.replicas.size() > 1:
            self._calls = replicas.replicated(model, self.replicas)
        if next(model.parameters()).is_meta:
            replicas.fill(model, recipe.model.seed, self.device)

    def _problems(self, recipe: Recipe, model: ModelConfig) -> Iterator[tuple[str, str]]:
        """What this number of processes cannot do."""
        data = self.mesh[DATA].size()
        if recipe.run.batch % data:
            yield "run.batch", f"{recipe.run.batch} rows cannot be shared by {data} data ranks; take a multiple of it"
        if self.parallel.tensor > 1 and self.parallel.data == "ddp" and self.replicas.size() > 1:
            yield "parallel.data", "divided matrices beside other data or context ranks need 'fsdp'"
        if isinstance(recipe.objective, Masked) and recipe.objective.next_sentence:
            yield "objective.next_sentence", "its head is not shared by several processes: leave it out, or start one"
        blocks = [block for stack in model.stacks.values() for block in stack.blocks]
        if any(isinstance(block.attention, MultiHead) and block.attention.global_projections for block in blocks):
            yield "model", "projections of global tokens get no gradient in rows without one; start one process"

    def optimizer(self, made: Optimizer) -> Optimizer:
        """Groups of one kind of tensor each: torch moves many at once, and these must lie alike."""
        self._order = [parameter for group in made.param_groups for parameter in group["params"]]
        groups = []
        for group in made.param_groups:
            kinds: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                kinds.setdefault(sharded.kind_of(parameter), []).append(parameter)
            groups += [{**group, "params": alike} for alike in kinds.values()]
        made.param_groups[:] = groups
        return made

    def call(self, model: Transformer, inputs: Mapping[str, Any]) -> Output:
        run = self._calls if self._calls is not None and torch.is_grad_enabled() else model
        # Without positions it is a whole row: a text to be written.
        divided = self.parallel.context > 1 and "positions" in inputs
        output: Output = run(**inputs, backend=NAME) if divided else run(**inputs)
        return output

    def rest(self, model: Transformer) -> None:
        if self.parallel.data == "fsdp":
            replicas.put_away(model)

    # A step

    def seed(self, seed: int, step: int) -> int:
        return mixed(seed, step, self.replicas.get_local_rank()) if self.replicas.size() > 1 else mixed(seed, step)

    def share(self, batch: Batch) -> Batch:
        data, context = self.mesh[DATA], self.mesh[CONTEXT]
        rows = rows_of(batch, data.get_local_rank(), data.size())
        return columns_of(rows, context.get_local_rank(), context.size())

    def setting(self, precision: Precision, batch: Batch) -> Setting:
        size = self.replicas.size()
        return Setting(
            run=precision.call,
            count=batch.count,
            scale=lambda loss: precision.scaled(loss) * size,  # replicas divide by it
            begin=self._begin,
            together=self._load,
        )

    def _begin(self, last: bool) -> None:
        """Gradients are added up between the ranks once a step; only with ddp can that wait without more memory."""
        if self._calls is not None:
            self._calls.require_backward_grad_sync = last

    def _load(self, load: Load) -> Load:
        for layer in load:
            dist.all_reduce(layer, group=self.group)
        return load

    def total(self, share: Tensor) -> float:
        return self.sums([float(share)])[0]

    def sums(self, numbers: list[float]) -> list[float]:
        whole = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(whole, group=self.group)
        found: list[float] = whole.tolist()
        return found

    def norm(self, model: Transformer, gradients: list[Tensor]) -> Tensor:
        if not self.divided:
            return super().norm(model, gradients)
        if self.parallel.tensor > 1:
            tensor.sum_parts(model, self.tensor)
        return divided_norm(gradients)

    def clip(self, parameters: list[nn.Parameter], limit: float, total: Tensor) -> None:
        if not self.divided:
            super().clip(parameters, limit, total)
        else:
            clip_divided([p.grad for p in parameters if p.grad is not None], limit, total)

    def finite(self, tensor: Tensor) -> bool:
        return not self.any(not bool(local(tensor).isfinite().all()))

    def said(self, word: str | None) -> str | None:
        words: list[str | None] = [None] * self.processes
        dist.all_gather_object(words, word)
        return next((one for one in words if one is not None), None)

    def any(self, said: bool) -> bool:
        count = torch.tensor(float(said), device=self.device)
        dist.all_reduce(count)
        return bool(count)

    @property
    def device(self) -> torch.device:
        """Where tensors must lie to be sent."""
        return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    # What is kept

    def write(self, run: Path, lm: TextModel, optimizer: Optimizer, saved: checkpoints.Saved) -> None:
        if self.divided:
            sharded.write(run, lm.model, optimizer, saved)
        elif self.main:
            super().write(run, lm, optimizer, saved)
        dist.barrier()

    def read(self, folder: Path, model: Transformer, optimizer: Optimizer) -> checkpoints.Saved:
        if self.divided and not sharded.is_sharded(folder):
            return sharded.read_whole(folder, model, optimizer, self._order)
        return super().read(folder, model, optimizer)

    def save_model(self, lm: TextModel, folder: Path) -> None:
        whole = sharded.gathered(lm, self.main) if self.divided else lm
        if self.main:
            assert whole is not None
            whole.save(folder)
        dist.barrier()

    def close(self) -> None:
        close_world()
