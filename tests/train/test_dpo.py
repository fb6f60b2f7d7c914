"""Preferences: the loss against a transcription, its gradient, and runs in which the chosen answers gain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from qkv.config import LanguageModel
from qkv.config.recipe import Recipe
from qkv.config.training import Prefer
from qkv.errors import DataError
from qkv.nn import Transformer
from qkv.train import Trainer
from qkv.train.batch import IGNORE, Example
from qkv.train.loss import Loss, loss_sum, step_gradients
from qkv.train.objectives import make
from qkv.train.preference import Reference, frozen_copy

from . import runs
from .small import BARE, apart, config, gradients, texts

BETA = 0.3
EXAMPLES = [
    Example(chosen, prompt, rejected=rejected)
    for prompt, chosen, rejected in zip(texts(4), texts(5), texts(6), strict=False)
]


@pytest.fixture
def model() -> Transformer:
    return qkv.build(config(LanguageModel(tied=True)), seed=1).double()


def reference_of(model: Transformer, rows: int = 2) -> Reference:
    """One that differs from the model."""
    other = frozen_copy(model)
    with torch.no_grad():
        for number, tensor in enumerate(other.parameters()):
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    return Reference(other, other, rows)


def logp(model: Transformer, prompt: np.ndarray, answer: np.ndarray) -> Tensor:
    """log p(answer | prompt), token by token."""
    logits = model(torch.from_numpy(np.concatenate([prompt, answer]))[None]).logits
    assert logits is not None
    logs = logits[0].log_softmax(-1)
    return torch.stack([logs[len(prompt) + at - 1, token] for at, token in enumerate(answer)]).sum()


def transcribed(model: Transformer, reference: Transformer) -> Tensor:
    """Equation 7."""
    losses = []
    for one in EXAMPLES:
        assert one.source is not None
        assert one.rejected is not None
        with torch.no_grad():
            chosen, rejected = (logp(reference, one.source, answer) for answer in (one.tokens, one.rejected))
        won = BETA * (logp(model, one.source, one.tokens) - chosen)
        lost = BETA * (logp(model, one.source, one.rejected) - rejected)
        losses.append(-torch.log(torch.sigmoid(won - lost)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_loss_and_gradient_are_those_of_the_paper(model: Transformer, rows: int) -> None:
    reference = reference_of(model)
    loss = transcribed(model, reference.model)
    torch.autograd.backward(loss)
    expected = loss.detach()
    slopes = gradients(model)
    model.zero_grad()
    objective = Prefer(beta=BETA)
    batch = make(objective, BARE, model.config).batch(EXAMPLES, np.random.default_rng(0))
    batch = reference.beside(batch)
    found = step_gradients(model, batch.split(rows), Loss.of(objective, model.config))
    assert abs(float(found.mean) - float(expected)) < 1e-12 * float(expected)
    assert found.count == len(EXAMPLES)
    assert apart(gradients(model), slopes) < 1e-12


def test_a_model_that_is_its_reference_is_undecided(model: Transformer) -> None:
    batch = make(Prefer(), BARE, model.config).batch(EXAMPLES, np.random.default_rng(0))
    batch = Reference(model, model, 4).beside(batch)
    total, count = loss_sum(model, batch.to("cpu"))
    assert float(total.detach()) / count == pytest.approx(np.log(2), rel=1e-12)


def test_long_rows_lose_the_answers_end_and_the_prompts_beginning(model: Transformer) -> None:
    maker = make(Prefer(), BARE, model.config, 12)
    prompt, chosen, rejected = np.arange(20, 40), np.arange(40, 43), np.arange(43, 63)
    first, second = (
        maker.batch([Example(chosen, prompt, rejected=rejected)], np.random.default_rng(0)).split(1)[0].targets
    )
    assert first[first != IGNORE].tolist() == [40, 41, 42]
    assert second[second != IGNORE].tolist() == [43, 44, 45, 46, 47, 48]
    assert len(second) <= 12


# Runs


def preferring(folder: Path, **changes: Any) -> Recipe:
    """The politer answer is chosen."""
    lines = [
        {"prompt": f"{asked}? ", "chosen": f"{name}, please.", "rejected": f"give me {name}!"}
        for asked in ("what", "who", "which one")
        for name in ("the cat", "a dog", "the mat", "rain")
    ]
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    base: dict[str, Any] = {
        "data": {"train": [str(path)], "format": "preferences", "context": 40, "valid_share": 0.3},
        "objective": {"kind": "dpo", "beta": 0.5},
        "schedule__peak": 3e-3,
        "run__batch": 8,
        "run__steps": 30,
        "run__eval_every": 10,
    }
    return runs.recipe(folder, **(base | changes))


@pytest.mark.parametrize("lora", [False, True])
def test_chosen_answers_gain_and_the_run_is_taken_up_to_the_bit(lora: bool, tmp_path: Path) -> None:
    adapters = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj", "up_proj"]}} if lora else {}
    made = preferring(tmp_path, run__save_every=10, run__micro_batch=3, **adapters)
    reports = runs.finished(made)
    assert reports[0].loss == pytest.approx(np.log(2), rel=0.02)  # dropout
    last = reports[-1]
    assert last.valid_accuracy == 1.0
    assert last.valid_loss is not None
    assert last.valid_loss < 0.65  # ln 2 is 0.693
    if lora:
        return
    cut = runs.elsewhere(made, "cut")
    runs.killed(cut, 25)
    assert [report.step for report in Trainer.resume(cut).run()] == list(range(21, 31))
    assert runs.differences(runs.left_by(made.run.folder), runs.left_by(cut.run.folder)) == []


def test_equal_answers_and_missing_ones_are_named(tmp_path: Path) -> None:
    made = preferring(tmp_path)
    path = Path(made.data.train[0])
    for line, message in (
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"line 1: the chosen answer is the rejected one"),
        ({"prompt": "a", "chosen": "b"}, r"line 1: no 'rejected' \(its fields: prompt, chosen\)"),
    ):
        path.write_text(json.dumps(line) + "\n", encoding="utf-8")
        with pytest.raises(DataError, match=message):
            Trainer.start(made)
