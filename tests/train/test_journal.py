"""What a run logs: lines of JSON, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from qkv.errors import ConfigError
from qkv.train import Trainer

from . import runs


def test_the_log_has_a_line_for_each_step(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, run__steps=5, run__eval_every=2)
    reports = runs.finished(made)
    lines = [json.loads(line) for line in (Path(made.run.folder) / "log.jsonl").read_text().splitlines()]
    assert lines == [report.entry() for report in reports]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "valid_loss" in line] == [2, 4, 5]
    assert all(3 * 16 < line["tokens"] <= 4 * 16 for line in lines)
    assert sorted(line["seconds"] for line in lines) == [line["seconds"] for line in lines]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_package_that_is_not_there_is_one_line(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "torch.utils.tensorboard", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        Trainer.start(runs.recipe(tmp_path).override({f"log.{package}": True}))
    assert str(caught.value) == f"log.{package}: needs the package {package}; pip install {package}"
    assert Trainer.start(runs.recipe(tmp_path)).step == 0  # nothing has begun


def test_tensorboard_shows_each_step_once_after_a_resumption_too(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    made = runs.recipe(tmp_path, run__steps=5, run__save_every=2, run__eval_every=2, log__tensorboard=True)
    trainer = Trainer.start(made)
    for report in trainer.run():
        if report.step == 3:  # after the checkpoint of step 2
            break
    trainer.journal.close()
    list(Trainer.resume(made).run())
    events = reader.EventAccumulator(str(Path(made.run.folder) / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) >= {"loss", "rate", "gradient_norm", "tokens", "valid_loss"}
    logged = runs.log(made.run.folder)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (entry["step"], pytest.approx(entry["loss"])) for entry in logged
    ]
    assert [event.step for event in events.Scalars("valid_loss")] == [2, 4, 5]


def test_weights_and_biases_gets_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = runs.recipe(tmp_path, run__steps=2, log__wandb=True)
    runs.finished(made)
    assert list((Path(made.run.folder) / "wandb").glob("offline-run-*/*.wandb"))
