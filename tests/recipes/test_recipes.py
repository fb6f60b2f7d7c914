"""Every ready recipe at reduced size: the commands of its head comment, on generated data, in an empty folder."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import qkv
from cli.helpers import Result, run
from docs.standin import put_smollm
from qkv.config.recipe import Recipe
from qkv.text import language_reference

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STEPS = 6
SMALL = {"run.steps": STEPS, "run.batch": 4, "run.eval_every": 2, "run.save_every": 1, "run.sample_every": 0}


def shakespeare(folder: Path) -> None:
    (folder / "tinyshakespeare.txt").write_text(language_reference()[:20_000])


def wiki(folder: Path) -> None:
    (folder / "wiki.txt").write_text(language_reference()[:20_000])


def smollm(folder: Path) -> None:
    shakespeare(folder)
    put_smollm(folder / "home")


def chinese(folder: Path) -> None:
    draw = random.Random(0)
    lines = ["".join(draw.choices("山水日月風雲花鳥人天不有之在春秋長相思明", k=7)) for _ in range(1500)]
    (folder / "chinese_classics.txt").write_text("，\n".join(lines))


def letters(folder: Path) -> None:
    """By the recipe's own command, with fewer pairs."""
    made = subprocess.check_output([sys.executable, RECIPES / "pairs.py", "--count", "400"], text=True, timeout=60)
    (folder / "copy.tsv").write_text(made)


def tatoeba(folder: Path) -> None:
    draw = random.Random(0)
    words = {"the": "der", "dog": "Hund", "sees": "sieht", "a": "ein", "big": "großer", "tree": "Baum"}
    chosen = [draw.choices(list(words), k=draw.randint(3, 9)) for _ in range(400)]
    lines = [f"{' '.join(line)}\t{' '.join(words[word] for word in line)}" for line in chosen]
    (folder / "deu.txt").write_text("\n".join(lines))


DATA: dict[str, Callable[[Path], None]] = {
    "bert-wiki": wiki,
    "chinese-classics": chinese,
    "copy": letters,
    "shakespeare-gpt2": shakespeare,
    "shakespeare-llama": shakespeare,
    "smollm2-lora": smollm,
    "t5-spans": wiki,
    "tatoeba-de-en": tatoeba,
}
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


def commands(name: str) -> list[list[str]]:
    """The commands of the head comment, in order; what fetches or makes the texts is left to the test."""
    head = (RECIPES / f"{name}.toml").read_text(encoding="utf-8").split("\n\n")[0]
    found = [shlex.split(line) for line in re.findall(r"^#   (\S.*)$", head, flags=re.M)]
    return [words for words in found if words[0] != "curl" and ">" not in words]


@pytest.fixture
def small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[list[str]], Result]:
    """Runs a command of a head comment in an empty folder; training is made short, and models shallow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKV_HOME", str(tmp_path / "home"))

    def command(words: list[str]) -> Result:
        program, *rest = [word.replace("recipes/", f"{RECIPES}/") for word in words]
        if program == "python":
            done = subprocess.run([sys.executable, *rest], capture_output=True, text=True, timeout=60, check=False)
            return Result(done.returncode, done.stdout, done.stderr)
        assert program == "qkv"
        if rest[0] == "train":
            model = Recipe.read(rest[1]).model.architecture
            stacks = {} if model is None else model.stacks
            fewer = {f"model.overrides.{stack}.n_layers": 1 for stack in stacks}
            rest += [word for path, value in {**SMALL, **fewer}.items() for word in ("--set", f"{path}={value}")]
        if rest[0] in ("generate", "translate"):
            rest += ["--max-new-tokens", "3"]
        return run(monkeypatch, capsys, *rest)

    return command


def test_every_recipe_has_data_here() -> None:
    assert list(DATA) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_recipe_run(name: str, small: Callable[[list[str]], Result]) -> None:
    here = Path.cwd()
    DATA[name](here)
    wanted = commands(name)
    assert ["qkv", "train", f"recipes/{name}.toml"] in wanted
    for words in wanted:
        done = small(words)
        assert done.code == 0, (words, done.err)
        assert done.out.endswith("\n"), words  # an untrained model may write nothing else
    log = [json.loads(line) for line in (here / "runs" / name / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == list(range(1, STEPS + 1))
    valid = [entry["valid_loss"] for entry in log if "valid_loss" in entry]
    assert len(valid) == STEPS // 2
    assert valid[-1] < valid[0]
    assert qkv.load(here / "runs" / name / "model").config.vocab_size > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_survives_being_written(name: str) -> None:
    recipe = Recipe.read(RECIPES / f"{name}.toml")
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert recipe.run.folder == f"runs/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_learned_vocabulary_is_as_large_as_the_models(name: str) -> None:
    recipe = Recipe.read(RECIPES / f"{name}.toml")
    if recipe.entries is not None:
        assert recipe.model.architecture is not None
        assert recipe.model.architecture.vocab_size == recipe.entries


def test_what_the_readme_asks_for_besides_is_a_recipe() -> None:
    (part,) = re.findall(r"```toml\n(.*?)```", (RECIPES / "README.md").read_text(encoding="utf-8"), flags=re.S)
    rest = '[schedule]\nkind = "constant"\npeak = 1e-4\n[run]\nsteps = 1\nbatch = 1\nfolder = "runs/a"\n'
    assert Recipe.from_toml(part + rest).objective.kind == "classify"


def test_the_two_on_shakespeare_have_one_budget() -> None:
    one, other = (Recipe.read(RECIPES / f"shakespeare-{style}.toml") for style in ("gpt2", "llama"))
    for part in ("data", "objective", "optimizer", "schedule"):
        assert getattr(one, part) == getattr(other, part)
    assert one.run.override({"folder": "x"}) == other.run.override({"folder": "x"})
    first, second = one.model.architecture, other.model.architecture
    assert first is not None
    assert second is not None
    assert second.n_parameters <= first.n_parameters
    # nanoGPT's README: n_layer 4, n_head 4, n_embd 128, block_size 64, batch_size 12, max_iters 2000, dropout 0.
    assert first.decoder is not None
    heads = {block.attention.n_heads for block in first.decoder.blocks}
    assert (first.decoder.n_layers, heads, first.d_model, first.max_seq_len) == (4, {4}, 128, 64)
    assert (one.run.steps, one.run.batch, one.data.context) == (2000, 12, 64)
    assert (first.embedding.dropout, {block.dropout for block in first.decoder.blocks}) == (0.0, {0.0})


def test_pairs_are_what_they_say() -> None:
    script = [sys.executable, str(RECIPES / "pairs.py"), "--count", "200", "--longest", "6", "--seed", "3"]
    made = subprocess.check_output(script, text=True, timeout=60)
    assert subprocess.check_output(script, text=True, timeout=60) == made
    pairs = [line.split("\t") for line in made.splitlines()]
    assert len({source[1:] for source, _ in pairs}) == 200
    assert {source[0] for source, _ in pairs} == {"=", "<"}
    for source, target in pairs:
        assert target == (source[1:] if source[0] == "=" else source[:0:-1])
        assert 3 <= len(target) <= 6
