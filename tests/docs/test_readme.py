"""README code runs: every Python block in a process of its own, every qkv command, and the numbers in the tables."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import qkv
from qkv import config as c

from .standin import put_smollm

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "README.zh-CN.md")


def blocks(page: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One thread, and a store that holds a small model in place of the published one."""
    home = tmp_path_factory.mktemp("home")
    put_smollm(home)
    return {**os.environ, "OMP_NUM_THREADS": "1", "QKV_HOME": str(home)}


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page: str, environment: dict[str, str]) -> None:
    """One process per page: later blocks may use the names of earlier ones."""
    code = "\n".join(blocks(page, "python"))
    assert code
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "8030261248" in done.stdout
    if page == "README.md":
        lines = done.stdout.splitlines()
        assert float(lines[1]) < 1e-6
        said = next(line.split("  # ")[1] for line in code.splitlines() if line.strip().startswith("print(error)"))
        assert lines[2] == said


COMMANDS = [
    line.split("#")[0].strip()
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line.startswith("qkv ")
]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_run(command: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """As typed, in an empty folder; training is cut to two steps, and what reads its folder finds it."""
    words = shlex.split(command)
    qkv_command = [sys.executable, "-m", "qkv", *words[1:]]

    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env=environment, input=""
        )

    quick = {"demo": ["--steps", "2"], "bench": ["--quick"]}.get(words[1], [])
    if "runs/demo" in words:
        assert run([sys.executable, "-m", "qkv", "demo", "--steps", "2"]).returncode == 0
    done = run([*qkv_command, *quick])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or words[1] == "chat"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for block in blocks(page, "bash") for target in re.findall(r"make ([a-z-]+)", block)
    }
    assert named
    assert named <= targets


def test_numbers_of_the_readme_are_true() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.search(r"(\d+) published models", text)
    assert said is not None
    assert int(said[1]) == len(qkv.presets())


def test_what_the_table_says_is_implemented_exists() -> None:
    """Every member of these unions is named in the README's table, by one of the words people use for it."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## What is implemented")[1].lower()
    words = {
        "t5-buckets": "t5 buckets", "qwen-dynamic": "qwen's", "llama3": "llama 3", "ntk": "ntk", "latent": "latent",
        "multi-head": "multi-head", "full": "embeddings", "lm": "language model", "masked-lm": "masked lm",
        "adaptive": "adaptive", "dynamic-ntk": "dynamic ntk",
    }  # fmt: skip
    for union in c.UNIONS:
        if union is c.Init:
            continue
        for kind in union.kinds():
            assert (
                words.get(kind, kind.replace("-", " ")) in table.replace("-", " ") or words.get(kind, kind) in table
            ), kind
