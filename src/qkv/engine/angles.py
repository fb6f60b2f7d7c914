"""Cosines and sines of rotary positions, for the rules whose angles do not depend on the length of the row.

angle(p, i) = p * f_i,    f_i = theta^(-2i/d), stretched by the scaling rule; the config classes name the papers
"""

from __future__ import annotations

import math
from functools import singledispatch

import numpy as np
import numpy.typing as npt

from qkv import config as c
from qkv.engine.packing import Floats

Frequencies = npt.NDArray[np.float64]


def waves(positions: c.Rotary, head_dim: int, length: int) -> tuple[Floats, Floats]:
    """Cosines and sines, each (length, turned / 2)."""
    width = positions.width(head_dim)
    pair = np.arange(0, width, 2) / width
    frequency, factor = stretched(positions.scaling, positions.theta, pair)
    angle = np.arange(length)[:, None] * frequency
    return (np.cos(angle) * factor).astype(np.float32), (np.sin(angle) * factor).astype(np.float32)


@singledispatch
def stretched(rule: c.RotaryScaling, theta: float, pair: Frequencies) -> tuple[Frequencies, float]:
    """The angle per position of each pair, and what multiplies its waves."""
    raise NotImplementedError(f"no angles for {rule.kind!r}")


@stretched.register
def _(rule: c.NoScaling, theta: float, pair: Frequencies) -> tuple[Frequencies, float]:
    return theta**-pair, 1.0


@stretched.register
def _(rule: c.LinearScaling, theta: float, pair: Frequencies) -> tuple[Frequencies, float]:
    return theta**-pair / rule.factor, 1.0


@stretched.register
def _(rule: c.NtkScaling, theta: float, pair: Frequencies) -> tuple[Frequencies, float]:
    width = 2 * len(pair)
    larger: Frequencies = (theta * rule.factor ** (width / (width - 2))) ** -pair
    return larger, 1.0


@stretched.register
def _(rule: c.Llama3Scaling, theta: float, pair: Frequencies) -> tuple[Frequencies, float]:
    plain = theta**-pair
    fitting = rule.original_max_seq_len * plain / (2 * math.pi)  # wavelengths in the trained length
    share = (fitting - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    kept = np.clip(share, 0, 1)
    return kept * plain + (1 - kept) * plain / rule.factor, 1.0
