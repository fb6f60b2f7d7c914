"""The length table at tiny size: every kind and rule builds, nothing is done twice, all lengths have one protocol."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import qkv
from qkv.evaluate import perplexity_of
from qkv.text import language_reference

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "length.py"
TINY = (
    *("--steps", "2", "--batch", "2", "--context", "8", "--lengths", "8", "16", "32", "--tune-steps", "1"),
    *("--tokens", "64", "--d-model", "32", "--layers", "1"),
)


@pytest.fixture(scope="module")
def length() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_length", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(language_reference()[:6000])
    return path


def test_every_kind_and_every_rule_is_an_architecture(length: ModuleType) -> None:
    plan = length.asked(["text.txt"])
    assert (plan.steps, plan.batch, plan.context, plan.lengths) == (1500, 16, 128, [128, 256, 512, 1024])
    kinds = {name: length.architecture(plan, *places) for name, places in length.schemes(128).items()}
    assert len(set(map(str, kinds.values()))) == 10
    assert {config.d_model for config in kinds.values()} == {128}
    base = kinds[length.BASE]
    at = "decoder.layers.*.attention.positions.scaling"
    rules = [base.override({at: length.scaling(plan, rule).to_dict()}) for rule in length.RULES]
    assert rules[0] == base
    assert len(set(map(str, rules))) == 6
    assert length.scaling(plan, "yarn").factor == 8


def test_a_length_without_positions_is_left_out(length: ModuleType, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = length.asked([str(text), "--out", str(out), *TINY, "--only", "learned"])
    length.run(plan)
    results = json.loads((out / "results.json").read_text())
    assert results["protocols"]["32"] == "sliding windows of 32 tokens, stride 8, from token 32 of each text on"
    found = results["models"]["learned"]
    assert found["perplexity"]["8"] > 1
    assert found["perplexity"]["16"] is found["perplexity"]["32"] is None
    # What is said of a model is what its folder gives.
    lm, held_out = qkv.load(out / "learned" / "model"), (out / "valid.txt").read_text()
    again = perplexity_of(lm, [held_out], length.protocol(plan, 8), limit=32 + 64)
    assert found["perplexity"]["8"] == pytest.approx(again.perplexity, rel=1e-6)
    assert found["tokens"] == again.tokens == 64
    assert f"| learned | {again.perplexity:.2f} | - | - |" in (out / "table.md").read_text()
    assert (out / "length.png").read_bytes().startswith(b"\x89PNG")


def test_a_rule_stretches_and_then_tunes(length: ModuleType, text: Path, tmp_path: Path) -> None:
    plan = length.asked([str(text), "--out", str(tmp_path / "out"), *TINY])
    length.prepare(plan)
    base = qkv.load(length.from_scratch(plan, length.BASE))
    start = partial(length.stretched, plan, "yarn")
    stretched, tuned = qkv.load(start()), qkv.load(length.tuned(plan, f"{length.BASE}-yarn", start))
    for lm in (stretched, tuned):
        assert lm.config.decoder.layers[0].attention.positions.scaling == length.scaling(plan, "yarn")
        assert lm.config.max_seq_len == 32
    before, same, after = (lm.model.state_dict() for lm in (base, stretched, tuned))
    assert all(bool((before[name] == same[name]).all()) for name in before)
    assert any(bool((before[name] != after[name]).any()) for name in before)
    recipe = qkv.Recipe.read(plan.out / "rope-10k-yarn" / "tuned" / "recipe.toml")
    assert (recipe.data.context, recipe.run.batch, recipe.run.steps) == (32, 1, 1)


def test_transformer_xl_learns_with_its_memory(length: ModuleType, text: Path, tmp_path: Path) -> None:
    plan = length.asked([str(text), "--out", str(tmp_path / "out"), *TINY])
    length.prepare(plan)
    length.from_scratch(plan, "transformer-xl")
    assert qkv.Recipe.read(plan.out / "transformer-xl" / "recipe.toml").objective.memory == 8


@pytest.mark.slow
def test_the_whole_table(length: ModuleType, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    length.run(length.asked([str(text), "--out", str(out), *TINY]))
    results = json.loads((out / "results.json").read_text())
    stretched = [f"rope-10k-{rule}" for rule in length.RULES[1:]]
    tuned = [f"{name}-tuned" for name in (*length.schemes(8), *stretched) if name != "learned"]
    assert list(results["models"]) == [*length.schemes(8), *stretched, *tuned]
    before, after = (results["models"][name]["perplexity"]["32"] for name in ("rope-10k-yarn", "rope-10k-yarn-tuned"))
    assert before != after
    table = (out / "table.md").read_text().splitlines()
    assert [sum(row.startswith(f"| {rule} ") for row in table) for rule in length.RULES] == [1] * 6
    assert sum(row.startswith("| ") for row in table) == 2 * 2 + 10 + 6


def test_what_is_done_is_not_done_again(
    length: ModuleType, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [str(text), "--out", str(out), *TINY, "--only", "none"]
    length.run(length.asked(arguments))
    first = (out / "results.json").read_text()
    weights = (out / "none" / "model").stat().st_mtime_ns
    assert "none: 2 steps" in capsys.readouterr().out
    length.run(length.asked(arguments))
    assert capsys.readouterr().out == ""
    # A kill between training and measuring costs the measuring only.
    (out / "results.json").unlink()
    length.run(length.asked(arguments))
    assert "steps" not in capsys.readouterr().out
    assert (out / "results.json").read_text() == first
    assert (out / "none" / "model").stat().st_mtime_ns == weights
    with pytest.raises(SystemExit, match="holds results of other settings"):
        length.run(length.asked([*arguments[:-2], "--seed", "1", "--only", "none"]))
    with pytest.raises(SystemExit):
        length.asked([*arguments, "nothing"])


def test_a_run_that_was_killed_goes_on(length: ModuleType, text: Path, tmp_path: Path) -> None:
    plans = [
        length.asked([str(text), "--out", str(tmp_path / name), *TINY, "--steps", "5", "--only", "alibi"])
        for name in ("whole", "killed")
    ]
    for plan in plans:
        length.prepare(plan)
    whole = length.from_scratch(plans[0], "alibi")
    killed = length.from_scratch(plans[1], "alibi")
    (killed / "model.safetensors").unlink()
    for path in killed.iterdir():
        path.unlink()
    killed.rmdir()
    assert length.from_scratch(plans[1], "alibi") == killed
    one, other = (qkv.load(folder).model.state_dict() for folder in (whole, killed))
    assert all(bool((one[name] == other[name]).all()) for name in one)
