"""The loop: batches, gradients, one step of the optimizer; evaluation, checkpoints and a log on the way.

    for report in Trainer.start(recipe).run(): ...

Everything random is drawn anew for each step from (seed, step), so that a run that was killed and taken up again makes
the same steps, to the bit on a CPU with the same number of threads: weights, optimizer, data, dropout, masks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkv.config.decoding import Sampling
from qkv.config.recipe import Recipe
from qkv.config.training import Masked, Prefer
from qkv.errors import CheckpointError, ConfigError, DataError, GenerationError, TrainingError
from qkv.nn import Transformer
from qkv.nn.recall import Recall
from qkv.train import checkpoints
from qkv.train.adapter_files import save_adapter
from qkv.train.adapters import adapter_state, merge
from qkv.train.allocator import keep_freed_memory
from qkv.train.batch import Batch
from qkv.train.data import CLASSES, Contiguous
from qkv.train.heldout import HeldOut, Measured
from qkv.train.loss import loss_sum, pair_head, step_gradients
from qkv.train.optimizers import make_optimizer, set_rate
from qkv.train.parallel.strategy import ALONE, Strategy, strategy_of
from qkv.train.parts import Parts, parts_of
from qkv.train.precision import Precision
from qkv.train.preference import Reference, frozen_copy
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
    pair_loss: float | None = None
    """Per row, of the head that tells whether two segments follow each other."""
    valid_accuracy: float | None = None
    """Of classes, or of spans."""
    valid_pair_loss: float | None = None
    valid_pair_accuracy: float | None = None

    def with_valid(self, found: Measured) -> Report:
        """With the figures of the held-out texts."""
        return replace(
            self,
            valid_loss=found.loss,
            valid_accuracy=found.accuracy,
            valid_pair_loss=found.pair_loss,
            valid_pair_accuracy=found.pair_accuracy,
        )

    def entry(self) -> dict[str, Any]:
        """The step as a line of the log."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Trainer:
    """One run."""

    def __init__(self, recipe: Recipe, parts: Parts, strategy: Strategy = ALONE) -> None:
        self.recipe, self.parts, self.model, self.strategy = recipe, parts, parts.lm.model, strategy
        if strategy.processes > 1 and (parts.memory or isinstance(recipe.objective, Prefer)):
            what = "objective.memory" if parts.memory else "objective.kind"
            raise ConfigError(f"{what}: what one step leaves to the next is in one process only; start one")
        before = frozen_copy(self.model) if isinstance(recipe.objective, Prefer) else None
        strategy.divide(recipe, self.model)
        self.optimizer = strategy.optimizer(make_optimizer(self.model, recipe.optimizer))
        self.stream = parts.stream(recipe)
        self.recall = Recall.empty(parts.memory) if parts.memory else None
        asks = isinstance(recipe.objective, Masked) and recipe.objective.next_sentence
        self.pair_head = pair_head(self.model) if asks else None
        self.precision = Precision.of(recipe.run, self.model, strategy)
        self.reference = None
        if before is not None:
            rows, run = recipe.run.micro_batch or recipe.run.batch, replace(self.precision, model=before).call
            self.reference = Reference(before, run, rows)
        self.held_out = HeldOut(recipe, parts, strategy, self.reference)
        self.step = 0
        self.ema: dict[str, Tensor] | None = None
        if recipe.run.ema is not None:
            self.ema = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.journal = strategy.journal(recipe)

    @classmethod
    def start(cls, recipe: Recipe) -> Trainer:
        """A new run; refused where its folder holds one already."""
        folder, strategy = Path(recipe.run.folder), strategy_of(recipe)
        if (folder / RECIPE).exists() or checkpoints.folders(folder):
            raise ConfigError(f"run.folder: {folder} holds a run already; resume it, or choose another folder")
        with strategy.first():
            parts = parts_of(recipe, begun=not strategy.main, empty=strategy.divided)
        trainer = cls(recipe, parts, strategy)
        trainer._try_data()
        # Last: what is refused before has begun no run.
        if strategy.main:
            (folder / RECIPE).write_text(recipe.to_toml(), encoding="utf-8")
        return trainer

    @classmethod
    def resume(cls, recipe: Recipe) -> Trainer:
        """Go on from the last checkpoint, or begin anew where there is none."""
        folder = Path(recipe.run.folder)
        if not (folder / RECIPE).is_file():
            raise CheckpointError(f"run.folder: {folder} holds no run; start one without resuming")
        _same(Recipe.read(folder / RECIPE), recipe)
        strategy = strategy_of(recipe)
        with strategy.first():
            parts = parts_of(recipe, begun=True, empty=strategy.divided)
        trainer = cls(recipe, parts, strategy)
        saved = checkpoints.folders(folder)
        if saved:
            trainer._restore(saved[-1])
        trainer.journal.rewind(trainer.step)
        return trainer

    def run(self) -> Iterator[Report]:
        """The steps that remain; the model is left in evaluation mode."""
        run, began = self.recipe.run, time.monotonic()
        keep_freed_memory()
        while self.step < run.steps:
            self.step += 1
            report = self._step(began)
            # First the log: a kill in between leaves a line too many, which resuming takes back, not one too few.
            self.journal.write(report.entry())
            if self._in_turn(self.step):
                self._save()
                if self.strategy.main:
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
        torch.manual_seed(self.strategy.seed(run.seed, self.step))
        self.optimizer.zero_grad(set_to_none=True)
        found = step_gradients(
            self.model,
            self.strategy.share(batch).split(run.micro_batch or run.batch),
            self.parts.loss,
            replace(self.strategy.setting(self.precision, batch), pair_head=self.pair_head, rows=batch.rows),
        )
        loss = self.strategy.total(found.mean)
        if not math.isfinite(loss):
            raise TrainingError(self._what_broke(batch, loss))
        self.recall = found.recall
        norm = self.precision.update(self.optimizer, run.clip)
        if not math.isfinite(norm) and self.precision.exhausted:
            raise TrainingError(self._what_broke(batch, loss))
        self._follow()
        self.model.eval()
        valid = self.measured() if _due(run.eval_every, self.step, run.steps) else None
        sample = self._sample() if run.sample_every and self.step % run.sample_every == 0 else None
        pairs, seconds = None if found.pairs is None else self.strategy.total(found.pairs), time.monotonic() - began
        report = Report(self.step, loss, value, norm, found.count, seconds, sample=sample, pair_loss=pairs)
        return report if valid is None else report.with_valid(valid)

    def _try_data(self) -> None:
        """What examples lack is said now, and not at the first step or the first evaluation."""
        random = _random(self.recipe.run.seed, 0)
        self.parts.maker.batch(next(self.parts.stream(self.recipe)), random)
        if next(self.held_out.batches(), None) is None:
            raise DataError("data: no held-out text fits into a row; raise data.context, or give other data.valid")

    def _batch(self) -> Batch:
        if isinstance(self.stream, Contiguous) and self.stream.begins:
            self.recall = Recall.empty(self.parts.memory)
        batch = self.parts.maker.batch(next(self.stream), _random(self.recipe.run.seed, self.step))
        return replace(batch, recall=self.recall) if self.reference is None else self.reference.beside(batch)

    def _follow(self) -> None:
        """Move the average of the weights."""
        if self.ema is None:
            return
        share = 1 - (self.recipe.run.ema or 0.0)
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                self.ema[name].lerp_(tensor, share)

    def valid_loss(self) -> float:
        """The mean loss of the held-out texts' targets, each once."""
        return self.measured().loss

    def measured(self) -> Measured:
        """All figures of the held-out texts."""
        return self.held_out.measured(self.model, self.precision.call)

    def _sample(self) -> str | None:
        """A text that begins as a held-out one does."""
        lm, first = self.parts.lm, next(self.held_out.examples())
        assert lm.tokenizer is not None
        room = lm.config.max_seq_len
        read = first.tokens[: min(16, room // 2)] if first.source is None else first.source[:room]
        prompt, decoding = lm.tokenizer.decode(read.tolist()), Sampling(temperature=0.8, seed=self.recipe.run.seed)
        try:
            return prompt + lm.generate(prompt, min(48, room // 2), decoding=decoding).text
        except GenerationError:
            return None  # this model does not write
        finally:
            self.strategy.rest(self.model)

    def _save(self) -> None:
        training: dict[str, Any] = {
            "scaler": self.precision.state(),
            "adapters": adapter_state(self.model),
        }
        if self.ema is not None:
            training["ema"] = self.ema
        if self.recall is not None:
            training["recall"] = {"seen": self.recall.seen, "layers": list(self.recall.layers)}
        saved = checkpoints.Saved(self.step, self.stream.state(), training)
        self.strategy.write(Path(self.recipe.run.folder), self.parts.lm, self.optimizer, saved)

    def _restore(self, folder: Path) -> None:
        saved = self.strategy.read(folder, self.model, self.optimizer)
        self.model.load_state_dict(dict(saved.training["adapters"]), strict=False)
        self.precision.restore(saved.training["scaler"])
        if self.ema is not None:
            for name, tensor in self.ema.items():
                tensor.copy_(saved.training["ema"][name])
        if self.recall is not None:
            kept, device = saved.training["recall"], next(self.model.parameters()).device
            self.recall = replace(
                self.recall, seen=kept["seen"], layers=tuple(layer.to(device) for layer in kept["layers"])
            )
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
            if self.strategy.main:
                save_adapter(self.model, run / "adapter")
            merge(self.model)
        names = run / "model" / CLASSES
        if self.strategy.main:
            names.unlink(missing_ok=True)  # a model that takes another's place leaves no file of others
        self.strategy.save_model(self.parts.lm, run / "model")
        if self.parts.classes and self.strategy.main:
            names.write_text(json.dumps(self.parts.classes, ensure_ascii=False), encoding="utf-8")
        self.journal.close()

    def _what_broke(self, batch: Batch, loss: float) -> str:
        """Where the first number that is none appeared, in words."""
        where = "in the loss itself"
        if math.isfinite(loss):
            gradients = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
            where = f"but not the gradient of {next(name for name, g in gradients if not self.strategy.finite(g))}"
        device, rows = next(self.model.parameters()).device, self.recipe.run.micro_batch or self.recipe.run.batch
        with _first_broken(self.model) as broken, torch.no_grad():
            for part in self.strategy.share(batch).split(rows):
                loss_sum(self.model, part.to(device), run=self.precision.call)
        first = self.strategy.said(broken[0] if broken else None)
        if first is not None:
            where = f"first in the output of {first}"
        weights = next((name for name, p in self.model.named_parameters() if not self.strategy.finite(p)), None)
        if weights is not None:
            where = f"the weights {weights} are no longer finite"
        return (
            f"step {self.step}: the loss is {loss}, {where}; {self.stream.latest}. "
            "Lower schedule.peak, clip harder, or use fp32 or bf16; the last checkpoint is intact"
        )


def _due(every: int, step: int, steps: int) -> bool:
    """Whether something that is done `every` so many steps, and at the end, is due."""
    return step == steps or (every > 0 and step % every == 0)


def _random(seed: int, step: int) -> np.random.Generator:
    """What objectives draw in a step. The counter's low half counts the draws, so that no two steps share any."""
    return np.random.Generator(np.random.Philox(key=seed, counter=step << 128))


def _same(before: Recipe, now: Recipe) -> None:
    """A run is taken up by the recipe that it began with; its length, what it keeps and who shares it may change."""
    free = ("steps", "eval_every", "save_every", "keep", "sample_every", "device", "folder", "compile")
    for path in _differing(before.to_dict(), now.to_dict()):
        if path.partition(".")[0] not in ("log", "parallel") and path not in {f"run.{name}" for name in free}:
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
