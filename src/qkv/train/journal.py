"""The log of a run: a JSON object per step in log.jsonl, and TensorBoard or Weights & Biases if they are asked for."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qkv.config.recipe import Log
from qkv.errors import CheckpointError, ConfigError

FILE = "log.jsonl"

Sink = Callable[[int, Mapping[str, float]], None]
Opener = Callable[[int], tuple[Sink, Callable[[], None]]]
"""From the first step that will be written: what takes the figures of steps, and what ends it."""


class Journal:
    """Where the figures of a run go."""

    def __init__(self, folder: Path, log: Log) -> None:
        self._path = folder / FILE
        self._waiting: list[Opener] = []
        if log.tensorboard:
            self._waiting.append(_tensorboard(folder))
        if log.wandb:
            self._waiting.append(_wandb(folder))
        self._open: list[tuple[Sink, Callable[[], None]]] = []

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append a step, without what is not finite (the norm of a step that fp16 leaves out): JSON has no infinity."""
        known = {name: value for name, value in entry.items() if not isinstance(value, float) or math.isfinite(value)}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: cannot be written ({error.strerror}); free some space, then resume"
            ) from None
        figures = {name: value for name, value in known.items() if isinstance(value, int | float) and name != "step"}
        while self._waiting:
            self._open.append(self._waiting.pop(0)(entry["step"]))
        for sink, _ in self._open:
            sink(entry["step"], figures)

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`: they will be made again. A line that a kill cut short goes too."""
        kept = [line for line, entry in read(self._path) if entry["step"] <= step]
        new = self._path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        new.replace(self._path)

    def close(self) -> None:
        """The run is over."""
        for _, close in self._open:
            close()
        self._open = []


def _tensorboard(folder: Path) -> Opener:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("log.tensorboard: needs the package tensorboard; pip install tensorboard") from None

    def opened(first: int) -> tuple[Sink, Callable[[], None]]:
        # What an earlier part of the run wrote about these steps is not shown.
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first)

        def sink(step: int, figures: Mapping[str, float]) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, step)

        return sink, writer.close

    return opened


def _wandb(folder: Path) -> Opener:
    try:
        wandb: Any = importlib.import_module("wandb")
    except ImportError:
        raise ConfigError("log.wandb: needs the package wandb; pip install wandb") from None

    def opened(first: int) -> tuple[Sink, Callable[[], None]]:
        run = wandb.init(dir=str(folder), name=folder.name)
        return lambda step, figures: run.log(dict(figures), step=step), run.finish

    return opened


class Silence(Journal):
    """The journal of a process that leaves writing to another one."""

    def __init__(self) -> None:
        pass

    def write(self, entry: Mapping[str, Any]) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The whole lines of a log, as text and as what they say."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        found.append((line, entry))
    return found
