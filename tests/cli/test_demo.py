"""`qkv demo`: the whole job at three steps, and what happens on Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.cli import demo, stream
from qkv.text import language_reference
from qkv.train import demo as train_demo
from qkv.train.journal import Journal

from .helpers import Result

CODE = "import sys; from qkv.cli import main; sys.argv = ['qkv', *sys.argv[1:]]; main()"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(language_reference()[:30_000])
    return path


def figures(out: str) -> dict[str, float]:
    """The table of bits per byte."""
    return {name: float(value) for name, value in re.findall(r"^  (\S.*?)  +(\d\.\d{3})$", out, flags=re.M)}


def test_the_whole_job(text: Path, tmp_path: Path) -> None:
    options = ("--steps", "3", "--data", str(text), "--out", str(tmp_path / "runs" / "small"))
    out = subprocess.check_output(
        [sys.executable, "-c", CODE, "demo", *options],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        timeout=120,
    )
    bits = figures(out)
    assert list(bits) == ["before training", "order-3 n-gram", "after training"]
    assert bits["after training"] < bits["before training"] - 0.1
    assert 1 < bits["order-3 n-gram"] < 5
    losses = [float(loss) for loss in re.findall(r"held-out loss (\d\.\d+)", out)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    lm = qkv.load(tmp_path / "runs" / "small")
    shown = out.split("loaded again")[1].split("a sample:\n")[1].split("\n\nBits")[0]
    prompt = re.findall(r"^  \| (.{10})", shown)[0]
    assert lm.generate(prompt, 3, decoding=qkv.Greedy()).finish_reason == "length"
    following = out.split("What to try next:\n")[1].splitlines()
    assert len(following) == 3
    assert all(line.startswith("  qkv ") for line in following)


def test_ctrl_c_keeps_what_was_learnt(
    command: Callable[..., Result], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Journal.write

    def interrupting(journal: Journal, entry: Mapping[str, Any]) -> None:
        if entry["step"] == 3:
            signal.raise_signal(signal.SIGINT)
        write(journal, entry)

    monkeypatch.setattr(Journal, "write", interrupting)
    monkeypatch.setattr(train_demo, "steps_within", lambda seconds, recipe: recipe.run.steps)
    monkeypatch.setattr(demo, "_SAMPLE", 4)
    before = signal.getsignal(signal.SIGINT)
    shown = command("demo", "--steps", "1000", "--data", str(text), "--out", str(tmp_path / "m"))
    assert shown.code == 0
    assert "interrupted: keeping what was learnt so far" in shown.out
    assert "After 3 steps" in shown.out
    assert figures(shown.out)["after training"] < figures(shown.out)["before training"]
    assert qkv.load(tmp_path / "m").config.vocab_size == 256
    assert signal.getsignal(signal.SIGINT) is before


def test_the_time_is_kept(
    command: Callable[..., Result], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_demo, "steps_within", lambda seconds, recipe: recipe.run.steps)  # as if pace had fallen
    monkeypatch.setattr(demo, "_SAMPLE", 4)
    shown = command("demo", "--steps", "100000", "--seconds", "1", "--data", str(text), "--out", str(tmp_path / "m"))
    assert shown.code == 0
    assert "  1 s are over: keeping what was learnt so far" in shown.out
    assert qkv.load(tmp_path / "m").config.vocab_size == 256


def test_a_second_ctrl_c_ends_the_program() -> None:
    # A shell starts background jobs with the interrupt ignored; here it is as in a terminal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _two_interrupts()
    finally:
        signal.signal(signal.SIGINT, before)


def _two_interrupts() -> None:
    with stream.interrupts() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_control_characters_never_reach_the_terminal() -> None:
    assert stream.indented("a\x1b[2J\r\x07b\nc") == "  | a·[2J··b\n  | c"
