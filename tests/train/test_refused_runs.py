"""What is refused before a run begins, or is taken up: in one line, by the name of the field or the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from qkv.config.recipe import Recipe
from qkv.errors import CheckpointError, ConfigError, DataError, QkvError
from qkv.train import Trainer

from . import runs

HEAD = {"kind": "masked-lm"}


# To begin


def test_a_tokenizer_larger_than_the_model_is_refused_and_begins_no_run(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, tokenizer="train-bpe:300")
    with pytest.raises(
        ConfigError, match=r"model\.overrides\.vocab_size: the tokenizer has 300 entries, the model 256"
    ):
        Trainer.start(made)
    again = made.override({"tokenizer": "train-bpe:260", "model.overrides.vocab_size": 260})
    tokenizer = Trainer.start(again).parts.lm.tokenizer
    assert tokenizer is not None
    assert tokenizer.vocab_size == 260


LACKING: dict[str, tuple[type[QkvError], str, dict[str, Any]]] = {
    "mask token": (
        ConfigError,
        r"^tokenizer: has no mask token; .* train-bpe",
        {"model": runs.tiny("bert-base-uncased", head=HEAD), "objective": {"kind": "masked"}},
    ),
    "sentinels": (
        ConfigError,
        r"^tokenizer: has no sentinels .* train-bpe",
        {"model": runs.tiny("t5-small"), "objective": {"kind": "span-corruption"}},
    ),
    "memory": (
        ConfigError,
        r"^model\.overrides\.embedding\.positions: 'learned' numbers",
        {"objective": {"kind": "next-token", "memory": 8}},
    ),
    "held-out text": (DataError, r"needs 17 tokens, but the text has \d+", {"data__valid_share": 0.01}),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_is_lacking_is_said_before_the_run_begins(what: str, tmp_path: Path) -> None:
    kind, message, changes = LACKING[what]
    with pytest.raises(kind, match=message):
        Trainer.start(runs.recipe(tmp_path, **changes))
    assert not (tmp_path / "run" / "recipe.toml").exists()


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_one_line(device: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.device: '{device}' cannot be used \(.*\); take auto, or cpu$"):
        Trainer.start(runs.recipe(tmp_path, run__device=device))


# To resume


@pytest.fixture
def begun(tmp_path: Path) -> Recipe:
    made = runs.recipe(tmp_path, run__steps=4, run__save_every=2)
    reports = Trainer.start(made).run()
    for _ in range(2):
        next(reports)
    return made


def test_a_folder_with_a_run_is_not_started_in_again(begun: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"run\.folder: .*holds a run already; resume it"):
        Trainer.start(begun)


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run; start one"):
        Trainer.resume(runs.recipe(tmp_path))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schedule.peak", 2e-3),
        ("data.context", 12),
        ("run.batch", 2),
        ("run.ema", 0.9),
        ("model.overrides.decoder.n_layers", 1),
        ("optimizer.weight_decay", 0.0),
    ],
)
def test_a_changed_recipe_is_refused_by_the_name_of_the_field(path: str, value: Any, begun: Recipe) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer.resume(begun.override({path: value}))
    assert str(caught.value).startswith(f"{path}: differs from what the run began with")


@pytest.mark.parametrize(
    ("path", "value"), [("run.steps", 5), ("run.keep", 1), ("run.eval_every", 1), ("run.save_every", 1)]
)
def test_how_long_and_what_is_kept_may_change(path: str, value: Any, begun: Recipe) -> None:
    assert Trainer.resume(begun.override({path: value})).step == 2


def test_changed_texts_are_refused(begun: Recipe, tmp_path: Path) -> None:
    with (tmp_path / "corpus.txt").open("a", encoding="utf-8") as file:
        file.write("one line more\n" * 10)
    with pytest.raises(DataError, match="data: the texts or the tokenizer changed"):
        Trainer.resume(begun)


@pytest.mark.parametrize("size", [0, 100, None])
@pytest.mark.parametrize("name", ["training.pt", "state.json", "model/model.safetensors", "model/config.json"])
def test_a_damaged_checkpoint_is_named_with_the_remedy(name: str, size: int | None, begun: Recipe) -> None:
    last = Path(begun.run.folder) / "checkpoints" / "00000002"
    file = last / name
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2] if size is None else b"\x80garbage!"[: size and 9] * 3)
    with pytest.raises(CheckpointError) as caught:
        Trainer.resume(begun)
    message = str(caught.value)
    assert message.startswith(f"{last}: damaged (")
    assert message.endswith("delete it to go on from the one before")
    assert "\n" not in message
    shutil.rmtree(last)
    assert Trainer.resume(begun).step == 0
