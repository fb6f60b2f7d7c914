"""The program as a whole: quick help, and one line for every mistake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .helpers import Result

COMMANDS = ("demo", "show", "presets", "schema", "generate")
HELP = """
import sys
from qkv.cli import main
sys.argv = ["qkv", "--help"]
try:
    main()
except SystemExit as exit_:
    assert not exit_.code
heavy = {"torch", "numpy", "pydantic", "safetensors", "rich"}
print("LOADED", sorted(heavy & sys.modules.keys()))
"""


def test_help_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "LOADED []"
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(command: Callable[..., Result], name: str) -> None:
    shown = command(name, "--help")
    assert shown.code == 0
    assert shown.out.startswith(f"Usage: qkv {name}")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("show", "llama3-8b"), "unknown preset 'llama3-8b'; did you mean 'llama-3-8b'"),
        (("show", "no/such/folder"), "no/such/folder: no such folder or config file"),
        (("show", "missing.toml"), "missing.toml: no such folder or config file"),
        (("show", "."), ".: holds neither config.json nor params.json"),
        (("show", "bert-base-uncased", "--trace", ""), "tokens: empty"),
        (("generate", "missing", "text"), "missing: does not exist; give the folder or file of a saved model"),
        (("demo", "--data", "missing.txt"), "missing.txt: cannot be read"),
        (("demo", "--data", "."), "cannot be read"),
        (("demo", "--data", "empty.txt"), "empty.txt: empty"),
        (("demo", "--data", "short.txt"), "short.txt: 5 bytes of text, but training needs at least"),
        (("demo", "--data", "binary"), "binary: binary, not text"),
        (("demo", "--out", "short.txt"), "short.txt: is a file"),
        (("demo", "--out", "."), "holds other files (binary, empty.txt, short.txt)"),
    ],
)
def test_a_mistake_gives_one_line_and_code_2(
    command: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    problem: str,
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary").write_bytes(b"abc\0")
    monkeypatch.chdir(tmp_path)
    shown = command(*arguments)
    assert shown.code == 2
    assert shown.out == ""
    assert shown.err.startswith("qkv: ")
    assert shown.err.count("\n") == 1
    assert problem in shown.err


@pytest.mark.parametrize("arguments", [("bogus",), ("demo", "--steps", "0"), ("demo", "--seed", "-1"), ("show",)])
def test_wrong_usage_gives_code_2(command: Callable[..., Result], arguments: tuple[str, ...]) -> None:
    shown = command(*arguments)
    assert shown.code == 2
    assert "Error" in shown.err
    assert "Traceback" not in shown.err
