"""`qkv train`: figures, interruption and resumption, and what is refused."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.cli.train import Meter, _multiplied, interrupts
from qkv.config import MixtureOfExperts
from qkv.config.recipe import Recipe
from qkv.text import language_reference
from qkv.train import Report, Trainer
from qkv.train.journal import Journal
from qkv.train.schedule import table

from .helpers import Result

Command = Callable[..., Result]

RECIPE = """
[model]
preset = "gpt2"
[model.overrides]
vocab_size = 256
d_model = 16
max_seq_len = 16
decoder.n_layers = 1
decoder.layers.0.attention.n_heads = 2
decoder.layers.0.attention.head_dim = 8
decoder.layers.0.ffn.d_ff = 32
[data]
train = ["text.txt"]
context = 16
[schedule]
kind = "cosine"
peak = 1e-2
[run]
steps = 6
batch = 4
eval_every = 3
save_every = 2
folder = "run"
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small recipe in the current folder, with its text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(language_reference()[:3000])
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def log(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def losses(folder: str | Path) -> list[float]:
    return [entry["loss"] for entry in log(folder)]


def refused(done: Result, *words: str) -> None:
    """One line on stderr that says these words, and nothing else."""
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("qkv: ")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err


# The whole job


def test_a_run_and_what_it_says(command: Command, recipe: Path) -> None:
    done = command("train", str(recipe))
    assert done.code == 0
    entries = log("run")
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert f"loss {entries[-1]['loss']:.4f}, held-out loss {entries[-1]['valid_loss']:.4f}" in done.out
    assert done.out.endswith("The model is in run/model\n")
    lines = [line for line in done.err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["3", "6"]
    assert f"held-out {entries[2]['valid_loss']:.3f}" in lines[0]
    assert all("tokens/s, MFU " in line for line in lines)
    assert qkv.load("run/model").config.d_model == 16


def test_json_is_the_only_thing_on_stdout(command: Command, recipe: Path) -> None:
    done = command("train", str(recipe), "--json", "--set", "run.sample_every=3")
    said, last = json.loads(done.out), log("run")[-1]
    assert (said["folder"], said["steps"], said["interrupted"]) == ("run", 6, False)
    assert (said["loss"], said["valid_loss"], said["seconds"]) == (last["loss"], last["valid_loss"], last["seconds"])
    assert said["tokens_per_second"] > 0


def test_samples_are_shown_without_control_characters(command: Command, recipe: Path) -> None:
    longer = ("--set", "model.overrides.max_seq_len=64")  # a sample has 64 bytes
    done = command("train", str(recipe), "--set", "run.sample_every=3", *longer)
    samples = [entry["sample"] for entry in log("run") if "sample" in entry]
    assert len(samples) == 2
    shown = [line for line in done.err.splitlines() if line.startswith("  | ")]
    assert len(shown) >= 2
    assert all(char.isprintable() or char == "\n" for char in done.err)
    assert any(not char.isprintable() for sample in samples for char in sample.replace("\n", ""))


def test_a_run_is_made_again_from_its_own_recipe(command: Command, recipe: Path) -> None:
    assert command("train", str(recipe), "--set", "run.steps=4", "--set", "run.seed=5").code == 0
    assert command("train", "run/recipe.toml", "--set", "run.folder=again").code == 0
    assert len(losses("run")) == 4
    assert losses("again") == losses("run")


def test_the_loss_is_that_of_the_averaged_model(command: Command, recipe: Path) -> None:
    changes = ("--set", "run.average_last=3", "--set", "run.keep=3")
    said = json.loads(command("train", str(recipe), "--json", *changes).out)
    trainer = Trainer.resume(Recipe.read("run/recipe.toml"))
    assert trainer.valid_loss() == pytest.approx(log("run")[-1]["valid_loss"], rel=1e-6)
    trainer.model.load_state_dict(qkv.load("run/model").model.state_dict())
    assert said["valid_loss"] == pytest.approx(trainer.valid_loss(), rel=1e-6)
    assert said["valid_loss"] != pytest.approx(log("run")[-1]["valid_loss"], rel=1e-4)


# The schedule


def test_the_schedule_needs_no_data(command: Command, recipe: Path) -> None:
    (recipe.parent / "text.txt").unlink()
    changes = ("--set", 'schedule={kind = "noam", warmup = 3}')
    done = command("train", str(recipe), "--show-schedule", "--json", *changes)
    rows = [(row["step"], row["rate"]) for row in json.loads(done.out)]
    written = Recipe.read(recipe).override({"schedule": {"kind": "noam", "warmup": 3}})
    assert rows == table(written.schedule, 6, 16)
    assert max(rows, key=lambda row: row[1])[0] == 3
    plain = command("train", str(recipe), "--show-schedule", *changes).out.splitlines()
    assert plain[0].split() == ["step", "rate"]
    assert [line.split()[:2] for line in plain[1:]] == [[str(step), f"{rate:.4e}"] for step, rate in rows]
    assert not Path("run").exists()


def test_the_schedule_of_a_checkpoint_takes_its_width(command: Command, recipe: Path, saved: Path) -> None:
    text = f'[model]\ncheckpoint = "{saved}"\n' + RECIPE[RECIPE.index("[data]") :]
    recipe.write_text(text)
    changes = ("--set", 'schedule={kind = "noam", warmup = 3}')
    rows = json.loads(command("train", str(recipe), "--show-schedule", "--json", *changes).out)
    schedule = Recipe.read(recipe, {"schedule": {"kind": "noam", "warmup": 3}}).schedule
    assert rows[0]["rate"] == table(schedule, 6, qkv.load(saved).config.d_model)[0][1]


# Interruption


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while that step is being logged."""
    write = Journal.write

    def interrupting(journal: Journal, entry: Mapping[str, Any]) -> None:
        if entry["step"] == step:
            signal.raise_signal(signal.SIGINT)
        write(journal, entry)

    monkeypatch.setattr(Journal, "write", interrupting)


def test_ctrl_c_ends_the_run_after_the_step_and_resuming_changes_nothing(
    command: Command, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert command("train", str(recipe), "--set", "run.folder=whole").code == 0
    with monkeypatch.context() as patched:
        interrupt_at(5, patched)
        done = command("train", str(recipe))
    assert done.code == 130
    assert done.out == "run: 5 steps made\n"
    how = "go on with: qkv train run/recipe.toml --resume"
    assert f"qkv: interrupted after step 5; the last checkpoint is of step 5; {how}\n" in done.err
    assert signal.getsignal(signal.SIGINT) is before
    assert not Path("run/model").exists()
    assert command("train", "run/recipe.toml", "--resume").code == 0
    assert losses("run") == losses("whole")
    assert Path("run/model").is_dir()
    # The checkpoint out of turn has made room for the next one in turn.
    assert sorted(os.listdir("run/checkpoints")) == sorted(os.listdir("whole/checkpoints"))


def test_ctrl_c_before_the_first_checkpoint_in_turn(
    command: Command, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(1, patched)
        done = command("train", str(recipe), "--json")
    assert done.code == 130
    assert json.loads(done.out)["interrupted"] is True
    assert json.loads(done.out)["valid_loss"] is None
    assert "interrupted after step 1; the last checkpoint is of step 1; go on with: " in done.err
    assert command("train", "run/recipe.toml", "--resume").code == 0
    assert len(losses("run")) == 6


def test_ctrl_c_in_the_last_step_is_too_late(command: Command, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(6, monkeypatch)
    done = command("train", str(recipe))
    assert done.code == 0
    assert "interrupted" not in done.err
    assert Path("run/model").is_dir()


def test_ctrl_c_while_the_data_is_prepared(command: Command, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(recipe: Recipe) -> Trainer:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "start", interrupted)
    done = command("train", str(recipe))
    assert (done.code, done.out) == (130, "")
    assert "qkv: interrupted; nothing is kept\n" in done.err


def test_a_second_ctrl_c_ends_the_program() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts() as asked:
            signal.raise_signal(signal.SIGINT)
            assert asked == [signal.SIGINT]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_resuming_a_complete_run(command: Command, recipe: Path) -> None:
    assert command("train", str(recipe)).code == 0
    done = command("train", str(recipe), "--resume", "--json")
    assert done.code == 0
    assert "was complete already; raise run.steps to go on" in done.err
    assert json.loads(done.out)["valid_loss"] == pytest.approx(log("run")[-1]["valid_loss"], rel=1e-6)
    assert len(losses("run")) == 6


# What is refused


def test_a_recipe_that_is_not_there(command: Command, recipe: Path) -> None:
    refused(command("train", "other.toml"), "other.toml", "give the path of a recipe")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("run.stepz=3", ("small.toml", "run.stepz")),
        ("run.steps=none", ("small.toml", "run.steps")),
        ("run.steps", ("expected path=value",)),
        ('data.train=["nowhere.txt"]', ("nowhere.txt",)),
        ("model.overrides.vocab_size=100", ("model.overrides.vocab_size", "set it to 256 or more")),
    ],
)
def test_a_change_that_cannot_be(command: Command, recipe: Path, change: str, words: tuple[str, ...]) -> None:
    refused(command("train", str(recipe), "--set", change), *words)


def test_a_folder_that_holds_a_run(command: Command, recipe: Path) -> None:
    assert command("train", str(recipe)).code == 0
    refused(command("train", str(recipe)), "run.folder", "resume it, or choose another folder")


def test_nothing_to_resume(command: Command, recipe: Path) -> None:
    refused(command("train", str(recipe), "--resume"), "run.folder", "holds no run")


def test_a_loss_that_is_no_number(command: Command, recipe: Path) -> None:
    done = command("train", str(recipe), "--set", "schedule.peak=1e30", "--set", "run.clip=0.0")
    assert done.code == 2
    assert "step 2: the loss is" in done.err.splitlines()[-1]


# Figures


def report(tokens: int, valid_loss: float | None = None) -> Report:
    return Report(1, 2.0, 1e-3, 1.0, tokens, 1.0, valid_loss)


def test_the_rate_leaves_evaluations_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 102.0, 106.0])
    monkeypatch.setattr("qkv.cli.train.perf_counter", lambda: next(clock))
    meter = Meter(multiplied=50, peak=1e6, _before=next(clock))
    for one in (report(100), report(100, valid_loss=3.0), report(100)):
        meter.add(one)
    assert meter.rate == pytest.approx(0.9 * 50 + 0.1 * 25)
    assert meter.overall == pytest.approx(200 / 6)
    assert meter.mfu == pytest.approx(6 * 50 * 47.5 / 1e6)
    assert meter.line() == "loss 2.000, held-out 3.000, 48 tokens/s, MFU 1%"


def test_nothing_is_said_that_is_not_known() -> None:
    meter = Meter(None)
    meter.add(report(8, valid_loss=1.5))
    assert (meter.rate, meter.overall, meter.mfu) == (None, None, None)
    assert meter.line() == "loss 2.000, held-out 1.500"
    assert math.isnan(meter.peak)


def test_mfu_counts_the_matrices_and_no_tables(recipe: Path) -> None:
    written = Recipe.read(recipe)
    trainer = Trainer.start(written)
    config = trainer.model.config
    assert _multiplied(trainer, written) == config.n_parameters - 16 * 16  # the positions are looked up
    untied = written.override({"model.overrides.head.tied": False, "run.folder": "untied"})
    assert _multiplied(Trainer.start(untied), untied) == config.n_parameters - 16 * 16


def test_mfu_is_not_said_where_6_n_is_not_what_a_step_computes(recipe: Path) -> None:
    some = MixtureOfExperts(n_experts=2, top_k=1, d_ff=8)
    experts = Recipe.read(recipe, {"model.overrides.decoder.layers.0.ffn": some, "run.folder": "experts"})
    assert _multiplied(Trainer.start(experts), experts) is None
    prefix = Recipe.read(recipe, {"objective": {"kind": "prefix"}})
    assert _multiplied(Trainer.start(prefix), prefix) is None  # only what follows the prefix is a target
