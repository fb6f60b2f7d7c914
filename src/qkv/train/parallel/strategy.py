"""What a run asks of the processes that make it: here of one alone, which is all of them.

The trainer is written once, against `Strategy`. `Together` (module `together`) answers for one of several processes;
it is loaded only where there are several.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from qkv.config.recipe import Recipe
from qkv.model import TextModel
from qkv.nn import Output, Transformer
from qkv.train import checkpoints
from qkv.train.batch import Batch
from qkv.train.journal import Journal
from qkv.train.loss import Setting

if TYPE_CHECKING:
    from qkv.train.precision import Precision


class Strategy:
    """One process."""

    main = True
    """Whether this process writes and speaks for all."""

    processes = 1
    """How many there are."""
    divided = False
    """Whether none of them has all weights."""

    def first(self) -> AbstractContextManager[None]:
        """Within the block, the main process before the others, and not before all have come here."""
        return nullcontext()

    def journal(self, recipe: Recipe) -> Journal:
        """Where the figures go."""
        return Journal(Path(recipe.run.folder), recipe.log)

    # The model

    def divide(self, recipe: Recipe, model: Transformer) -> None:
        """Take this process's share of the model, in place, before it has an optimizer."""

    def optimizer(self, made: Optimizer) -> Optimizer:
        """An optimizer as it can be run here."""
        return made

    def call(self, model: Transformer, inputs: Mapping[str, Any]) -> Output:
        """Run the model."""
        output: Output = model(**inputs)
        return output

    def rest(self, model: Transformer) -> None:
        """After passes without backward passes."""

    # A step

    def seed(self, seed: int, step: int) -> int:
        """Of what this process draws in a step."""
        return mixed(seed, step)

    def share(self, batch: Batch) -> Batch:
        """What this process does of a batch."""
        return batch

    def setting(self, precision: Precision, batch: Batch) -> Setting:
        """How its share of a step is run; `batch` is the whole one."""
        return Setting(run=precision.call, scale=precision.scaled)

    def total(self, share: Tensor) -> float:
        """The sum of what the processes found."""
        return float(share)

    def sums(self, numbers: list[float]) -> list[float]:
        """Each added up over the processes that did other parts of a batch."""
        return numbers

    def norm(self, model: Transformer, gradients: list[Tensor]) -> Tensor:
        """() of the whole gradient."""
        return nn.utils.get_total_norm(gradients)

    def clip(self, parameters: list[nn.Parameter], limit: float, total: Tensor) -> None:
        """Scale the gradient down to a norm of `limit`, if `total` is above it."""
        nn.utils.clip_grads_with_norm_(parameters, limit, total)

    def finite(self, tensor: Tensor) -> bool:
        """Whether all of a tensor is; all processes must ask."""
        return bool(tensor.isfinite().all())

    def said(self, word: str | None) -> str | None:
        """What the first process that has something to say says."""
        return word

    def any(self, said: bool) -> bool:
        """Whether one of the processes says so; all must ask."""
        return said

    # What is kept

    def write(self, run: Path, lm: TextModel, optimizer: Optimizer, saved: checkpoints.Saved) -> None:
        """Save a checkpoint. `saved.training` comes without the optimizer."""
        training = {"optimizer": optimizer.state_dict(), **saved.training}
        checkpoints.write(run, lm, checkpoints.Saved(saved.step, saved.data, training))

    def read(self, folder: Path, model: Transformer, optimizer: Optimizer) -> checkpoints.Saved:
        """Take weights and optimizer from a checkpoint, of however many processes; the rest is given back."""
        if is_sharded(folder):
            from qkv.train.parallel import sharded

            return sharded.read(folder, model, optimizer)
        saved = checkpoints.read(folder)
        model.load_state_dict(checkpoints.weights(folder))
        optimizer.load_state_dict(dict(saved.training["optimizer"]))
        return saved

    def save_model(self, lm: TextModel, folder: Path) -> None:
        """Write the whole model as a folder that `qkv.load` reads."""
        lm.save(folder)

    def close(self) -> None:
        """The run is over, and went well."""


ALONE = Strategy()


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint was written in pieces."""
    return (folder / SHARDS).is_dir()


SHARDS = "shards"


def mixed(*numbers: int) -> int:
    """A seed made of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def strategy_of(recipe: Recipe) -> Strategy:
    """That of this process: alone, unless torchrun has started it with others."""
    from qkv.train.parallel.world import launched

    if not launched():
        return ALONE
    from qkv.train.parallel.together import Together

    return Together(recipe)
