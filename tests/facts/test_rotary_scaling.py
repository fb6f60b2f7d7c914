"""Rules that stretch rotary positions beyond the trained length, in the order of their invention."""

import math

import numpy as np
import pytest

import qkv
from qkv import config as c

from .small import (
    Run,
    Turn,
    block,
    both,
    decoder,
    deviation,
    effective_base,
    frequencies,
    heads,
    ratios,
    tokens,
    turns,
    weights_of,
)

PLAIN = 10_000.0 ** (-np.arange(0, 128, 2) / 128)


@turns
def test_rope_scaling_position_interpolation_divides_every_frequency(turn: Turn):
    assert deviation(ratios(turn, c.LinearScaling(factor=4.0)), np.full(64, 0.25)) < 1e-14


@turns
def test_rope_scaling_ntk_aware_base(turn: Turn):
    assert effective_base(turn, c.NtkScaling(factor=4.0)) == pytest.approx(40_889.94, abs=0.005)
    slowed = ratios(turn, c.NtkScaling(factor=4.0))
    assert slowed[0] == 1
    assert slowed[-1] == pytest.approx(1 / 4, rel=1e-13), "the slowest pair slows by exactly the factor"


@turns
def test_e09_the_alpha_formula_does_not_give_code_llamas_theta(turn: Turn):
    """Trained on 4,096 and extended to 16,384 is alpha 4; Code Llama sets 1,000,000."""
    assert round(effective_base(turn, c.NtkScaling(factor=4.0)), -1) == 40_890
    for name in ("codellama-7b", "codellama-34b"):
        assert rotary_of(name) == c.Rotary(theta=1e6)
        assert qkv.preset(name).max_seq_len == 16_384


@pytest.mark.parametrize(("length", "alpha"), [(8192, 1), (8193, 3), (16_384, 3), (16_385, 7), (32_768, 7)])
@turns
def test_rope_scaling_qwen_dynamic_base_grows_in_steps(turn: Turn, length: int, alpha: int):
    """alpha = 2^ceil(log2(L/L0) + 1) - 1."""
    scaling = c.QwenDynamicScaling(original_max_seq_len=8192)
    expected = 10_000 * alpha ** (128 / 126)
    assert effective_base(turn, scaling, length) == pytest.approx(expected, rel=1e-12)


YARN = c.YarnScaling(factor=8.0, original_max_seq_len=4096)


@turns
def test_rope_scaling_yarn_goldens(turn: Turn):
    found = ratios(turn, YARN)
    assert deviation(found[:21], np.ones(21)) < 1e-14
    assert found[33] == pytest.approx(0.5625, abs=1e-14)
    assert deviation(found[46:], np.full(18, 0.125)) < 1e-13
    assert (np.diff(found[20:47]) < 0).all()
    assert frequencies(turn, c.Rotary(scaling=YARN), 128)[1] == pytest.approx(1.2079441541679836, abs=1e-15)


@turns
def test_e04_yarn_keeps_fast_pairs_and_interpolates_slow_ones(turn: Turn):
    found = ratios(turn, YARN)
    turns_inside = 4096 * PLAIN / (2 * math.pi)
    assert (found[turns_inside > 32] > 0.95).all(), "many turns inside the trained length: nearly untouched"
    assert found[turns_inside < 1] == pytest.approx(1 / 8), "less than one turn: fully interpolated"
    assert frequencies(turn, c.Rotary(scaling=YARN), 128)[1] == pytest.approx(0.1 * math.log(8) + 1, rel=1e-15)


@pytest.mark.parametrize(
    ("name", "width", "counts"), [("llama-3.1-8b", 128, (29, 6, 29)), ("llama-3.2-1b", 64, (15, 3, 14))]
)
@turns
def test_rope_scaling_llama3_keeps_blends_and_divides(turn: Turn, name: str, width: int, counts: tuple[int, int, int]):
    rotary = rotary_of(name)
    factor = {"llama-3.1-8b": 8.0, "llama-3.2-1b": 32.0}[name]
    assert rotary.theta == 500_000
    assert rotary.scaling == c.Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
    )
    found = ratios(turn, rotary.scaling, width, 500_000.0)
    kept, divided = np.abs(found - 1) < 1e-12, np.abs(found - 1 / factor) < 1e-12
    assert (kept.sum(), (~kept & ~divided).sum(), divided.sum()) == counts
    assert (np.diff(found) <= 1e-12).all()


