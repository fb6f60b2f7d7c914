"""The command under torchrun itself: one process speaks, one that fails ends all, Ctrl-C keeps the last step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import qkv

from .. import runs

SECONDS = 120
FAILING = """
import os
from qkv.cli import main
from qkv.errors import TrainingError
from qkv.train import Trainer

step = Trainer._step

def broken(self, began):
    if os.environ["RANK"] == "1" and self.step == 2:
        raise TrainingError("only here")
    return step(self, began)

Trainer._step = broken
main()
"""


def made(folder: Path, **changes: Any) -> Path:
    common = {"run__steps": 4, "run__eval_every": 2, "run__sample_every": 2, "parallel": {"data": "fsdp"}}
    one = runs.recipe(folder, model=runs.tiny("llama-2-7b", dropout=0.0), **(common | changes))
    (path := folder / "recipe.toml").write_text(one.to_toml(), encoding="utf-8")
    return path


def torchrun(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_one_process_speaks_for_all(tmp_path: Path) -> None:
    with torchrun("-m", "qkv", "train", str(made(tmp_path)), "--json") as process:
        out, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    result = json.loads(out)  # one line
    assert result["steps"] == 4
    assert result["loss"] == pytest.approx(runs.log(tmp_path / "run")[-1]["loss"], rel=1e-12)
    assert [entry["step"] for entry in runs.log(tmp_path / "run")] == [1, 2, 3, 4]
    assert said.count("step 2  ") == said.count("step 4  ") == 1
    assert said.count("  | ") >= 2  # its samples
    assert "arning" not in said
    assert qkv.load(tmp_path / "run" / "model").config.d_model == 16


@pytest.mark.slow
def test_one_that_fails_ends_all(tmp_path: Path) -> None:
    (script := tmp_path / "failing.py").write_text(FAILING, encoding="utf-8")
    with torchrun(str(script), "train", str(made(tmp_path))) as process:
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert [line for line in said.splitlines() if line.startswith("qkv:")] == ["qkv: process 1: only here"]


@pytest.mark.slow
def test_what_fails_everywhere_is_said_once(tmp_path: Path) -> None:
    path = made(tmp_path, run__sample_every=0)
    with torchrun("-m", "qkv", "train", str(path), "--set", "parallel.tensor=4") as process:
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    lines = [line for line in said.splitlines() if line.startswith("qkv:")]
    assert len(lines) == 1
    assert "parallel.tensor: must divide the numbers of heads" in lines[0]


@pytest.mark.slow
def test_ctrl_c_keeps_the_last_step(tmp_path: Path) -> None:
    path = made(tmp_path, run__steps=100_000, run__eval_every=0, run__sample_every=0)
    with torchrun("-m", "qkv", "train", str(path)) as process:
        log = tmp_path / "run" / "log.jsonl"
        end = time.monotonic() + SECONDS
        while not log.is_file() or log.read_text(encoding="utf-8").count("\n") < 3:
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
    (saved,) = runs.saved(tmp_path / "run")
    assert len(runs.log(tmp_path / "run")) == int(saved)
    assert said.count(f"interrupted after step {int(saved)}") == 1
