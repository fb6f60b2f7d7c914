"""Splitting a text, and windows of it."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from qkv.errors import DataError
from qkv.train import random_windows, split

TEXT = torch.arange(100)


def test_the_end_is_held_out() -> None:
    training, held_out = split(TEXT, 0.1)
    assert training.tolist() == list(range(90))
    assert held_out.tolist() == list(range(90, 100))


def test_targets_stand_one_token_later() -> None:
    for inputs, targets in islice(random_windows(TEXT, 4, 7, seed=0), 20):
        assert inputs.shape == targets.shape == (4, 7)
        assert (inputs.diff() == 1).all()
        assert (targets == inputs + 1).all()


def test_every_place_is_reached_and_none_beyond() -> None:
    windows = [inputs for inputs, _ in islice(random_windows(TEXT[:12], 8, 9, seed=0), 30)]
    assert set(torch.cat(windows)[:, 0].tolist()) == {0, 1, 2}


def test_a_seed_gives_the_same_batches() -> None:
    def first(seed: int) -> list[int]:
        return next(random_windows(TEXT, 4, 7, seed))[0].flatten().tolist()

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="7 are too few for windows of 7"):
        next(random_windows(TEXT[:7], 1, 7, seed=0))
