"""Training: a recipe becomes a run.

    result = qkv.train("recipe.toml")        or a Recipe; see `qkv.config.recipe`

`parts` makes what a run consists of, `trainer` is the loop, `checkpoints` what it leaves behind.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from qkv.callable import make_callable
from qkv.config.recipe import Recipe
from qkv.train.trainer import Report, Trainer

__all__ = ["Report", "Result", "Trainer"]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    """It holds the model (`model`), checkpoints, the log and the recipe."""
    steps: int
    loss: float
    """Of the last step; not a number where there was none left to do."""
    valid_loss: float
    """Of the final model, averaged if the recipe says so, on the held-out texts."""


def run(recipe: Recipe | str | Path, *, resume: bool = False) -> Result:
    """Train by a recipe, or by the file of one; `resume` goes on from the last checkpoint of its folder."""
    whole = recipe if isinstance(recipe, Recipe) else Recipe.read(recipe)
    trainer = Trainer.resume(whole) if resume else Trainer.start(whole)
    made = deque(trainer.run(), maxlen=1)
    loss, valid_loss = (made[0].loss, made[0].valid_loss) if made else (math.nan, None)
    if valid_loss is None or whole.run.ema is not None or whole.run.average_last:
        valid_loss = trainer.valid_loss()  # of other weights than those of the last step
    trainer.strategy.close()
    return Result(Path(whole.run.folder), trainer.step, loss, valid_loss)


make_callable(__name__, run)
