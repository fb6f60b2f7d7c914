"""The loop learns, repeats itself, and ends when it should."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch import Tensor

import qkv
from qkv.nn import Transformer
from qkv.train import Plan, Step, loop, random_windows, train

TEXT = torch.tensor(list(b"to be or not to be, that is the question: " * 8))


def small_model() -> Transformer:
    return qkv.build(qkv.preset("llama-3-8b").toy().override({"vocab_size": 128}), seed=0)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    return random_windows(TEXT, 4, 24, seed=0)


def run(model: Transformer, plan: Plan) -> list[Step]:
    return list(train(model, batches(), plan))


def test_the_loss_falls_from_ln_vocabulary() -> None:
    steps = run(small_model(), Plan(60, 1e-2, warmup=5))
    assert steps[0].loss == pytest.approx(math.log(128), rel=0.05)
    assert steps[-1].loss < 0.5
    assert [step.number for step in steps] == list(range(1, 61))
    assert {step.steps for step in steps} == {60}
    assert {step.tokens for step in steps} == {4 * 24}


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = small_model(), small_model()
    assert [s.loss for s in run(first, Plan(5, 1e-2, 2))] == [s.loss for s in run(second, Plan(5, 1e-2, 2))]
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_dropout_acts_in_the_loop_only() -> None:
    model = small_model()
    steps = train(model, batches(), Plan(3, 1e-2, 1))
    next(steps)
    assert model.training
    steps.close()
    assert not model.training


def test_gradients_are_clipped() -> None:
    # Adam does not see the scale of gradients until its epsilon of 1e-8 outweighs them: clipped to almost nothing, they
    # leave the model where it was, while unclipped ones move each weight by the learning rate.
    model, before = small_model(), small_model()
    run(model, Plan(1, 1e-2, 1, weight_decay=0.0, clip=1e-14))
    for name, tensor in before.state_dict().items():
        assert (model.state_dict()[name] - tensor).abs().max() < 1e-7, name


class Clock:
    """A clock on which every reading is a second later."""

    def __init__(self) -> None:
        self.monotonic = count().__next__


def test_steps_are_cut_to_the_time_and_the_schedule_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "time", Clock())
    steps = run(small_model(), Plan(1000, 1e-2, warmup=4, seconds=12))
    assert [step.steps for step in steps] == [1000] * 3 + [12] * 9
    assert steps[-1].seconds == 12


def test_a_fast_machine_makes_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "time", Clock())
    assert len(run(small_model(), Plan(8, 1e-2, warmup=4, seconds=100))) == 8


def test_time_that_is_over_in_the_warm_up_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "time", Clock())
    steps = run(small_model(), Plan(1000, 1e-2, warmup=40, seconds=5))
    assert len(steps) == steps[-1].steps == 5
