"""From logits to a token, on the host, in NumPy.

    p = softmax(logits / temperature)        temperature 0: the largest logit, the lowest id among equals

The random number of a token is a function of the seed and the token's position alone (Philox, Salmon 2011: a counter in
place of a state), so that a seed means the same however the tokens before it were computed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qkv.errors import GenerationError


def draw(logits: npt.NDArray[np.floating], temperature: float, seed: int, position: int) -> int:
    """The token at `position`, drawn from the softmax of `logits` (V,)."""
    if temperature < 0:
        raise GenerationError(f"temperature: must be 0 (greedy) or more, got {temperature}")
    if seed < 0:
        raise GenerationError(f"seed: must be 0 or more, got {seed}")
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    cumulative = np.exp(scaled - scaled.max()).cumsum()
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    return chosen(cumulative, uniform)


def chosen(cumulative: npt.NDArray[np.float64], uniform: float) -> int:
    """The first token whose cumulative weight exceeds `uniform` (in [0, 1)) times the total: never one of weight 0."""
    total = cumulative[-1]
    place = min(uniform * total, np.nextafter(total, 0))  # the product may round up to the total
    return int(cumulative.searchsorted(place, side="right"))
