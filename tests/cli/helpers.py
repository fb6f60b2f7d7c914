"""Running a command inside this process, as the `qkv` program would."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from qkv.cli import main


@dataclass(frozen=True)
class Result:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    """`qkv ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["qkv", *arguments])
    try:
        main()
        code = 0
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    printed = capsys.readouterr()
    return Result(code, printed.out, printed.err)
