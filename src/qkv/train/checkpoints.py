"""Checkpoints of a run: a model folder with what training needs to go on as if nothing had happened.

    run/checkpoints/00000100/   model/         a folder that `qkv.load` reads
                                training.pt    optimizer, averages, scaler
                                state.json     step, and where the data is

Each is written beside its place and renamed, so that a kill during a save loses nothing. Random numbers need no state:
they are drawn anew for each step from seed and step.
"""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.checkpoint.whole_folder import whole_folder
from qkv.errors import CheckpointError
from qkv.model import TextModel, load

MODEL, TRAINING, STATE = "model", "training.pt", "state.json"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds beside the model."""

    step: int
    data: Mapping[str, Any]
    """The state of the stream of examples."""
    training: Mapping[str, Any]
    """Tensors of the optimizer and of what follows the weights."""


def folders(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path.parent for path in (run / "checkpoints").glob(f"[0-9]*/{STATE}"))


def write(run: Path, lm: TextModel, saved: Saved) -> Path:
    """Save a checkpoint."""
    target = run / "checkpoints" / f"{saved.step:08d}"
    with whole_folder(target) as new:
        lm.save(new / MODEL)
        _save(dict(saved.training), new / TRAINING)
        (new / STATE).write_text(json.dumps({"step": saved.step, "data": saved.data}), encoding="utf-8")
    return target


def tidy(run: Path, keep: int, stays: Callable[[int], bool]) -> None:
    """Delete all checkpoints but the last `keep` of the steps that stay, and what a kill left of unfinished ones."""
    last = [folder for folder in folders(run) if stays(int(folder.name))][-keep:]
    for old in {*folders(run), *(run / "checkpoints").glob(".*")}.difference(last):
        shutil.rmtree(old, ignore_errors=True)


def _save(content: dict[str, Any], path: Path) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # torch's own word for a full disk
        raise CheckpointError(f"{path.name}: cannot be written ({in_a_line(error)}); is the disk full?") from None


def in_a_line(error: BaseException) -> str:
    """What an error says, short."""
    return " ".join(str(error).split())[:200]


def read(folder: Path) -> Saved:
    """What `write` put beside the model."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if not zipfile.is_zipfile(folder / TRAINING):  # torch would try an older format, and fail in any way
            raise ValueError(f"{TRAINING} is not whole")
        training = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
        return Saved(state["step"], state["data"], training)
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise damaged(folder, error) from None


def weights(folder: Path) -> Mapping[str, Tensor]:
    """The model's tensors."""
    try:
        return load(folder / MODEL).model.state_dict()
    except CheckpointError as error:
        raise damaged(folder, error) from None


def damaged(folder: Path, error: BaseException) -> CheckpointError:
    """What is said of a checkpoint that cannot be read."""
    return CheckpointError(f"{folder}: damaged ({in_a_line(error)}); delete it to go on from the one before")


def average(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several models' tensors, in float64 (Vaswani 2017, section 6.1)."""
    total: dict[str, Tensor] = {}
    count = 0
    dtypes: dict[str, torch.dtype] = {}
    for model in models:
        count += 1
        for name, tensor in model.items():
            dtypes[name] = tensor.dtype
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / count).to(dtypes[name]) for name, tensor in total.items()}
