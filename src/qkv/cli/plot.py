"""`qkv plot`: loss curves of runs, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.errors import DataError

_SPAN = 0.02
"""The smoothing reaches back over this share of a run."""
_FIELDS = ("loss", "valid_loss")


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or their logs.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The figure: .png or .svg.")] = Path("loss.png"),
) -> None:
    """Draw the loss curves of runs: lines for training, smoothed; points for the held-out texts."""
    from qkv.lab.cache_figure import check

    check(out)
    curves = [read(run) for run in runs]
    draw(out, curves, _labels(runs))
    print(f"{out}: {len(curves)} run{'s' * (len(curves) > 1)}")


@dataclass(frozen=True)
class Curve:
    """The losses of a run."""

    steps: list[int]
    losses: list[float]
    valid_steps: list[int]
    valid_losses: list[float]

    def smoothed(self) -> list[float]:
        """Each loss averaged with those before it, whose weights fall over `_SPAN` of the run."""
        keep = 1 - 1 / max(1.0, _SPAN * len(self.losses))
        found, weighted, weights = list[float](), 0.0, 0.0
        for loss in self.losses:
            weighted, weights = keep * weighted + loss, keep * weights + 1
            found.append(weighted / weights)  # the first ones are no average of what did not happen
        return found


def read(run: Path) -> Curve:
    """The log of a run. One line that a kill cut short may end it; anything else that is no step is refused."""
    path = run / "log.jsonl" if run.is_dir() else run
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give the folder of a run, or its log.jsonl") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: no UTF-8 text; give the folder of a run, or its log.jsonl") from None
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    entries = [_entry(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    if not entries:
        raise DataError(f"{path}: holds no step yet; wait for the run's first one")
    for number, (before, entry) in enumerate(pairwise(entries), start=2):
        if entry["step"] <= before["step"]:
            raise DataError(
                f"{path}, line {number}: step {entry['step']} follows step {before['step']}; "
                "two runs wrote into one log: keep the lines of one"
            )
    valid = [entry for entry in entries if "valid_loss" in entry]
    return Curve(
        [entry["step"] for entry in entries],
        [entry["loss"] for entry in entries],
        [entry["step"] for entry in valid],
        [entry["valid_loss"] for entry in valid],
    )


def _entry(line: str, where: str) -> dict[str, Any]:
    """A step of a log, checked."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    whole = isinstance(entry, dict) and type(entry.get("step")) is int and "loss" in entry
    if not whole or not all(isinstance(entry.get(name, 0.0), int | float) for name in _FIELDS):
        raise DataError(f"{where}: not a step of a run (an object with step and loss); mend or delete the line")
    return dict(entry)


def _labels(runs: Sequence[Path]) -> list[str]:
    """The folders' names, or the whole paths where names are equal."""
    names = [(run if run.is_dir() else run.parent).resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def draw(path: Path, curves: Sequence[Curve], labels: Sequence[str]) -> None:
    """Write the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for curve, label in zip(curves, labels, strict=True):
        (line,) = axes.plot(curve.steps, curve.smoothed(), label=f"{label}, training (smoothed)")
        if curve.valid_losses:
            said = f"{label}, held out: {curve.valid_losses[-1]:.3f} at the end"
            axes.plot(curve.valid_steps, curve.valid_losses, "o", color=line.get_color(), label=said)
    axes.set(xlabel="step", ylabel="loss, nats per target")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
