"""The loop: compute the next token's logits, draw it, append it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from qkv.errors import GenerationError
from qkv.generate.sampling import draw

NextLogits = Callable[[list[int]], npt.NDArray[np.floating]]
"""From the tokens so far to the logits (V,) of the next one."""


@dataclass(frozen=True)
class Generation:
    """What was generated."""

    text: str
    """The new text, without the prompt."""
    tokens: list[int]
    """The new tokens."""
    finish_reason: Literal["length", "stop"]
    """Why it ended: `length`, all the tokens that were asked for; `stop`, a token that ends texts (the last one)."""


def continuation(
    next_logits: NextLogits,
    prompt: list[int],
    max_new_tokens: int,
    *,
    temperature: float,
    seed: int,
    ends: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """The tokens that follow `prompt`, one at a time: `max_new_tokens`, or fewer if one of `ends` is drawn."""
    if not prompt:
        raise GenerationError("prompt: empty; give at least one token to continue")
    if max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens: must be 1 or more, got {max_new_tokens}")
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(draw(next_logits(tokens), temperature, seed, len(tokens)))
        yield tokens[-1]
        if tokens[-1] in ends:
            return
