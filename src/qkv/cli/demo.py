"""`qkv demo`: the main job in one command: train, measure, save, load, generate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.stream import indented, interrupts

if TYPE_CHECKING:
    from qkv.nn import Transformer
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
    from qkv.config.decoding import Sampling
    from qkv.evaluate import Score, disjoint_windows
    from qkv.model import TextModel, build, load
    from qkv.text import ByteTokenizer, language_reference, read_text
    from qkv.train.demo import CONTEXT, ORDER, demo_config, prepared

    console = Console()
    check_target(out)  # before the work, not after it
    name = "Python's language reference" if data is None else str(data)
    texts = prepared(language_reference() if data is None else read_text(data), name)
    lm = TextModel(build(demo_config(), seed=seed), ByteTokenizer())
    print(f"Text: {name}, {len(texts.training):,} bytes to train on, {len(texts.held_out):,} held out")
    print(f"Model: Llama's block, d_model {lm.config.d_model}, {lm.config.n_parameters:,} parameters, byte vocabulary")

    def measured(lm: TextModel) -> tuple[Score, str]:
        """The held-out score, and a sample that begins with a few held-out words."""
        with console.status("measuring"):
            score = disjoint_windows(lm.model, texts.held_out, CONTEXT)
            prompt = texts.prompt()
            done = lm.generate(prompt, _SAMPLE, decoding=Sampling(temperature=0.8, seed=seed))
            return score, indented(prompt + done.text)

    before, sample = measured(lm)
    print(f"\nBefore training: held-out loss {before.loss:.3f}, a sample:\n{sample}")
    done = _train(lm.model, texts, steps, seconds, seed)
    lm.save(out)
    after, sample = measured(load(out))
    print(f"\nAfter {done} steps, saved to {out} and loaded again: held-out loss {after.loss:.3f}, a sample:\n{sample}")

    print("\nBits per byte of the held-out text (fewer are better)")
    print(f"  before training    {before.bits_per_token:.3f}")
    print(f"  order-{ORDER} n-gram     {texts.baseline():.3f}")
    print(f"  after training     {after.bits_per_token:.3f}")
    print("\nWhat to try next:")
    print(f'  qkv generate {out} "The with statement"')
    print("  qkv demo --data FILE      (any text file; --steps 8000 --seconds 600 for a better model)")
    print("  qkv show llama-3-8b       (a published model: its tensors and operations)")


def _train(model: Transformer, texts: Texts, steps: int, seconds: float, seed: int) -> int:
    """Train with a progress bar; the number of steps made."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from qkv.train import Plan, random_windows, train
    from qkv.train.demo import BATCH, CONTEXT, LEARNING_RATE, WARMUP

    plan = Plan(steps, LEARNING_RATE, min(WARMUP, steps), seconds)
    batches = random_windows(texts.training, BATCH, CONTEXT, seed)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    loss, number = 0.0, 0
    print()
    with Progress(*columns, TimeRemainingColumn()) as progress, interrupts() as asked:
        task = progress.add_task("", total=steps)
        for step in train(model, batches, plan):
            number = step.number
            loss = step.loss if number == 1 else 0.9 * loss + 0.1 * step.loss
            speed = number * step.tokens / step.seconds
            progress.update(
                task, completed=number, total=step.steps, description=f"loss {loss:.3f}, {speed:,.0f} bytes/s"
            )
            if number % max(step.steps // 8, 1) == 0:
                progress.console.print(f"  step {number:4}  loss {loss:.3f}  {step.seconds:4.0f} s", highlight=False)
            if asked:
                progress.console.print("  interrupted: keeping what was learnt so far")
                break
    return number
