"""The frequencies of rotary pairs: theta^(-2i/d) for pair i of d/2, and the rules that stretch them.

A rule gets 2i/d of every pair in float64 and the `length` (B, T) of each token's row, and answers with the angle per
position and the factor that multiplies cosines and sines. Three rules depend on the length, so that their answer has
leading axes (B, T); the others' is (d/2,). The config classes name the papers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv import config as c
from qkv.nn.registry import implements

Answer = tuple[Tensor, Tensor | float]


@implements(c.NoScaling)
def as_trained(rule: c.NoScaling, theta: float, pair: Tensor, length: Tensor) -> Answer:
    """theta^(-2i/d)."""
    return theta**-pair, 1.0


@implements(c.LinearScaling)
def linear(rule: c.LinearScaling, theta: float, pair: Tensor, length: Tensor) -> Answer:
    """Every frequency divided."""
    return theta**-pair / rule.factor, 1.0


@implements(c.NtkScaling)
def ntk(rule: c.NtkScaling, theta: float, pair: Tensor, length: Tensor) -> Answer:
    """A larger theta."""
    return (theta * _ntk(pair, rule.factor)) ** -pair, 1.0


@implements(c.DynamicNtkScaling)
def dynamic_ntk(rule: c.DynamicNtkScaling, theta: float, pair: Tensor, length: Tensor) -> Answer:
    """A theta that grows with the row."""
    ratio = length.double() / rule.original_max_seq_len
    growth = (rule.factor * ratio - (rule.factor - 1)).clamp(min=1)
    return (theta * _ntk(pair, growth))[..., None] ** -pair, 1.0


@implements(c.QwenDynamicScaling)
def qwen_dynamic(rule: c.QwenDynamicScaling, theta: float, pair: Tensor, length: Tensor) -> Answer:
    """A theta that grows in steps, as the row doubles."""
    doublings = (length.double() / rule.original_max_seq_len).log2() + 1
    growth = (2 ** doublings.ceil() - 1).clamp(min=1)
    return (theta * _ntk(pair, growth))[..., None] ** -pair, 1.0


@implements(c.YarnScaling)
def yarn(rule: c.YarnScaling, theta: float, pair: Tensor, length: Tensor) -> Answer:
    """Fast pairs kept, slow pairs divided, a ramp over pair indices between."""
    plain = theta**-pair
    width = 2 * len(pair)

    def turning(turns: float) -> float:
        """The (fractional) pair that makes this many turns inside the trained length."""
        return width * math.log(rule.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(rule.beta_fast), turning(rule.beta_slow)
    if rule.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(len(pair), dtype=torch.float64, device=pair.device) - low) / span).clamp(0, 1)
    return plain * (1 - ramp) + plain / rule.factor * ramp, yarn_attention_factor(rule)


@implements(c.Llama3Scaling)
def llama3(rule: c.Llama3Scaling, theta: float, pair: Tensor, length: Tensor) -> Answer:
    """Fast pairs kept, slow pairs divided, a ramp over wavelengths between."""
    plain = theta**-pair
    wavelengths = rule.original_max_seq_len * plain / (2 * math.pi)  # how many fit the trained length
    share = (wavelengths - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    kept = share.clamp(0, 1)
    return plain * kept + plain / rule.factor * (1 - kept), 1.0


@implements(c.LongRopeScaling)
def longrope(rule: c.LongRopeScaling, theta: float, pair: Tensor, length: Tensor) -> Answer:
    """Each pair divided by its own factor, one list for short rows and one for long."""
    short, long = (
        torch.tensor(f, dtype=torch.float64, device=pair.device) for f in (rule.short_factor, rule.long_factor)
    )
    is_long = length[..., None] > rule.original_max_seq_len
    factor = rule.attention_factor
    if factor is None:
        factor = math.sqrt(1 + math.log(rule.factor) / math.log(rule.original_max_seq_len)) if rule.factor > 1 else 1.0
    return theta**-pair / torch.where(is_long, long, short), factor


def _ntk(pair: Tensor, growth: Tensor | float) -> Tensor:
    """growth^(d/(d-2)): what multiplies theta so that the slowest pair slows by `growth`."""
    width = 2 * len(pair)
    return torch.as_tensor(growth, dtype=torch.float64, device=pair.device) ** (width / (width - 2))


def yarn_attention_factor(rule: c.YarnScaling) -> float:
    """What multiplies cosines and sines: 0.1 mscale ln(factor) + 1, over the same with `mscale_all_dim`."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rule.factor) + 1 if rule.factor > 1 else 1.0

    if rule.attention_factor is not None:
        return rule.attention_factor
    return temperature(rule.mscale) / temperature(rule.mscale_all_dim)
