"""A run in which adapters learn and the model stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qkv
from qkv.config.recipe import Recipe
from qkv.train import Trainer
from qkv.train.adapter_files import load_adapter

from .runs import recipe


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return qkv.load(folder).model.state_dict()


@pytest.mark.parametrize("base", ["as-is", "int4"])
def test_only_adapters_learn_and_a_killed_run_goes_on_to_the_bit(tmp_path: Path, base: str) -> None:
    def made(name: str) -> Recipe:
        lora = {"rank": 2, "alpha": 8.0, "dropout": 0.1, "targets": ["q_proj", "v_proj"], "base": base}
        changes = {"run.steps": 6, "run.save_every": 3, "schedule.peak": 1e-2, "lora": lora}
        return recipe(tmp_path, **{"run.folder": str(tmp_path / name)}).override(changes)

    whole = list(Trainer.start(made("whole")).run())
    first = Trainer.start(made("halves"))
    for report in first.run():
        if report.step == 4:
            break  # as if killed: the last checkpoint is that of step 3
    rest = list(Trainer.resume(made("halves")).run())
    assert [report.loss for report in rest] == [report.loss for report in whole[3:]]
    one, other = weights(tmp_path / "whole" / "model"), weights(tmp_path / "halves" / "model")
    assert all(torch.equal(one[name], other[name]) for name in one)

    kept = weights(tmp_path / "whole" / "checkpoints" / "00000006" / "model")  # the base alone
    moved = {name for name in one if not torch.equal(one[name], kept[name])}
    assert moved
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in moved)


def test_the_adapter_beside_its_base_is_the_merged_model(tmp_path: Path) -> None:
    made = recipe(tmp_path).override({"run.steps": 3, "schedule.peak": 1e-2, "lora": {"rank": 2}})
    list(Trainer.start(made).run())
    folder = Path(made.run.folder)
    merged = qkv.load(folder / "model").model
    beside = qkv.load(folder / "checkpoints" / "00000003" / "model").model
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        plain = beside(tokens).logits
        load_adapter(beside, folder / "adapter")
        found, wanted = beside(tokens).logits, merged(tokens).logits
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (found - plain).abs().max() > 1e-4 * plain.abs().max()
