"""`qkv plot`: what is drawn of a log, and which logs are refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from qkv.cli.plot import Curve, read
from qkv.errors import DataError

from .helpers import Result

Command = Callable[..., Result]


def a_run(folder: Path, *entries: dict[str, Any], after: str = "") -> Path:
    """A run's folder with this log."""
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + after)
    return folder


STEPS = ({"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0, "valid_loss": 3.5}, {"step": 3, "loss": 2.0})


def refused(done: Result, *words: str) -> None:
    """One line on stderr that says these words, and nothing else."""
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err


def test_a_log_is_read_without_the_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    curve = read(a_run(tmp_path / "run", *STEPS, after='{"step": 4, "lo'))
    assert curve == Curve([1, 2, 3], [4.0, 3.0, 2.0], [2], [3.5])
    assert read(tmp_path / "run" / "log.jsonl") == curve


def test_smoothing_is_an_average_of_what_came_before() -> None:
    losses = [5.0] * 100 + [1.0] * 100
    smooth = Curve(list(range(200)), losses, [], []).smoothed()
    assert smooth[:100] == pytest.approx([5.0] * 100)
    assert smooth[100] == pytest.approx(4.0, abs=0.01)  # 2 % of 200 steps: each new one weighs a quarter
    assert smooth[-1] == pytest.approx(1.0, abs=1e-6)
    assert Curve([1, 2], [3.0, 1.0], [], []).smoothed() == [3.0, 1.0]  # a short run is drawn as it is


def test_runs_side_by_side(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def watched(figure: Figure, *arguments: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", watched)
    one, other = a_run(tmp_path / "one", *STEPS), a_run(tmp_path / "other", *STEPS[::2])
    out = tmp_path / "losses.png"
    done = command("plot", str(one), str(other), "--out", str(out))
    assert (done.code, done.out, done.err) == (0, f"{out}: 2 runs\n", "")
    assert out.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(lines) == ["one, training (smoothed)", "one, held out: 3.500 at the end", "other, training (smoothed)"]
    points = lines["one, held out: 3.500 at the end"]
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([2], [3.5])  # type: ignore[arg-type]
    assert points.get_color() == lines["one, training (smoothed)"].get_color()
    assert list(lines["other, training (smoothed)"].get_xdata()) == [1, 3]  # type: ignore[arg-type]


def test_runs_of_one_name_are_told_apart(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    monkeypatch.setattr("qkv.cli.plot.draw", lambda path, curves, names: labels.extend(names))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        a_run(tmp_path / folder / "run", *STEPS)
    command("plot", str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run"), "--out", str(tmp_path / "x.svg"))
    assert labels == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


# What is refused


def test_a_figure_is_never_overwritten(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "x.png"
    out.write_bytes(b"mine")
    refused(command("plot", str(a_run(tmp_path / "run", *STEPS)), "--out", str(out)), str(out), "exists already")
    assert out.read_bytes() == b"mine"


def test_without_matplotlib(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name))
    done = command("plot", str(a_run(tmp_path / "run", *STEPS)), "--out", str(tmp_path / "x.png"))
    refused(done, "matplotlib", "pip install 'qkv[plot]'")


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("no JSON", "line 4"),
        ("[1, 2]", "line 4"),
        ('{"step": 4}', "line 4"),
        ('{"loss": 4.0}', "line 4"),
        ('{"step": "4", "loss": 4.0}', "line 4"),
        ('{"step": true, "loss": 4.0}', "line 4: not a step"),
        ('{"step": 4, "loss": "low"}', "line 4"),
        ('{"step": 4, "loss": 1.0, "valid_loss": null}', "line 4"),
        ('{"step": 3, "loss": 1.0}', "line 4: step 3 follows step 3"),
    ],
)
def test_a_damaged_log_is_named(command: Command, tmp_path: Path, line: str, where: str) -> None:
    run = a_run(tmp_path / "run", *STEPS, after=line + "\n")
    done = command("plot", str(run), "--out", str(tmp_path / "x.png"))
    refused(done, f"{run / 'log.jsonl'}, {where}")
    assert not (tmp_path / "x.png").exists()


def test_no_log_and_no_step(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: No such file.*give the folder of a run"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no step yet"):
        read(a_run(tmp_path / "run"))
    (tmp_path / "log.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match="no UTF-8 text"):
        read(tmp_path / "log.jsonl")
