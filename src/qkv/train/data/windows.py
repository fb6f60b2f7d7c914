"""Windows of one long text that is in memory: what the demo trains on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from qkv.errors import DataError


def split(tokens: Tensor, held_out: float) -> tuple[Tensor, Tensor]:
    """The text without its end, to train on, and its end, to be tested on."""
    edge = len(tokens) - round(len(tokens) * held_out)
    return tokens[:edge], tokens[edge:]


def random_windows(tokens: Tensor, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), each (batch, length): windows at random places, targets one token later."""
    if len(tokens) <= length:
        raise DataError(f"tokens: {len(tokens)} are too few for windows of {length}; give more text")
    random = np.random.default_rng(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.from_numpy(random.integers(0, len(tokens) - length, size=(batch, 1)))
        windows = tokens[starts + offsets]
        yield windows[:, :-1], windows[:, 1:]
