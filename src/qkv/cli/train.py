"""`qkv train`: a recipe becomes a run, with its figures on the screen while it goes."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.models import AsJson
from qkv.cli.ranks import own_rank, silence
from qkv.cli.stream import INTERRUPTED, indented, interrupts, notes, tell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from qkv.config.recipe import Recipe
    from qkv.nn import Transformer
    from qkv.train import Report, Trainer

_SMOOTHING = 0.9
_PRODUCT, _PRODUCT_SECONDS = 1024, 0.3


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="A recipe; also the one in a run's folder.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change the recipe, as in --set run.steps=100; repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")] = False,
    show_schedule: Annotated[
        bool, typer.Option("--show-schedule", help="Only print the learning rates; no data is read.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by a recipe; on several devices: torchrun --nproc-per-node 8 -m qkv train RECIPE.toml.

    The run's folder gets the model, checkpoints, the log (log.jsonl, see `qkv plot`) and the whole recipe. Ctrl-C ends
    the run after the current step with a checkpoint of it; a second one at once.

    MFU, shown for next-token training of one stack, is 6 * parameters * tokens/s over the rate of a matrix product that
    is measured at the start. The parameters are those of the matrices that every token is multiplied with, and the
    products inside attention are not counted, so that it is too low for long contexts.
    """
    from qkv.config.recipe import Recipe, assignments

    whole = Recipe.read(recipe, assignments(changes or ()))
    if show_schedule:
        _print_schedule(whole, as_json)
        return
    first = own_rank() == 0
    with notes() if first else silence():
        try:
            result = _run(whole, resume)
        except KeyboardInterrupt:  # while the data is prepared, or the second one
            if first:
                _tell_interrupted(whole, None)
            sys.exit(INTERRUPTED)
    if first:
        print(json.dumps(asdict(result)) if as_json else result.text())
    if result.interrupted:
        sys.exit(INTERRUPTED)


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    folder: str
    steps: int
    """Made in all, those before a resumption included."""
    loss: float | None
    """Of the last step."""
    valid_loss: float | None
    """Of the model that was saved, averaged if the recipe says so; None if the run was interrupted."""
    seconds: float
    """Since it was started or taken up."""
    tokens_per_second: float | None
    """Targets, over steps without their evaluations."""
    interrupted: bool

    def text(self) -> str:
        """For a person."""
        if self.interrupted:
            return f"{self.folder}: {_counted(self.steps)} made"
        said = [f"{self.folder}: {_counted(self.steps)}"]
        if self.loss is not None:
            said.append(f"loss {self.loss:.4f}")
        if self.valid_loss is not None:
            said.append(f"held-out loss {self.valid_loss:.4f}")
        said.append(f"{self.seconds:.0f} s")
        if self.tokens_per_second is not None:
            said.append(f"{self.tokens_per_second:,.0f} tokens/s")
        return f"{', '.join(said)}\nThe model is in {Path(self.folder) / 'model'}"


