"""Whole models in the engine against the oracle, and against themselves alone, in pieces, and on other threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import qkv
from parity.cases import CASES
from qkv import reference
from qkv.config import ModelConfig
from qkv.engine import Engine, Format, why_not
from qkv.engine.library import kernels
from qkv.engine.lower import Precision, lower
from qkv.errors import EngineError
from qkv.generate import Request, generate
from qkv.generate.runners.native import NativeRunner

from .slow import Slow

LENGTH = 64
MODELS = {config: name for name, config in [*((n, qkv.preset(n).toy()) for n in qkv.presets()), *CASES.items()]}
"""Each distinct toy model of the presets and of the members of the config tree."""
ABLE = {name: config for config, name in MODELS.items() if why_not(config) is None}
REFUSED = {name: config for config, name in MODELS.items() if why_not(config) is not None}
LENGTHS = (20, 13, 17)


def weights_of(config: ModelConfig) -> dict[str, np.ndarray]:
    return {name: w.astype(np.float32) for name, w in reference.random_weights(config, 1).items()}


def runner_of(config: ModelConfig, form: Format = "fp32", chunk: int = 512, **options: object) -> NativeRunner:
    engine = Engine(lower(config, weights_of(config), Precision.of(form), LENGTH), **options)
    return NativeRunner(config, engine, config.vocab_size, LENGTH, chunk)


def texts(config: ModelConfig, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, config.vocab_size, n).tolist() for n in lengths]


def test_most_decoders_of_the_tree_can_be_run() -> None:
    able = [name for name in qkv.presets() if why_not(qkv.preset(name)) is None]
    assert {"gpt-1", "gpt2", "llama-3.1-8b", "mistral-7b", "qwen2-7b", "bloom-176b", "palm-540b"} < set(able)
    assert {"chatglm3-6b", "gemma-3-270m", "smollm2-135m", "yi-34b"} < set(able)


@pytest.mark.parametrize("name", ABLE)
def test_logits_are_the_oracles(name: str) -> None:
    config = ABLE[name]
    rows = texts(config)
    exact = {key: w.astype(np.float64) for key, w in weights_of(config).items()}
    state = runner_of(config, threads=1, chunk=9).start(len(rows), 32)
    found = state.extend_all(rows)
    for row, logits in zip(rows, found, strict=True):
        expected = reference.forward(config, exact, np.array([row]))[0]
        assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-270m", "bloom-560m", "gpt2", "palm-540b", "mistral-7b"])
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounded_weights_give_what_their_program_says(name: str, form: Format, seed: int) -> None:
    """Against the same program in float64, whose products read rounded activations where the format's do.

    The two differ where float32 falls on the other side of the middle between two codes: less than what rounding itself
    changes, and far less than what a fault would.
    """
    config = qkv.preset(name).toy()
    weights = {key: w.astype(np.float32) for key, w in reference.random_weights(config, seed).items()}
    program = lower(config, weights, Precision.of(form), LENGTH)
    (row,) = texts(config, (20,))
    exact, plain = (Slow(program, row, rounded=rounded).result for rounded in (True, False))
    runner = NativeRunner(config, Engine(program, threads=1), config.vocab_size, LENGTH)
    found = runner.start(1, 32).extend_all([row])[0]
    apart = np.abs(found - exact).max() / np.abs(exact).max()
    rounding = np.abs(exact - plain).max() / np.abs(exact).max()
    assert apart <= (rounding if form != "bf16" else 1e-5)
    assert rounding < 0.2


@pytest.mark.parametrize("name", ABLE)
def test_the_program_in_float64_is_the_oracle(name: str) -> None:
    """So that what the rounded programs are held against is the model, too."""
    config, (row,) = ABLE[name], texts(ABLE[name], (12,))
    exact = {key: w.astype(np.float64) for key, w in weights_of(config).items()}
    expected = reference.forward(config, exact, np.array([row]))[0]
    found = Slow(lower(config, weights_of(config), Precision(), LENGTH), row, rounded=False).result
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()  # tables of positions are float32


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-270m", "bloom-560m", "gpt2", "palm-540b", "mistral-7b"])
@pytest.mark.parametrize("form", ["fp32", "int8", "int4"])
def test_a_text_is_bitwise_the_same_in_every_company_and_pace(name: str, form: Format) -> None:
    config = qkv.preset(name).toy()
    rows = texts(config)
    whole = runner_of(config, form, threads=1).start(3, 32).extend_all(rows)
    others = [runner_of(config, form, threads=3, chunk=5), runner_of(config, form, threads=1, kernels="portable")]
    for runner in others:
        for row, logits in zip(rows, whole, strict=True):
            assert np.array_equal(runner.start(1, 32).extend_all([row])[0], logits)
    slow = others[0].start(1, 32)
    assert np.array_equal(np.concatenate([slow.extend([[token]]) for token in rows[0]]), whole[0])


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-270m", "bloom-560m", "mistral-7b"])
@pytest.mark.parametrize("width", [16, 40, 64])
def test_tiles_of_queries_give_the_bits_of_single_ones(name: str, width: int) -> None:
    """Heads as wide as real ones, rows that fill several tiles and cut others short, windows that have turned over."""
    config = qkv.preset(name).toy().override({"decoder.layers.*.attention.head_dim": width, "max_seq_len": LENGTH})
    rows = texts(config, (53, 18, 35))
    exact = {key: w.astype(np.float64) for key, w in weights_of(config).items()}
    runner = runner_of(config, threads=1)
    whole = runner.start(3, LENGTH).extend_all(rows)
    for row, logits in zip(rows, whole, strict=True):
        expected = reference.forward(config, exact, np.array([row]))[0]
        assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
        single = runner.start(1, LENGTH)
        assert np.array_equal(np.concatenate([single.extend([[token]]) for token in row]), logits)
    for kernel in ("avx2", "portable"):
        if kernels(kernel):
            other = runner_of(config, threads=2, kernels=kernel).start(3, LENGTH).extend_all(rows)
            assert all(np.array_equal(one, two) for one, two in zip(whole, other, strict=True))


def test_windows_forget_and_take_back_as_without_a_cache() -> None:
    config = qkv.preset("mistral-7b").toy()
    (row,) = texts(config, (50,))
    runner = runner_of(config, threads=1)
    whole = runner.start(1, LENGTH).extend_all([row])[0]
    state = runner.start(1, LENGTH)
    state.extend([row[:45]])
    state.truncate([40])
    assert np.array_equal(state.extend([row[40:]])[0], whole[-1])
    fork = state.fork()
    state.select([0, 0])
    assert np.array_equal(state.extend([[1], [2]])[1], fork.extend([[2]])[0])


def test_generation_gives_the_tokens_of_torch() -> None:
    config = qkv.preset("llama-3-8b").toy()
    model = qkv.build(config, seed=3)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    runner = NativeRunner(
        config, Engine(lower(config, weights, Precision(), LENGTH), threads=1), config.vocab_size, LENGTH
    )
    requests = [Request(row, 12) for row in texts(config, (3, 8))]
    lm = qkv.TextModel(model)
    assert [g.tokens for g in generate(runner, requests)] == [g.tokens for g in generate(lm.runner, requests)]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(EngineError, match=r"engine: it .*; choose torch") as caught:
        lower(REFUSED[name], {}, Precision(), 8)
    assert "\n" not in str(caught.value)


def test_the_portable_kernels_are_always_there() -> None:
    assert kernels("portable") == "portable"
    assert kernels() in ("avx512", "avx2", "portable")
