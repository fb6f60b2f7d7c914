"""What `tests/conftest.py` promises: one thread, checked shapes, and a reason for each test that is left out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from qkv import config as c
from qkv.nn import norm

from .source import ROOT

PROBE = """
import pytest
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.unhooked
def test_unhooked(): pass
@pytest.mark.data
def test_marked(): pass
def test_fixture(data): print(data)
def test_plain(): pass
"""


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_shapes_are_checked_unless_told_otherwise() -> None:
    module = norm.RMSNorm(c.RMSNorm(), 8)
    whole = torch.ones(2, 8, dtype=torch.int64)  # no norm of whole numbers: `Float` refuses them
    if os.environ.get("QKV_SHAPES", "1") == "0":
        assert module(whole).shape == (2, 8)
    else:
        with pytest.raises(TypeError, match="Float"):
            module(whole)


def test_examples_are_repeatable() -> None:
    assert settings.default.derandomize
    assert settings.default.deadline is None


def outcomes(folder: Path, *arguments: str, **environment: str) -> str:
    """What a run of the probe reports, with the reasons of what it skipped."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "test_probe.py").write_text(PROBE, encoding="utf-8")
    markers = ["-o", "markers=slow\ngpu\ndata", "--strict-markers", "-rs", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"--rootdir={folder}", str(folder), *markers, *arguments],
        env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_left_out_says_why(tmp_path: Path) -> None:
    report = outcomes(tmp_path, QKV_DATA=str(tmp_path / "nowhere"), QKV_SHAPES="1")
    assert "1 passed, 4 skipped" in report
    assert "slow: run with --slow" in report
    assert "needs QKV_SHAPES=0" in report
    assert report.count(f"no data at {tmp_path / 'nowhere'}: set QKV_DATA") == 2


def test_nothing_is_left_out_when_all_is_there(tmp_path: Path) -> None:
    assert "5 passed" in outcomes(tmp_path, "--slow", QKV_DATA=str(tmp_path), QKV_SHAPES="0")
