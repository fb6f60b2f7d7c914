"""Compiling the runtime: once, and with a clear word where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.engine import library
from qkv.errors import EngineError


def test_without_a_compiler_the_first_use_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(EngineError, match=r"needs a C\+\+ compiler once, and there is none; install"):
        library.compiler()


def test_what_the_compiler_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.cpp").write_text("int main( {")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    monkeypatch.setattr(library, "_flags", lambda: {"run.cpp": ()})
    monkeypatch.setenv("QKV_HOME", str(tmp_path / "home"))
    with pytest.raises(EngineError, match=r"cannot compile it .*error") as caught:
        library._compiled()
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "home" / "engine").iterdir())


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "run.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(library, "SOURCES", tmp_path / "native")
    monkeypatch.setattr(library, "_flags", lambda: {"run.cpp": ()})
    monkeypatch.setenv("QKV_HOME", str(tmp_path / "home"))
    first = library._compiled()
    made = first.stat().st_mtime_ns
    assert library._compiled() == first
    assert first.stat().st_mtime_ns == made
    (tmp_path / "native" / "run.cpp").write_text('extern "C" int one() { return 2; }')
    assert library._compiled() != first
