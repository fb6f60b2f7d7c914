"""`--engine`, `--quantize` and `--threads`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .helpers import Result


def test_the_command_line(command: Callable[..., Result], saved: Path) -> None:
    expected = command("generate", str(saved), "to be", "--greedy", "--max-new-tokens", "8")
    native = command("generate", str(saved), "to be", "--greedy", "--max-new-tokens", "8", "--engine", "native")
    assert (native.code, native.out) == (0, expected.out)
    small = command("generate", str(saved), "to be", "--max-new-tokens", "8", "--quantize", "int4", "--threads", "1")
    assert small.code == 0
    wrong = command("generate", str(saved), "to be", "--quantize", "int4", "--cache", "int8")
    assert wrong.code == 2
    assert "engine: the native one keeps caches raw" in wrong.err
    wrong = command("generate", str(saved), "to be", "--quantize", "int4", "--engine", "torch")
    assert wrong.code == 2
    assert "quantize: torch runs the weights as they are" in wrong.err
    assert command("generate", str(saved), "to be", "--threads", "2").code == 2