@turns
def test_e05_llama_3_scales_nothing_and_3_1_by_wavelength(turn: Turn):
    for name in ("llama-3-8b", "llama-3-70b"):
        assert rotary_of(name) == c.Rotary(theta=500_000.0)
        assert qkv.preset(name).max_seq_len == 8192
    found = ratios(turn, rotary_of("llama-3.1-8b").scaling, base=500_000.0)
    fits = 8192 * 500_000.0 ** (-np.arange(0, 128, 2) / 128) / (2 * math.pi)  # wavelengths inside L0
    kept = np.clip((fits - 1) / (4 - 1), 0, 1)
    assert deviation(found, kept + (1 - kept) / 8) < 1e-12
    assert all(rotary_of(name).scaling.kind == "llama3" for name in ("llama-3-405b", "llama-3.2-1b", "llama-3.2-3b"))


@turns
def test_rope_scaling_longrope_has_a_factor_per_pair_and_two_lists(turn: Turn):
    short, long = tuple(1 + i / 64 for i in range(64)), tuple(1 + i for i in range(64))
    scaling = c.LongRopeScaling(short_factor=short, long_factor=long, factor=32.0, original_max_seq_len=4096)
    assert deviation(ratios(turn, scaling, length=4096), 1 / np.array(short)) < 1e-13
    assert deviation(ratios(turn, scaling, length=4097), 1 / np.array(long)) < 1e-13
    # sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5/12), the published models' factor for 131,072 over 4,096
    for length in (4096, 4097):
        factor = frequencies(turn, c.Rotary(scaling=scaling), 128, length)[1]
        assert factor == pytest.approx(math.sqrt(17 / 12), rel=1e-14)


SCALINGS: dict[str, c.RotaryScaling] = {
    "linear": c.LinearScaling(factor=4.0),
    "ntk": c.NtkScaling(factor=4.0),
    "dynamic": c.DynamicNtkScaling(factor=2.0, original_max_seq_len=8),
    "qwen": c.QwenDynamicScaling(original_max_seq_len=8),
    "yarn": c.YarnScaling(factor=4.0, original_max_seq_len=8),
    "llama3": c.Llama3Scaling(factor=4.0, original_max_seq_len=8),
    "longrope": c.LongRopeScaling(
        short_factor=(1.0, 1.0, 1.5, 2.0), long_factor=(1.0, 2.0, 3.0, 4.0), factor=4.0, original_max_seq_len=8
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
@both
def test_rope_scaling_model_beyond_its_length_has_a_finite_loss(run: Run, name: str):
    cfg = decoder(block(attention=heads(head_dim=8, positions=c.Rotary(scaling=SCALINGS[name]))), max_seq_len=8)
    weights, ids = weights_of(cfg), tokens(1, 33)
    logits = run(cfg, weights, ids[:, :-1]).logits[0]
    chosen = np.take_along_axis(logits, ids[0, 1:, None], 1)[:, 0]
    peak = logits.max(axis=1)
    loss = (np.log(np.exp(logits - peak[:, None]).sum(axis=1)) + peak - chosen).mean()
    assert 0 < loss < 100
    unscaled = decoder(block(attention=heads(head_dim=8, positions=c.Rotary())), max_seq_len=8)
    assert deviation(run(unscaled, weights, ids[:, :-1]).logits[0], logits) > 1e-3, "the rule does something here"


def rotary_of(name: str) -> c.Rotary:
    positions = qkv.preset(name).decoder.layers[0].attention.positions
    assert isinstance(positions, c.Rotary)
    return positions
