"""`qkv demo`: the main job in one command: train, measure, save, load, generate."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.stream import indented, interrupts

if TYPE_CHECKING:
    from rich.console import Console

    from qkv.evaluate import Score
    from qkv.model import TextModel
    from qkv.train import Trainer
    from qkv.train.demo import Texts

_SAMPLE = 200  # bytes


def command(
    data: Annotated[Path | None, typer.Option(help="A text file; by default Python's language reference.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 2000,
    seconds: Annotated[float, typer.Option(min=1, help="Train no longer than this; fewer steps are made.")] = 150,
    seed: Annotated[int, typer.Option(min=0, help="For the weights, the batches and the samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the model is saved.")] = Path("runs/demo"),
) -> None:
    """Train a small Llama on real text, then generate from it.

    Prints the held-out loss and a sample before and after. The model is saved, loaded again and generates from there.
    Ctrl-C ends the training early and keeps what was learnt.
    """
    from rich.console import Console

    from qkv.checkpoint.native import check_target
    from qkv.model import load
    from qkv.text import language_reference, read_text
    from qkv.train import Trainer
    from qkv.train.demo import ORDER, demo_recipe, prepared, steps_within

    console = Console()
    check_target(out)  # before the work, not after it
    name = "Python's language reference" if data is None else str(data)
    texts = prepared(language_reference() if data is None else read_text(data), name)
    with TemporaryDirectory() as folder:
        with console.status("preparing"):
            steps = steps_within(seconds, demo_recipe(texts, steps, seed, Path(folder)))
            trainer = Trainer.start(demo_recipe(texts, steps, seed, Path(folder)))
        config = trainer.model.config
        print(f"Text: {name}, {len(texts.training):,} bytes to train on, {len(texts.held_out):,} held out")
        print(f"Model: Llama's block, d_model {config.d_model}, {config.n_parameters:,} parameters, byte vocabulary")
        before, sample = _measured(trainer.parts.lm, texts, seed, console)
        print(f"\nBefore training: held-out loss {before.loss:.3f}, a sample:\n{sample}")
        done = _train(trainer, seconds)
    trainer.parts.lm.save(out)
    after, sample = _measured(load(out), texts, seed, console)
    print(f"\nAfter {done} steps, saved to {out} and loaded again: held-out loss {after.loss:.3f}, a sample:\n{sample}")

    print("\nBits per byte of the held-out text (fewer are better)")
    print(f"  before training    {before.bits_per_token:.3f}")
    print(f"  order-{ORDER} n-gram     {texts.baseline():.3f}")
    print(f"  after training     {after.bits_per_token:.3f}")
    print("\nWhat to try next:")
    print(f'  qkv generate {out} "The with statement"')
    print("  qkv demo --data FILE      (any text file; --steps 8000 --seconds 600 for a better model)")
    print("  qkv show llama-3-8b       (a published model: its tensors and operations)")


def _measured(lm: TextModel, texts: Texts, seed: int, console: Console) -> tuple[Score, str]:
    """The held-out score, and a sample that begins with a few held-out words."""
    from qkv.config.decoding import Sampling
    from qkv.evaluate import disjoint_windows
    from qkv.train.demo import CONTEXT

    with console.status("measuring"):
        score = disjoint_windows(lm.model, texts.held_out, CONTEXT)
        prompt = texts.prompt()
        done = lm.generate(prompt, _SAMPLE, decoding=Sampling(temperature=0.8, seed=seed))
        return score, indented(prompt + done.text)


def _train(trainer: Trainer, seconds: float) -> int:
    """Train with a progress bar; the number of steps made."""
    from rich.console import Console

    from qkv.cli.train import Meter, progress_bar

    steps, meter = trainer.recipe.run.steps, Meter(None)
    print()
    with progress_bar(Console()) as progress, interrupts() as asked:
        task = progress.add_task("", total=steps)
        for report in trainer.run():
            meter.add(report)
            progress.update(task, completed=report.step, description=meter.line())
            if report.step % max(steps // 8, 1) == 0:
                line = f"  step {report.step:4}  loss {meter.loss:.3f}  {report.seconds:4.0f} s"
                progress.console.print(line, highlight=False)
            if asked:
                progress.console.print("  interrupted: keeping what was learnt so far")
                break
            if report.seconds >= seconds:
                progress.console.print(f"  {seconds:.0f} s are over: keeping what was learnt so far")
                break
    trainer.model.eval()
    return trainer.step
