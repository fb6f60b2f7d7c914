"""The loop: batches, gradients, one step of the optimizer; evaluation, checkpoints and a log on the way.

    for report in Trainer.start(recipe).run(): ...

Everything random is drawn anew for each step from (seed, step), so that a run that was killed and taken up again makes
the same steps, to the bit on a CPU with the same number of threads: weights, optimizer, data, dropout, masks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkv.config.decoding import Sampling
from qkv.config.recipe import Recipe
from qkv.errors import CheckpointError, ConfigError, DataError, GenerationError, TrainingError
from qkv.nn import Transformer
from qkv.train import checkpoints
from qkv.train.adapter_files import save_adapter
from qkv.train.adapters import adapter_state, merge
from qkv.train.batch import Batch, Example
from qkv.train.data import every_row
from qkv.train.journal import Journal
from qkv.train.loss import Setting, loss_sum, step_gradients
from qkv.train.optimizers import make_optimizer, set_rate
from qkv.train.parts import Parts, parts_of
from qkv.train.precision import Precision
from qkv.train.schedule import rate

RECIPE = "recipe.toml"


@dataclass(frozen=True)
class Report:
    """What a step did."""

    step: int
    """Counted from 1."""
    loss: float
    """Per real target, in nats, before the update."""
    rate: float
    gradient_norm: float
    """Before clipping."""
    tokens: int
    """Real targets of the step."""
    seconds: float
    """Since the run began or was taken up."""
    valid_loss: float | None = None
    """On the held-out texts, where this step ended with an evaluation."""
    sample: str | None = None
    """A text that the model wrote, where this step ended with one."""

    def entry(self) -> dict[str, Any]:
        """The step as a line of the log."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Trainer:
    """One run."""

    def __init__(self, recipe: Recipe, parts: Parts) -> None:
        self.recipe, self.parts, self.model = recipe, parts, parts.lm.model
        self.optimizer = make_optimizer(self.model, recipe.optimizer)
        self.stream = parts.stream(recipe)
        self.precision = Precision.of(recipe.run, self.model)
        self.step = 0
        self.ema: dict[str, Tensor] | None = None
        if recipe.run.ema is not None:
            self.ema = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.journal = Journal(Path(recipe.run.folder), recipe.log)

    @classmethod
    def start(cls, recipe: Recipe) -> Trainer:
        """A new run; refused where its folder holds one already."""
        folder = Path(recipe.run.folder)
        if (folder / RECIPE).exists() or checkpoints.folders(folder):
            raise ConfigError(f"run.folder: {folder} holds a run already; resume it, or choose another folder")
        trainer = cls(recipe, parts_of(recipe))
        trainer._try_data()
        # Last: what is refused before has begun no run.
        (folder / RECIPE).write_text(recipe.to_toml(), encoding="utf-8")
        return trainer

    @classmethod
    def resume(cls, recipe: Recipe) -> Trainer:
        """Go on from the last checkpoint, or begin anew where there is none."""
        folder = Path(recipe.run.folder)
        if not (folder / RECIPE).is_file():
            raise CheckpointError(f"run.folder: {folder} holds no run; start one without resuming")
        _same(Recipe.read(folder / RECIPE), recipe)
        trainer = cls(recipe, parts_of(recipe, begun=True))
        saved = checkpoints.folders(folder)
        if saved:
            trainer._restore(saved[-1])
        trainer.journal.rewind(trainer.step)
        return trainer

    def run(self) -> Iterator[Report]:
        """The steps that remain; the model is left in evaluation mode."""
        run, began = self.recipe.run, time.monotonic()
        while self.step < run.steps:
            self.step += 1
            report = self._step(began)
            # First the log: a kill in between leaves a line too many, which resuming takes back, not one too few.
            self.journal.write(report.entry())
            if self._in_turn(self.step):
                self._save()
                checkpoints.tidy(Path(run.folder), run.keep, self._in_turn)
            yield report
        self._finish()

    def save(self) -> None:
        """Save a checkpoint of this step, unless it has one; it lasts until the next one in turn is there."""
        if self.step and not any(int(folder.name) == self.step for folder in self._saved()):
            self._save()

    def _saved(self) -> list[Path]:
        return checkpoints.folders(Path(self.recipe.run.folder))

    def _in_turn(self, step: int) -> bool:
        return _due(self.recipe.run.save_every, step, self.recipe.run.steps)

    def _step(self, began: float) -> Report:
        run = self.recipe.run
        batch = self._batch()
        value = rate(self.recipe.schedule, self.step, run.steps, self.model.config.d_model)
        set_rate(self.optimizer, value)
        self.model.train()
        torch.manual_seed(_mixed(run.seed, self.step))
        self.optimizer.zero_grad(set_to_none=True)
        found = step_gradients(
            self.model,
            batch.split(run.micro_batch or run.batch),
            self.parts.loss,
            Setting(run=self.precision.call, scale=self.precision.scaled),
        )
        loss = float(found.mean)
        if not math.isfinite(loss):
            raise TrainingError(self._what_broke(batch, loss))
        norm = self.precision.update(self.optimizer, run.clip)
        if not math.isfinite(norm) and self.precision.exhausted:
            raise TrainingError(self._what_broke(batch, loss))
        self._follow()
        self.model.eval()
        valid = self.valid_loss() if _due(run.eval_every, self.step, run.steps) else None
        sample = self._sample() if run.sample_every and self.step % run.sample_every == 0 else None
        return Report(self.step, loss, value, norm, found.count, time.monotonic() - began, valid, sample)

    def _try_data(self) -> None:
        """What examples lack is said now, and not at the first step or the first evaluation."""
        random = _random(self.recipe.run.seed, 0)
        first = next(self._valid_rows(), None)
        if first is None:
            raise DataError("data: no held-out text fits into a row; raise data.context, or give other data.valid")
        for examples in (next(self.parts.stream(self.recipe)), [first]):
            self.parts.maker.batch(examples, random)

    def _valid_rows(self) -> Iterator[Example]:
        data, maker = self.recipe.data, self.parts.maker
        return every_row(self.parts.valid, maker.raw_length(data.context), data.documents, ahead=maker.ahead)

    def _batch(self) -> Batch:
        return self.parts.maker.batch(next(self.stream), _random(self.recipe.run.seed, self.step))

    def _follow(self) -> None:
        """Move the average of the weights."""
        if self.ema is None:
            return
        share = 1 - (self.recipe.run.ema or 0.0)
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                self.ema[name].lerp_(tensor, share)

    @torch.no_grad()
    def valid_loss(self) -> float:
        """The mean loss of the held-out texts' targets, each once."""
        run, maker = self.recipe.run, self.parts.maker
        random = _random(run.seed, 0)
        total, count, waiting = 0.0, 0, []
        self.model.eval()
        device = next(self.model.parameters()).device
        for example in self._valid_rows():
            waiting.append(example)
            if len(waiting) == (run.micro_batch or run.batch):
                total, count, waiting = *self._added(maker.batch(waiting, random), device, total, count), []
        if waiting:
            total, count = self._added(maker.batch(waiting, random), device, total, count)
        return total / count if count else math.nan

    def _added(self, batch: Batch, device: torch.device, total: float, count: int) -> tuple[float, int]:
        if not batch.count:
            return total, count
        found, n = loss_sum(self.model, batch.to(device), run=self.precision.call)
        return total + float(found), count + n

    def _sample(self) -> str | None:
        """A text that begins as a held-out one does."""
        lm, first = self.parts.lm, next(self._valid_rows())
        assert lm.tokenizer is not None
        room = lm.config.max_seq_len
        read = first.tokens[: min(16, room // 2)] if first.source is None else first.source[:room]
        prompt, decoding = lm.tokenizer.decode(read.tolist()), Sampling(temperature=0.8, seed=self.recipe.run.seed)
        try:
            return prompt + lm.generate(prompt, min(48, room // 2), decoding=decoding).text
        except GenerationError:
            return None  # this model does not write

    def _save(self) -> None:
        training: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.state(),
            "adapters": adapter_state(self.model),
        }
        if self.ema is not None:
            training["ema"] = self.ema
        saved = checkpoints.Saved(self.step, self.stream.state(), training)
        checkpoints.write(Path(self.recipe.run.folder), self.parts.lm, saved)

    def _restore(self, folder: Path) -> None:
        saved = checkpoints.read(folder)
        self.model.load_state_dict(checkpoints.weights(folder))
        self.model.load_state_dict(dict(saved.training["adapters"]), strict=False)
        self.optimizer.load_state_dict(dict(saved.training["optimizer"]))
        self.precision.restore(saved.training["scaler"])
        if self.ema is not None:
            for name, tensor in self.ema.items():
                tensor.copy_(saved.training["ema"][name])
        self.stream.restore(saved.data)
        self.step = saved.step

    def _finish(self) -> None:
        """The model that the run is for: averaged if the recipe says so."""
        run = Path(self.recipe.run.folder)
        if self.ema is not None:
            self.model.load_state_dict(self.ema, strict=False)
        elif self.recipe.run.average_last:
            last = self._saved()[-self.recipe.run.average_last :]
            self.model.load_state_dict(checkpoints.average(checkpoints.weights(folder) for folder in last))
        self.model.eval()
        if self.recipe.lora is not None:
            save_adapter(self.model, run / "adapter")
            merge(self.model)
        self.parts.lm.save(run / "model")
        self.journal.close()

    def _what_broke(self, batch: Batch, loss: float) -> str:
        """Where the first number that is none appeared, in words."""
        where = "in the loss itself"
        if math.isfinite(loss):
            gradients = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
            where = f"but not the gradient of {next(name for name, g in gradients if not bool(g.isfinite().all()))}"
        device, rows = next(self.model.parameters()).device, self.recipe.run.micro_batch or self.recipe.run.batch
        with _first_broken(self.model) as broken, torch.no_grad():
            for part in batch.split(rows):
                loss_sum(self.model, part.to(device), run=self.precision.call)
        if broken:
            where = f"first in the output of {broken[0]}"
        weights = next((name for name, p in self.model.named_parameters() if not bool(p.isfinite().all())), None)
        if weights is not None:
            where = f"the weights {weights} are no longer finite"
        place = self.stream.position - self.recipe.run.batch
        return (
            f"step {self.step}: the loss is {loss}, {where}; examples {place} to {self.stream.position - 1} of the "
            "data. Lower schedule.peak, clip harder, or use fp32 or bf16; the last checkpoint is intact"
        )


def _due(every: int, step: int, steps: int) -> bool:
    """Whether something that is done `every` so many steps, and at the end, is due."""
    return step == steps or (every > 0 and step % every == 0)


def _random(seed: int, step: int) -> np.random.Generator:
    """What objectives draw in a step. The counter's low half counts the draws, so that no two steps share any."""
    return np.random.Generator(np.random.Philox(key=seed, counter=step << 128))


def _mixed(seed: int, step: int) -> int:
    """A seed of its own for each step."""
    return int(np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _same(before: Recipe, now: Recipe) -> None:
    """A run is taken up by the recipe that it began with; how long it goes and what it keeps may change."""
    free = ("steps", "eval_every", "save_every", "keep", "sample_every", "device", "folder", "compile")
    for path in _differing(before.to_dict(), now.to_dict()):
        if path.partition(".")[0] != "log" and path not in {f"run.{name}" for name in free}:
            raise ConfigError(
                f"{path}: differs from what the run began with; take its own {RECIPE}, or choose another folder"
            )


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted paths of values that are not the same in both."""
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differing(a, b, f"{prefix}{name}.")
        elif a != b:
            yield f"{prefix}{name}"


@contextmanager
def _first_broken(model: Transformer) -> Iterator[list[str]]:
    """Within the block, the names of modules whose output holds a number that is none, in order."""
    broken: list[str] = []

    def watcher(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not bool(output.isfinite().all()):
                broken.append(name)

        return look

    handles = [module.register_forward_hook(watcher(name)) for name, module in model.named_modules() if name]
    try:
        yield broken
    finally:
        for handle in handles:
            handle.remove()
