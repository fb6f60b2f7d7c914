"""The torch runner against the model without a cache, on every toy model that generates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

import qkv
from parity.cases import CASES
from qkv.cache.spec import why_not
from qkv.config import ModelConfig
from qkv.errors import CacheError, GenerationError
from qkv.generate import Request, generate
from qkv.generate.runners.torch import Runtime, TorchRunner
from qkv.plan import kv_cache_bytes

ABLE = {
    name: config
    for name, config in CASES.items()
    if config.decoder is not None and config.head.reads == "past" and why_not(config) is None
}
DYNAMIC = ("rotary-dynamic-ntk", "rotary-qwen-dynamic", "rotary-longrope")

every_case = pytest.mark.parametrize("name", ABLE)


def random_rows(config: ModelConfig, lengths: Sequence[int], seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, config.vocab_size, n).tolist() for n in lengths]


def sources_of(config: ModelConfig, batch: int) -> list[list[int]] | None:
    return None if config.encoder is None else random_rows(config, [3 + 4 * row for row in range(batch)], 9)


def uncached(model: torch.nn.Module, text: Sequence[int], source: Sequence[int] | None, prefix: int) -> np.ndarray:
    """Logits after every token of the text, read whole, in float64."""
    given = {} if source is None else {"source": torch.tensor([source])}
    if any("prefix_length" in b.attention.pattern.fields for b in model.config.decoder.blocks):
        given["prefix_length"] = torch.tensor([prefix])
    with torch.inference_mode():
        logits: npt.NDArray[np.float64] = model(torch.tensor([text]), **given).logits[0].numpy()
    return logits


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@every_case
@pytest.mark.parametrize("runtime", [Runtime(deterministic=False, chunk=4), Runtime(chunk=5, layout="paged")])
def test_each_step_gives_the_logits_of_the_whole_text(name: str, runtime: Runtime) -> None:
    config = ABLE[name]
    model = qkv.build(config, seed=3).double()
    lengths, steps = [1, 9, 5], 4
    prompts, more = random_rows(config, lengths, 0), random_rows(config, [steps] * 3, 1)
    sources = sources_of(config, 3)
    state = TorchRunner(model, config.vocab_size, runtime).start(3, 16, sources=sources)
    found = [state.extend(prompts)] + [state.extend([[row[t]] for row in more]) for t in range(steps)]
    for row in range(3):
        for step in range(steps + 1):
            text = [*prompts[row], *more[row][:step]]
            source = None if sources is None else sources[row]
            expected = uncached(model, text, source, len(prompts[row]))[-1]
            # The runner's logits are float32, whose unit is 6e-8.
            assert deviation(found[step][row], expected) < 1e-6, (row, step)


@every_case
def test_logits_after_every_token_and_taking_back(name: str) -> None:
    """What speculative decoding does: read several tokens, look at all of their logits, take some back."""
    config = ABLE[name]
    model = qkv.build(config, seed=3).double()
    prompts, drafts = random_rows(config, [6, 2], 0), random_rows(config, [4, 3], 1)
    sources = sources_of(config, 2)
    state = TorchRunner(model, config.vocab_size, Runtime(deterministic=False)).start(2, 16, sources=sources, slack=4)
    state.extend(prompts)
    found = state.extend_all(drafts)
    state.truncate([7, 2])
    after = state.extend([[5], [6]])
    for row, kept in enumerate((1, 0)):
        source = None if sources is None else sources[row]
        for n in range(1, len(drafts[row]) + 1):
            text = [*prompts[row], *drafts[row][:n]]
            assert deviation(found[row][n - 1], uncached(model, text, source, len(prompts[row]))[-1]) < 1e-6
        text = [*prompts[row], *drafts[row][:kept], (5, 6)[row]]
        assert deviation(after[row], uncached(model, text, source, len(prompts[row]))[-1]) < 1e-6


@pytest.mark.parametrize(
    "name", [name if index % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for index, name in enumerate(ABLE)]
)
def test_a_row_is_bitwise_the_row_alone(name: str) -> None:
    """Batches of 1 to 8, lengths 1 to 64, whole prompts against chunks: the same bits."""
    config = ABLE[name]
    model = qkv.build(config, seed=3)
    room = TorchRunner(model, config.vocab_size).max_length
    longest = 64 if room is None else room - 3
    random = np.random.default_rng(7)
    lengths = [1, longest, *random.integers(1, longest + 1, 6).tolist()]
    prompts, more = random_rows(config, lengths, 0), random_rows(config, [3] * 8, 1)
    sources = sources_of(config, 8)

    @cache
    def runner(chunk: int) -> TorchRunner:
        return TorchRunner(model, config.vocab_size, Runtime(deterministic=True, chunk=chunk))

    def run(rows: Sequence[int], chunk: int) -> np.ndarray:
        asked = None if sources is None else [sources[row] for row in rows]
        state = runner(chunk).start(len(rows), longest + 3, sources=asked)
        steps = [state.extend([prompts[row] for row in rows])]
        steps += [state.extend([[more[row][t]] for row in rows]) for t in range(3)]
        return np.stack(steps, 1)

    alone = np.concatenate([run([row], 512) for row in range(8)])
    for batch, chunk in ((8, 512), (8, 1 if longest < 40 else 17), (3, 5), (5, 64)):
        assert (run(range(batch), chunk) == alone[:batch]).all(), (batch, chunk)


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_angles_are_those_of_the_whole_text(name: str) -> None:
    """Past the trained length every stored key would be wrong: the text is read again, and drafts change nothing."""
    config = ABLE[name]
    model = qkv.build(config, seed=3)
    runner = TorchRunner(model, config.vocab_size, Runtime(deterministic=False))
    prompt = random_rows(config, [4], 2)[0]
    done = generate(runner, [Request(prompt, 12)])[0]
    text = list(prompt)
    for _ in range(12):
        with torch.inference_mode():
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert done.tokens == text[len(prompt) :]


def test_a_prompt_beyond_the_learned_positions_is_refused_with_the_numbers() -> None:
    config = CASES["learned"]
    model = qkv.build(config, seed=0)
    runner = TorchRunner(model, config.vocab_size)
    limit = config.max_seq_len
    assert runner.max_length == limit
    with pytest.raises(GenerationError, match=rf"{limit + 1} tokens, but the model has {limit} positions"):
        generate(runner, [Request([1] * (limit + 1), 1)])
    with pytest.warns(UserWarning, match=f"max_new_tokens: 3 in place of 10, since the model has {limit} positions"):
        assert len(generate(runner, [Request([1] * (limit - 3), 10)])[0].tokens) == 3


def test_a_model_of_windows_runs_past_them_in_constant_memory() -> None:
    config = CASES["sliding-window"]
    runner = TorchRunner(qkv.build(config, seed=0), config.vocab_size, Runtime(deterministic=False))
    state = runner.start(1, 10_000)
    sizes = set()
    for _ in range(30):
        state.extend([[1, 2, 3]])
        sizes.add(state.nbytes)
    assert sizes == {state.nbytes}
    assert state.nbytes == kv_cache_bytes(config, 10_000, bytes_per_element=4)


def test_taking_back_more_than_the_slack_is_refused_and_changes_nothing() -> None:
    config = CASES["sliding-window"]
    runner = TorchRunner(qkv.build(config, seed=0), config.vocab_size, Runtime(deterministic=False))
    state = runner.start(1, 200, slack=2)
    state.extend([list(range(40))])
    with pytest.raises(CacheError, match="slack"):
        state.truncate([30])
    assert state.lengths == [40]
    state.truncate([38])
    assert state.lengths == [38]


def test_models_that_cannot_generate_say_why() -> None:
    encoder = next(config for config in CASES.values() if config.decoder is None)
    with pytest.raises(GenerationError, match="needs a decoder with a language-model head"):
        TorchRunner(qkv.build(encoder), 10)
    both = CASES["encoder-decoder"]
    with pytest.raises(GenerationError, match="needs a source"):
        TorchRunner(qkv.build(both), both.vocab_size).start(1, 8)


def test_rows_that_only_pad_the_table_are_never_drawn() -> None:
    config = CASES["rotary-halves"]
    state = TorchRunner(qkv.build(config, seed=0), 10).start(1, 8)
    logits = state.extend([[1, 2]])
    assert np.isneginf(logits[0, 10:]).all()
    assert np.isfinite(logits[0, :10]).all()


@pytest.mark.parametrize("name", DYNAMIC)
def test_b50_a_long_text_does_not_change_a_short_one_after_it(name: str) -> None:
    config = ABLE[name]
    runner = TorchRunner(qkv.build(config, seed=3), config.vocab_size)
    short, long = random_rows(config, [3, 14], 5)
    first, _, third = (generate(runner, [Request(text, 2)])[0].tokens for text in (short, long, short))
    assert first == third
