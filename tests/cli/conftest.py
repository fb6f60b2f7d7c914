"""What the tests of commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import qkv
from qkv.text import ByteTokenizer

from .helpers import Result, run


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`command("show", "gpt2")` runs `qkv show gpt2`."""
    return lambda *arguments: run(monkeypatch, capsys, *arguments)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small language model of bytes."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 256})
    qkv.TextModel(qkv.build(config, seed=3), ByteTokenizer()).save(folder)
    return folder
