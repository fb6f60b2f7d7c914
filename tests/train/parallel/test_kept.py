"""Checkpoints of several processes: taken up by as many to the bit, by others at 1e-5; a kill loses nothing."""

from __future__ import annotations

import errno
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import qkv
from qkv.checkpoint import whole_folder
from qkv.config.recipe import Recipe
from qkv.errors import CheckpointError
from qkv.train import Trainer, checkpoints
from qkv.train.parallel.strategy import is_sharded

from .. import runs
from .processes import killed_together, together

STEPS = 6
DIVIDED = {"data": "fsdp"}
DDP = {"data": "ddp"}
TENSOR = {"tensor": 2}


def made(folder: Path, parallel: dict[str, Any], **changes: Any) -> Recipe:
    """Six steps without dropout, with averages, and a checkpoint after each second."""
    common: dict[str, Any] = {
        "run__steps": STEPS,
        "run__save_every": 2,
        "run__ema": 0.7,
        "run__keep": 9,
        "run__batch": 4,
    }
    common["model"] = runs.tiny("llama-2-7b", dropout=0.0)
    base = runs.recipe(folder, **(common | changes))
    return base.override({"parallel": parallel})


def begun(text: str, steps: int) -> list[float]:
    """The losses of the first steps of a run."""
    torch.set_num_threads(1)
    trainer = Trainer.start(Recipe.from_toml(text))
    return [report.loss for report in islice(trainer.run(), steps)]


def resumed(text: str) -> tuple[list[float], float]:
    """The losses of the steps that remained, and of the model at the end."""
    torch.set_num_threads(1)
    trainer = Trainer.resume(Recipe.from_toml(text))
    losses = [report.loss for report in trainer.run()]
    return losses, trainer.valid_loss()


def several(calls: list[tuple[Any, ...]]) -> list[Any]:
    """Several functions in the same processes, one after the other."""
    return [function(*arguments) for function, *arguments in calls]


def killed(text: str, step: int, in_save: bool) -> None:
    """A run that ends at once after a step, or just before its checkpoint takes its place."""
    torch.set_num_threads(1)
    trainer = Trainer.start(Recipe.from_toml(text))
    reports = trainer.run()
    list(islice(reports, step - 1))
    if in_save:
        whole_folder._swap = runs._die
    next(reports)
    runs._die()


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return dict(qkv.load(Path(folder) / "model").model.state_dict())


def test_checkpoints_go_from_any_number_of_processes_to_any_other(tmp_path: Path) -> None:
    """Saved on two and loaded on one, and the other way round; what is kept in pieces, and what is kept whole."""
    kinds = {"fsdp": DIVIDED, "tensor": TENSOR, "ddp": DDP, "context": {"context": 2}}
    for name in kinds:
        (tmp_path / name).mkdir()
    many = {name: made(tmp_path / name, parallel) for name, parallel in kinds.items()}
    single = {name: runs.elsewhere(one, "single") for name, one in many.items()}
    whole = {name: runs.elsewhere(one, "whole") for name, one in many.items()}
    expected = {name: (begun(one.to_toml(), STEPS), resumed(one.to_toml())[1]) for name, one in whole.items()}
    for one in single.values():
        begun(one.to_toml(), 2)
    calls = [(begun, one.to_toml(), 2) for one in many.values()] + [(resumed, one.to_toml()) for one in single.values()]
    first, _ = together(2, several, calls)
    for at, name in enumerate(kinds):
        losses, valid = expected[name]
        last = checkpoints.folders(Path(many[name].run.folder))[-1]
        assert is_sharded(last) == (name in ("fsdp", "tensor"))
        rest, end = resumed(many[name].to_toml())
        assert [*first[at], *rest] == pytest.approx(losses, rel=1e-5)
        assert end == pytest.approx(valid, rel=1e-5)
        rest, end = first[len(kinds) + at]
        assert rest == pytest.approx(losses[2:], rel=1e-5)
        assert end == pytest.approx(valid, rel=1e-5)


def test_a_run_is_taken_up_by_processes_that_share_otherwise(tmp_path: Path) -> None:
    """From divided rows to divided matrices, and back; the recipe says so, and is the same run."""
    texts = [made(tmp_path, parallel).to_toml() for parallel in (DIVIDED, TENSOR, DIVIDED)]
    shorter = Recipe.from_toml(texts[1]).override({"run.steps": 4}).to_toml()
    calls = [(begun, texts[0], 2), (resumed, shorter), (resumed, texts[2])]
    first, _ = together(2, several, calls)
    expected = begun(runs.elsewhere(Recipe.from_toml(texts[0]), "whole").to_toml(), STEPS)
    assert [*first[0], *first[1][0], *first[2][0]] == pytest.approx(expected, rel=1e-5)


def test_two_processes_that_are_killed_go_on_to_the_bit(tmp_path: Path) -> None:
    """After a step, and in the middle of a save, with dropout; in pieces, and whole."""
    wet = {"model": runs.tiny("gpt2"), "run__micro_batch": 1}
    cases = {}
    for name, parallel, in_save in (("fsdp", DIVIDED, True), ("ddp", DDP, False)):
        (tmp_path / name).mkdir()
        cases[name] = made(tmp_path / name, parallel, **wet), in_save
    whole = {name: runs.elsewhere(one, "whole") for name, (one, _) in cases.items()}
    for one, in_save in cases.values():
        killed_together(2, killed, one.to_toml(), 4, in_save)
    calls = [(begun, one.to_toml(), STEPS + 1) for one in whole.values()]
    together(2, several, calls + [(resumed, one.to_toml()) for one, _ in cases.values()])
    for name, (one, _) in cases.items():
        expected, found = whole[name].run.folder, one.run.folder
        assert runs.log(found) == runs.log(expected)
        assert runs.differences(weights(expected), weights(found)) == []
        assert runs.saved(found) == runs.saved(expected) == ["00000002", "00000004", "00000006"]
        assert sorted(os.listdir(Path(found) / "checkpoints")) == runs.saved(found)  # and nothing else


def begun_on_a_full_disk(text: str) -> str:
    """What a run says whose second process cannot write its pieces of the second checkpoint."""
    torch.set_num_threads(1)
    reports = Trainer.start(Recipe.from_toml(text)).run()
    list(islice(reports, 3))
    if os.environ["RANK"] == "1":
        FileSystemWriter.write_data = _no_space
    with pytest.raises(CheckpointError) as caught:
        next(reports)
    return str(caught.value)


def _no_space(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said_by_all_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    one = made(tmp_path, DIVIDED)
    for said in together(2, begun_on_a_full_disk, one.to_toml()):
        assert "00000004: cannot be written (" in said
        assert "No space left on device" in said
        assert said.endswith("is the disk full?")
    assert runs.saved(one.run.folder) == os.listdir(Path(one.run.folder) / "checkpoints") == ["00000002"]
    losses, _ = resumed(one.to_toml())
    assert len(losses) == STEPS - 2


def test_a_damaged_piece_is_named(tmp_path: Path) -> None:
    one = made(tmp_path, DIVIDED)
    together(2, begun, one.to_toml(), 2)
    (folder,) = checkpoints.folders(Path(one.run.folder))
    for piece in (folder / "shards").glob("*.distcp"):
        piece.unlink()
    with pytest.raises(CheckpointError, match=r"00000002: damaged \(.*delete it to go on from the one before"):
        resumed(one.to_toml())
