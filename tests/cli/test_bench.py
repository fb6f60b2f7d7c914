"""`qkv bench cache`: tables, JSON and a figure of a short run, and one line for each mistake. Nothing is timed here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qkv
from qkv.cli import bench

from .helpers import Result

Command = Callable[..., Result]
SHORT = ("--lengths", "4,8,16", "--rounds", "1")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file, whose model gets random weights."""
    path = tmp_path_factory.mktemp("config") / "toy.json"
    path.write_text(qkv.preset("mistral-7b").toy().to_json())
    return path


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A visit runs its case once."""
    monkeypatch.setattr("qkv.lab.cache._VISIT", 0)


def lines_after(out: str, title: str) -> list[list[str]]:
    """The rows of the table below a title, in cells."""
    table = out.split(title, 1)[1].split("\n\n")[1]
    return [re.split(r"  +", line.strip()) for line in table.splitlines()]


def test_the_tables(command: Command, saved: Path) -> None:
    shown = command("bench", "cache", str(saved), *SHORT)
    assert shown.code == 0
    assert shown.err == ""
    assert shown.out.startswith(f"{saved}: 2 layers, d_model 32, 4 heads, ")
    assert "1 thread, float32, not deterministic; medians of 1 interleaved rounds" in shown.out
    steps = lines_after(shown.out, "One decode step with a cache and without")
    assert [row[0] for row in steps] == ["position", "4", "8", "16"]
    assert [row[-2:] for row in steps[1:]] == [["1", "4"], ["1", "8"], ["1", "16"]]
    for row in steps[1:]:
        # The ratio is printed to a tenth, and both times to three digits or so.
        assert float(row[5]) == pytest.approx(float(row[3]) / float(row[1]), rel=0.1, abs=0.06)
    every = lines_after(shown.out, "All steps so far")
    assert [row[-3:] for row in every[1:]] == [["4", "10", "2.5"], ["8", "36", "4.5"], ["16", "136", "8.5"]]
    assert re.search(r"From 4 to 16 tokens a step grows as n\^-?\d+\.\d\d with a cache and as n\^-?\d", shown.out)
    ways = lines_after(shown.out, "A step with a cache at 4, by how it is run")
    assert len(ways) == 1 + 2 * 3 * 2
    assert [row[5] for row in ways[1:2]] == ["1.00"]
    sizes = lines_after(shown.out, "Memory of a text's cache")
    assert [row[0] for row in sizes[1::3]] == [
        str(saved), "MHA, 4 heads", "GQA, 1 key-value heads", "MQA, 1 key-value head", "MLA, latent 32 + 4",
        "MHA, window 1024",
    ]  # fmt: skip
    assert all(row[3] == row[4] for row in sizes[1:])
    published = lines_after(shown.out, "Memory of published models")
    assert published[1] == ["llama-2-7b", "524,288", "4,096", "2,147,483,648", "1,140,850,688", "603,979,776"]


def test_as_json_with_a_figure(command: Command, config: Path, tmp_path: Path) -> None:
    figure = tmp_path / "cost.svg"
    shown = command("bench", "cache", str(config), *SHORT, "--deterministic", "--json", "--plot", str(figure))
    assert shown.code == 0
    found = json.loads(shown.out)
    assert qkv.ModelConfig.from_dict(found["config"]) == qkv.preset("mistral-7b").toy()
    assert (found["rounds"], found["at"], found["deterministic"]) == (1, 4, True)
    assert [point["uncached"]["total_rows"] for point in found["points"]] == [10, 36, 136]
    assert all(point["cached"]["step"]["low"] > 0 for point in found["points"])
    assert {(way["setting"]["codec"], way["setting"]["layout"]) for way in found["ways"]} == {
        (codec, layout) for codec in ("raw", "int8", "int4") for layout in ("auto", "paged")
    }
    assert set(found["exponents"]) == {
        "first", "last", "cached_step", "uncached_step", "cached_total", "uncached_total"
    }  # fmt: skip
    assert [row["planned"] for row in found["memory"]] == [row["made"] for row in found["memory"]]
    assert "<svg" in figure.read_text()


def test_quick_is_short_where_nothing_else_is_said(command: Command, config: Path) -> None:
    found = json.loads(command("bench", "cache", str(config), "--quick", "--json").out)
    assert found["rounds"] == 3
    assert [point["position"] for point in found["points"]] == [32, 64, 128, 256]
    assert found["at"] == 64


def test_memory_alone_needs_no_weights(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr("qkv.model.build", refused)
    shown = command("bench", "cache", "llama-3-405b", "--memory")
    assert shown.code == 0
    assert "decode step" not in shown.out
    sizes = lines_after(shown.out, "Memory of a text's cache")
    assert sizes[1] == [
        "llama-3-405b", "516,096", "512", "264,241,152", "264,241,152", "6.2 %", "140,378,112", "74,317,824"
    ]  # fmt: skip
    assert [row[4] for row in sizes[4:7]] == ["too large"] * 3  # without groups, sixteen times as much
    assert command("bench", "cache", "--memory").out.startswith(
        "a small Llama: 4 layers, d_model 256, 8 heads, 3,475,712"
    )


def test_threads_are_as_before_afterwards(command: Command, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, during = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(bench.Report, "measure", lambda *given: during.extend((given[-1], torch.get_num_threads())))
    assert command("bench", "cache", str(config), "--threads", "3").code == 0
    assert during == [3, 3]
    assert torch.get_num_threads() == before


def test_a_bar_is_shown_on_a_terminal_when_it_takes_more_than_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(bench, "perf_counter", lambda: now[0])
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    for seconds, shown in ((0.5, False), (1.5, True)):
        with bench._progress(2) as tick:
            for _ in range(2):
                now[0] += seconds / 2
                tick("with a cache, at 64")
            now[0] += 1
        assert ("measuring" in capsys.readouterr().err) == shown


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--lengths", "4,x"), "--lengths: '4,x' is not a list of numbers; write 64,128,256"),
        (("--lengths", ""), "--lengths: '' is not a list of numbers"),
        (("toy.json", "--lengths", "8,4"), "lengths: give two or more, ascending, from 2 on, not 8,4"),
        (("learned.json", "--lengths", "8,65"), "lengths: 65, but the model has 64 positions; give shorter ones"),
        (("llama-3-8b",), "llama-3-8b: random weights for 8,030,261,248 parameters take 32 GB; give a saved model"),
        (("t5-small",), "bench cache: steps are those of a decoder alone, and this model has an encoder too"),
        (("bert-base-uncased",), "bench cache: steps are those of a decoder alone, and this model has an encoder;"),
        (("bert-base-uncased", "--memory"), "bert-base-uncased: has no decoder, so that it has no cache"),
        (("missing",), "missing: does not exist"),
        (("--plot", "a.txt"), "a.txt: a figure is a .png or .svg file"),
        (("--plot", "there.png"), "there.png: exists already"),
        (("--plot", "a.png", "--memory"), "--plot: draws steps and memory, and --memory measures no steps"),
    ],
)
def test_a_mistake_gives_one_line(
    command: Command,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    problem: str,
) -> None:
    (tmp_path / "there.png").write_text("")
    (tmp_path / "toy.json").write_text(config.read_text())
    (tmp_path / "learned.json").write_text(qkv.preset("gpt2").toy().to_json())
    monkeypatch.chdir(tmp_path)
    shown = command("bench", "cache", *arguments)
    assert shown.code == 2
    assert shown.out == ""
    assert shown.err.startswith("qkv: ")
    assert shown.err.count("\n") == 1
    assert problem in shown.err


@pytest.mark.parametrize("arguments", [("bench",), ("bench", "cache")])
def test_help(command: Command, arguments: tuple[str, ...]) -> None:
    shown = command(*arguments, "--help")
    assert shown.code == 0
    assert shown.out.startswith(f"Usage: qkv {' '.join(arguments)} ")