def _counted(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def _run(recipe: Recipe, resume: bool) -> Result:
    """Train, with a progress bar on stderr."""
    from rich.console import Console

    from qkv.train import Trainer

    console = Console(stderr=True, quiet=own_rank() > 0)
    with console.status("preparing model and data"):
        trainer = Trainer.resume(recipe) if resume else Trainer.start(recipe)
        meter = Meter.of(trainer, recipe)
    first, last, interrupted = trainer.step, None, False
    with progress_bar(console) as progress, interrupts() as asked:
        task = progress.add_task("", total=recipe.run.steps, completed=trainer.step)
        for last in trainer.run():
            meter.add(last)
            _show(progress, task, meter, last)
            interrupted = trainer.strategy.any(bool(asked)) and last.step < recipe.run.steps
            if interrupted:
                break
    if interrupted:
        with console.status("saving"):
            trainer.save()
        trainer.journal.close()
        if trainer.strategy.main:
            _tell_interrupted(recipe, trainer.step)
    if first == recipe.run.steps and trainer.strategy.main:
        tell(f"qkv: the run in {recipe.run.folder} was complete already; raise run.steps to go on")
    valid = None if interrupted or last is None else last.valid_loss
    if not interrupted and (last is None or recipe.run.ema is not None or recipe.run.average_last):
        valid = trainer.valid_loss()  # of the averaged weights, which the last step did not have yet
    trainer.strategy.close()
    return Result(
        recipe.run.folder,
        trainer.step,
        None if last is None else last.loss,
        valid,
        0.0 if last is None else last.seconds,
        meter.overall,
        interrupted,
    )


def progress_bar(console: Console) -> Progress:
    """That of a run."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    # A file or a pipe gets the lines of evaluations, and no bar at its end.
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


def _show(progress: Progress, task: TaskID, meter: Meter, report: Report) -> None:
    """Move the bar; evaluations and samples stay as lines above it."""
    progress.update(task, completed=report.step, description=meter.line())
    said = []
    if report.valid_loss is not None:
        said.append(f"step {report.step}  {report.seconds:.0f} s  {meter.line()}")
    if report.sample is not None:
        said.append(indented(report.sample))
    for text in said:
        progress.console.print(text, highlight=False, markup=False, soft_wrap=True)


# Interruption


def _tell_interrupted(recipe: Recipe, step: int | None) -> None:
    """Say what is kept, and how to go on."""
    from qkv.train import checkpoints
    from qkv.train.trainer import RECIPE

    folder = Path(recipe.run.folder)
    after = "" if step is None else f" after step {step}"
    if not (folder / RECIPE).is_file():
        tell(f"qkv: interrupted{after}; nothing is kept")
        return
    saved = checkpoints.folders(folder)
    kept = f"the last checkpoint is of step {int(saved[-1].name)}" if saved else "there is no checkpoint yet"
    tell(f"qkv: interrupted{after}; {kept}; go on with: qkv train {folder / RECIPE} --resume")


# Figures


@dataclass
class Meter:
    """What the bar says of a run."""

    multiplied: int | None
    """Parameters that each token is multiplied with; None where MFU cannot be said."""
    peak: float = math.nan
    """Operations a second of matrix products, one on each process; not measured where MFU cannot be said."""
    loss: float = math.nan
    """Smoothed."""
    valid_loss: float | None = None
    valid_accuracy: float | None = None
    rate: float | None = None
    """Targets a second, smoothed; evaluations are left out."""
    _tokens: int = 0
    _seconds: float = 0.0
    _before: float = field(default_factory=perf_counter)

    @classmethod
    def of(cls, trainer: Trainer, recipe: Recipe) -> Meter:
        """That of a run; the peak is measured now."""
        multiplied = _multiplied(trainer, recipe)
        if multiplied is None:
            return cls(None)
        return cls(multiplied, _peak(trainer.model, recipe.run.precision) * trainer.strategy.processes)

    def add(self, report: Report) -> None:
        """Take a step into account."""
        now = perf_counter()
        seconds, self._before = now - self._before, now
        self.loss = _smoothed(None if math.isnan(self.loss) else self.loss, report.loss)
        if report.valid_loss is not None:
            self.valid_loss, self.valid_accuracy = report.valid_loss, report.valid_accuracy
        if report.valid_loss is None and report.sample is None:  # these take a time of their own
            self.rate = _smoothed(self.rate, report.tokens / seconds)
            self._tokens += report.tokens
            self._seconds += seconds

    @property
    def overall(self) -> float | None:
        """Targets a second of the whole run, evaluations left out."""
        return self._tokens / self._seconds if self._tokens else None

    @property
    def mfu(self) -> float | None:
        """The share of the machine's operations that the model makes use of (Chowdhery 2022, appendix B)."""
        if self.multiplied is None or self.rate is None:
            return None
        return 6 * self.multiplied * self.rate / self.peak

    def line(self) -> str:
        """The figures."""
        said = [f"loss {self.loss:.3f}"]
        if self.valid_loss is not None:
            right = "" if self.valid_accuracy is None else f" ({self.valid_accuracy:.1%} right)"
            said.append(f"held-out {self.valid_loss:.3f}{right}")
        if self.rate is not None:
            said.append(f"{self.rate:,.0f} tokens/s")
        if self.mfu is not None:
            said.append(f"MFU {self.mfu:.0%}")
        return ", ".join(said)


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * value


def _multiplied(trainer: Trainer, recipe: Recipe) -> int | None:
    """Parameters in products with each target's token; None where tokens, targets and parameters do not go together.

    Where only some tokens are targets, where source and target have stacks of their own, and where each token meets
    only some experts, 6 * parameters * targets is not what a step computes.
    """
    from qkv.config import LanguageModel, MixtureOfExperts
    from qkv.config.training import NextToken

    config = trainer.model.config
    blocks = [block for stack in config.stacks.values() for block in stack.blocks]
    told = isinstance(recipe.objective, NextToken) and recipe.data.format != "chat" and len(config.stacks) == 1
    if not told or not isinstance(config.head, LanguageModel):
        return None
    if any(isinstance(block.ffn, MixtureOfExperts) for block in blocks):
        return None
    named = trainer.model.named_parameters()
    count = sum(tensor.numel() for name, tensor in named if not name.startswith("embed."))
    return count + config.vocab_size * config.d_model * config.head.tied


def _peak(model: Transformer, precision: str) -> float:
    """Operations a second of the fastest of several matrix products, on the model's device and in its precision."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    device = next(model.parameters()).device
    matrix = torch.ones(_PRODUCT, _PRODUCT, dtype=dtype, device=device)
    best, end = math.inf, perf_counter() + _PRODUCT_SECONDS
    while True:
        start = perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        best = min(best, perf_counter() - start)
        if perf_counter() > end:
            return 2 * _PRODUCT**3 / best


# The schedule


def _print_schedule(recipe: Recipe, as_json: bool) -> None:
    from qkv.cli.table import aligned
    from qkv.train.schedule import table

    rows = table(recipe.schedule, recipe.run.steps, _d_model(recipe))
    if as_json:
        print(json.dumps([{"step": step, "rate": rate} for step, rate in rows]))
        return
    peak = max(rate for _, rate in rows)
    lines = [[f"{step:,}", f"{rate:.4e}", "#" * round(40 * rate / peak)] for step, rate in rows]
    print(aligned([["step", "rate", ""], *lines], right=(0, 1)))


def _d_model(recipe: Recipe) -> int:
    """The model's width, on which Noam's rates depend; of a checkpoint only its config is read."""
    from qkv.cli.source import config_of

    written = recipe.model.architecture
    if written is None:
        assert recipe.model.checkpoint is not None
        written = config_of(recipe.model.checkpoint)
    return written.d_model
