"""A run that was killed and taken up again is the run that was not: to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkv.config.recipe import Recipe
from qkv.train import Trainer, checkpoints
from qkv.train import trainer as trainer_module

from . import runs


def masked(folder: Path) -> dict[str, Any]:
    return {
        "model": runs.tiny("bert-base-uncased", 300, head={"kind": "masked-lm"}),
        "tokenizer": runs.tokenizer(folder),
        "objective": {"kind": "masked"},
    }


def kinds(folder: Path) -> dict[str, Recipe]:
    """Runs with dropout, and as much as there is to keep."""
    common = {"run__save_every": 3, "run__eval_every": 4}
    return {
        "adamw": runs.recipe(folder, **common, run__micro_batch=3, run__ema=0.9),
        "muon": runs.recipe(folder, **common, optimizer={"kind": "muon"}, run__micro_batch=1, **masked(folder)),
        "adafactor": runs.recipe(folder, **common, optimizer={"kind": "adafactor"}, run__precision="bf16"),
        "lion": runs.recipe(folder, **common, optimizer={"kind": "lion"}, run__precision="fp16"),
    }


@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor", "lion"])
def test_ten_steps_are_six_then_kill_then_four(kind: str, tmp_path: Path) -> None:
    whole = kinds(tmp_path)[kind]
    cut = runs.elsewhere(whole, "cut")
    runs.finished(whole)
    runs.killed(cut, 6)
    assert runs.saved(cut.run.folder) == ["00000003", "00000006"]
    assert [report.step for report in Trainer.resume(cut).run()] == [7, 8, 9, 10]
    expected, found = runs.left_by(whole.run.folder), runs.left_by(cut.run.folder)
    assert [entry["step"] for entry in found["log"]] == list(range(1, 11))
    assert found["data"]["position"] == 40
    assert runs.differences(expected, found) == []


def test_the_comparison_sees_a_difference(tmp_path: Path) -> None:
    """Other seeds give other weights, averages and losses; dropout is at work."""
    one = runs.recipe(tmp_path, run__ema=0.9, run__steps=2)
    other = runs.elsewhere(one, "other").override({"run.seed": 8})
    still = runs.elsewhere(one, "still").override({"model": runs.tiny("gpt2", dropout=0.0)})
    for made in (one, other, still):
        runs.finished(made)
    first = runs.left_by(one.run.folder)
    for made in (other, still):
        found = runs.differences(first, runs.left_by(made.run.folder))
        assert {path.split("/")[1] for path in found} >= {"checkpoint", "model", "training", "log"}
        assert any(path.startswith("/training/ema") for path in found)
        assert any(path.startswith("/training/optimizer") for path in found)


@pytest.mark.parametrize("place", runs.PLACES)
def test_a_kill_during_a_save_loses_nothing(place: str, tmp_path: Path) -> None:
    whole = runs.recipe(tmp_path, run__save_every=2, run__steps=6, run__keep=1)
    cut = runs.elsewhere(whole, "cut")
    runs.finished(whole)
    runs.killed(cut, 4, place)
    assert [entry["step"] for entry in runs.log(cut.run.folder)] == [1, 2, 3, 4]
    first = 5 if place == "delete" else 3
    assert [report.step for report in Trainer.resume(cut).run()] == list(range(first, 7))
    assert runs.differences(runs.left_by(whole.run.folder), runs.left_by(cut.run.folder)) == []
    assert [path.name for path in (Path(cut.run.folder) / "checkpoints").iterdir()] == ["00000006"]


def test_a_kill_between_log_and_save_leaves_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runs.recipe(tmp_path, run__save_every=2, run__steps=4)
    monkeypatch.setattr(Trainer, "_save", lambda trainer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.finished(made)
    assert [entry["step"] for entry in runs.log(made.run.folder)] == [1, 2]
    monkeypatch.undo()
    with (Path(made.run.folder) / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "lo')
    list(Trainer.resume(made).run())
    assert [entry["step"] for entry in runs.log(made.run.folder)] == [1, 2, 3, 4]


def test_two_processes_make_the_same_run(tmp_path: Path) -> None:
    one = runs.recipe(tmp_path, run__steps=4, run__save_every=2, run__micro_batch=2, tokenizer="train-bpe:280")
    one = one.override({"model": runs.tiny("gpt2", 280), "run.sample_every": 2})
    other = runs.elsewhere(one, "other")
    for made in (one, other):
        runs.in_another_process(made)
    found = runs.left_by(one.run.folder)
    assert "sample" in found["log"][1]
    assert runs.differences(found, runs.left_by(other.run.folder)) == []


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, run__steps=2)
    runs.finished(made)
    before = runs.left_by(made.run.folder)
    assert list(Trainer.resume(made).run()) == []
    assert runs.differences(before, runs.left_by(made.run.folder)) == []


def test_a_run_may_go_on_for_longer(tmp_path: Path) -> None:
    whole = runs.recipe(tmp_path, run__steps=4)
    cut = runs.elsewhere(whole, "cut")
    runs.finished(whole)
    runs.finished(cut.override({"run.steps": 2}))
    list(Trainer.resume(cut).run())
    found, expected = runs.left_by(cut.run.folder), runs.left_by(whole.run.folder)
    del found["log"][1]["valid_loss"]  # its end, at first
    assert runs.differences(expected, found) == []


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    whole = runs.recipe(tmp_path, run__steps=3)
    cut = runs.elsewhere(whole, "cut")
    runs.finished(whole)
    runs.killed(cut, 2)
    assert [report.step for report in Trainer.resume(cut).run()] == [1, 2, 3]
    assert runs.differences(runs.left_by(whole.run.folder), runs.left_by(cut.run.folder)) == []


def test_no_draw_of_one_step_comes_again_in_the_next() -> None:
    drawn = [trainer_module._random(3, step).integers(0, 2**63, 64) for step in range(4)]
    assert len({int(number) for numbers in drawn for number in numbers}) == 4 * 64


def test_only_complete_checkpoints_are_found(tmp_path: Path) -> None:
    for name in ("00000002", ".00000004.1234.new", "00000010"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "00000002" / "state.json").write_text("{}")
    (tmp_path / "checkpoints" / ".00000004.1234.new" / "state.json").write_text("{}")
    assert [path.name for path in checkpoints.folders(tmp_path)] == ["00000002"]
