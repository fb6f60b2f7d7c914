"""Bugs of other implementations that concern caches, each as small as it can be, by their numbers in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from cache.models import CODECS, EXACT, gemma, text_for, windowed
from parity.cases import attention, block, decoder, encoder_decoder
from parity.test_forward import float32_weights, model_with
from qkv import config as c
from qkv import reference
from qkv.cache.cache import Cache
from qkv.cache.pages import Pages
from qkv.errors import DataError
from qkv.nn import Transformer

LONG = {"max_seq_len": 64}
PAGED: dict[str, Any] = {"layout": "paged", "page": 4}
LAYOUTS = pytest.mark.parametrize("layout", [{}, PAGED], ids=["auto", "paged"])


class Pair:
    """A model and its oracle."""

    def __init__(self, config: c.ModelConfig) -> None:
        self.config, self.weights = config, float32_weights(config)
        self.model: Transformer = model_with(config, self.weights, torch.float64)

    def truth(self, tokens: Sequence[int] | np.ndarray, codec: str = "raw", **given: Any) -> np.ndarray:
        """Logits (T, V) of one row, read at once."""
        return reference.forward(self.config, self.weights, np.asarray(tokens)[None], codec=codec, **given)[0]

    def read(self, cache: Cache, tokens: np.ndarray, **given: torch.Tensor) -> np.ndarray:
        """Logits (B, T, V)."""
        logits: np.ndarray = self.model(torch.from_numpy(tokens), cache=cache, **given).logits.numpy()
        return logits

    def reads_in(self, sizes: Sequence[int], batch: int = 1, codec: str = "raw", **options: Any) -> None:
        """A random text in pieces of these sizes equals the text at once."""
        tokens = np.random.default_rng(len(sizes)).integers(0, self.config.vocab_size, (batch, sum(sizes)))
        cache = Cache.for_model(self.model, batch, sum(sizes), codec, **options)
        borders = np.cumsum([0, *sizes])
        found = [self.read(cache, tokens[:, a:b]) for a, b in pairwise(borders)]
        same(np.concatenate(found, 1), np.stack([self.truth(row, codec) for row in tokens]))


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < EXACT * np.abs(expected).max()


def rope(**changes: Any) -> c.ModelConfig:
    return decoder(block(attention=attention(positions=c.Rotary(theta=100.0), **changes)), **LONG)


def greedy(pair: Pair, cache: Cache, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Prompts padded on the left, then `new` tokens of each, the most probable ones."""
    width = max(map(len, prompts))
    tokens = np.array([[*[0] * (width - len(row)), *row] for row in prompts])
    valid = torch.tensor([[i >= width - len(row) for i in range(width)] for row in prompts])
    found = [pair.read(cache, tokens, valid=valid)[:, -1].argmax(-1)]
    for _ in range(new - 1):
        found.append(pair.read(cache, found[-1][:, None])[:, -1].argmax(-1))
    result: list[list[int]] = np.stack(found, 1).tolist()
    return result


def greedy_alone(pair: Pair, prompt: list[int], new: int) -> list[int]:
    """By the oracle."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(pair.truth(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@LAYOUTS
def test_b02_a_continuation_does_not_depend_on_its_batch_mates(layout: dict[str, Any]) -> None:
    """A prompt alone, and with three longer ones."""
    pair, rng = Pair(rope()), np.random.default_rng(0)
    prompts = [rng.integers(0, 61, n).tolist() for n in (4, 7, 9, 6)]
    found = greedy(pair, Cache.for_model(pair.model, 4, 32, **layout), prompts, 6)
    assert found == [greedy_alone(pair, prompt, 6) for prompt in prompts]


@LAYOUTS
def test_b03_positions_belong_to_the_row_in_a_cache_too(layout: dict[str, Any]) -> None:
    """Prompts of 5 and 9 tokens, then steps that both take."""
    pair = Pair(rope())
    tokens = np.random.default_rng(0).integers(0, 61, (2, 12))
    cache = Cache.for_model(pair.model, 2, 20, **layout)
    valid = torch.arange(9)[None] < torch.tensor([[5], [9]])
    pair.read(cache, tokens[:, :9], valid=valid)
    new = np.stack([tokens[0, 5:8], tokens[1, 9:12]])
    found = np.concatenate([pair.read(cache, new[:, i : i + 1]) for i in range(3)], 1)
    same(found[0], pair.truth(tokens[0, :8])[5:])
    same(found[1], pair.truth(tokens[1])[9:])


@LAYOUTS
def test_b06_a_window_is_a_window_in_the_cache(layout: dict[str, Any]) -> None:
    """A window of 4, and 20 tokens one by one."""
    Pair(windowed(4, positions=c.Rotary())).reads_in([1] * 20, **layout)


@LAYOUTS
@pytest.mark.parametrize(("prompt", "new"), [(20, 10), (15, 3)])
def test_b07_a_prompt_may_end_near_the_window_or_beyond_it(layout: dict[str, Any], prompt: int, new: int) -> None:
    Pair(windowed(16, positions=c.Rotary())).reads_in([prompt, *[1] * new], **layout)


@LAYOUTS
def test_b12_the_same_prompt_from_a_kept_cache_gives_the_same_four_times(layout: dict[str, Any]) -> None:
    """40 tokens, layers with windows and without; every request goes on from a fork."""
    pair = Pair(gemma().override({"max_seq_len": 64}))
    prompt = np.random.default_rng(0).integers(0, 61, (1, 40))
    kept = Cache.for_model(pair.model, 1, 50, **layout)
    new = [int(pair.read(kept, prompt)[0, -1].argmax())]
    expected = greedy_alone(pair, prompt[0].tolist(), 5)
    for _ in range(4):
        request, answer = kept.fork(), list(new)
        while len(answer) < 5:
            answer.append(int(pair.read(request, np.array([answer[-1:]]))[0, -1].argmax()))
        assert answer == expected


@LAYOUTS
def test_b13_what_comes_from_a_kept_prefix_is_what_comes_without(layout: dict[str, Any]) -> None:
    """Twice the same prompt, then its beginning with another ending; windows take back what their slack holds."""
    pair = Pair(gemma())
    tokens = np.random.default_rng(0).integers(0, 61, (2, 14))
    tokens[1, :10] = tokens[0, :10]
    kept = Cache.for_model(pair.model, 1, 20, slack=4, **layout)
    same(pair.read(kept, tokens[:1])[0], pair.truth(tokens[0]))
    for row in (0, 1):
        request = kept.fork()
        request.truncate(10)
        same(pair.read(request, tokens[row : row + 1, 10:])[0], pair.truth(tokens[row])[10:])


def test_b14_pages_of_interleaved_requests_are_read_by_their_tables() -> None:
    """Three requests that take their pages in turns, then a fourth that shares the prefix of the second."""
    pair = Pair(rope())
    tokens = np.random.default_rng(0).integers(0, 61, (3, 16))
    cache = Cache.for_model(pair.model, 3, 20, layout="paged", page=2)
    for start in range(0, 12, 2):
        pair.read(cache, tokens[:, start : start + 2])
    group = cache.groups[0]
    assert isinstance(group, Pages)
    assert [group.tables[1][n] for n in range(6)] == [1, 4, 7, 10, 13, 16]
    fourth = cache.fork()
    fourth.select([1])
    fourth.truncate(7)
    new = np.random.default_rng(1).integers(0, 61, (1, 5))
    text = np.concatenate([tokens[1, :7], new[0]])
    found = [pair.read(fourth, new[:, :2]), pair.read(cache, tokens[:, 12:13]), pair.read(fourth, new[:, 2:])]
    same(np.concatenate([found[0], found[2]], 1)[0], pair.truth(text)[7:])
    same(found[1][:, 0], np.stack([pair.truth(row[:13])[-1] for row in tokens]))


@pytest.mark.parametrize("codec", CODECS)
@LAYOUTS
def test_b16_beams_take_their_cache_along(codec: str, layout: dict[str, Any]) -> None:
    """3 beams, 6 steps, each from a random parent; layers with windows and without."""
    pair, rng = Pair(gemma()), np.random.default_rng(0)
    prompt = rng.integers(0, 61, (1, 5))
    cache = Cache.for_model(pair.model, 1, 16, codec, **layout)
    pair.read(cache, prompt)
    cache.select([0, 0, 0])
    beams = [prompt[0].tolist() for _ in range(3)]
    for _ in range(6):
        new = rng.integers(0, 61, (3, 1))
        beams = [[*beam, int(token)] for beam, token in zip(beams, new[:, 0], strict=True)]
        found = pair.read(cache, new)[:, 0]
        same(found, np.stack([pair.truth(beam, codec)[-1] for beam in beams]))
        parents = rng.integers(0, 3, 3).tolist()
        cache.select(parents)
        beams = [beams[parent] for parent in parents]


@LAYOUTS
def test_b17_the_source_goes_along_when_a_row_ends_as_another_splits(layout: dict[str, Any]) -> None:
    """Two rows before and after, but the first is gone and the second is there twice."""
    pair = Pair(encoder_decoder())
    text = text_for(pair.config, 8)
    assert text.source is not None
    assert text.source_valid is not None
    cache = Cache.for_model(pair.model, 2, 12, **layout)
    pair.read(cache, text.tokens[:, :5], **text.first())
    cache.select([1, 1])
    new = np.array([[3, 4, 5], [6, 7, 8]])
    found = pair.read(cache, new)
    for row in range(2):
        source = {"source": text.source[1:], "source_valid": text.source_valid[1:]}
        same(found[row], pair.truth([*text.tokens[1, :5], *new[row]], **source)[5:])


@LAYOUTS
def test_b18_padding_the_source_further_changes_nothing_that_is_stored(layout: dict[str, Any]) -> None:
    """8 tokens padded to 10 and to 30."""
    pair, rng = Pair(encoder_decoder()), np.random.default_rng(0)
    source, tokens = rng.integers(0, 61, 8), rng.integers(0, 61, (1, 6))
    expected = pair.truth(tokens[0], source=source[None])
    for width in (10, 30):
        given = {
            "source": torch.from_numpy(np.concatenate([source, np.zeros(width - 8, np.int64)]))[None],
            "source_valid": torch.arange(width)[None] < 8,
        }
        cache = Cache.for_model(pair.model, 1, 12, **layout)
        found = [pair.read(cache, tokens[:, :1], **given)]
        found += [pair.read(cache, tokens[:, i : i + 1]) for i in range(1, 6)]
        same(np.concatenate(found, 1)[0], expected)


@LAYOUTS
def test_b19_alibi_of_two_queries_among_twenty_keys(layout: dict[str, Any]) -> None:
    Pair(decoder(block(attention=attention(positions=c.Alibi())), **LONG)).reads_in([18, 2], **layout)


@LAYOUTS
@pytest.mark.parametrize("values", [False, True])
def test_b22_shaw_step_by_step_and_several_at_once(layout: dict[str, Any], values: bool) -> None:
    """Distances clipped at 4: one token, then three, after a prompt longer than that."""
    pair = Pair(decoder(block(attention=attention(positions=c.Shaw(max_distance=4, values=values)))))
    pair.reads_in([6, 1, 3], **layout)


@LAYOUTS
def test_b23_transformer_xl_memories_stand_before_the_segment(layout: dict[str, Any]) -> None:
    """8 remembered and 8 new, in one layer, where a memory is exactly what the whole text gives."""
    Pair(decoder(block(attention=attention(positions=c.TransformerXL())), n_layers=1)).reads_in([8, 8], **layout)


@LAYOUTS
@pytest.mark.parametrize(("prompt", "new"), [(33, 0), (30, 3)])
def test_b24_tokens_beyond_the_learned_positions_are_refused_in_a_cache(
    layout: dict[str, Any], prompt: int, new: int
) -> None:
    """32 positions: a prompt of 33, and 30 with 3 more; nothing is stored of what was refused."""
    pair = Pair(decoder(embedding=c.Embedding(positions=c.Learned())))
    tokens = np.arange(33)[None]
    cache = Cache.for_model(pair.model, 1, 40, **layout)
    if new:
        pair.read(cache, tokens[:, :prompt])
    with pytest.raises(DataError, match="positions: 33 tokens, but the model has learned 32; shorten the input"):
        pair.read(cache, tokens[:, prompt if new else 0 :])
    assert cache.lengths == [prompt if new else 0]
    found = pair.read(cache, tokens[:, cache.lengths[0] : 32])
    same(found[0], pair.truth(tokens[0, :32])[-found.shape[1] :])


@LAYOUTS
def test_b25_a_prompt_longer_than_the_window_of_some_layers(layout: dict[str, Any]) -> None:
    """A window of 8 in every other layer, 40 places, a prompt of 20."""
    layers = (
        block(attention=attention(pattern=c.SlidingWindow(window=8), positions=c.Rotary(theta=100.0))),
        block(attention=attention(positions=c.Rotary(theta=1000.0))),
    )
    Pair(decoder(*layers, n_layers=4, **LONG)).reads_in([20, *[1] * 5], **layout)


@LAYOUTS
@pytest.mark.parametrize("config", [rope(), windowed(4, positions=c.Rotary()), gemma()], ids=["full", "window", "mix"])
def test_b27_a_prompt_in_two_pieces_is_the_prompt(layout: dict[str, Any], config: c.ModelConfig) -> None:
    """8 as 3 + 5."""
    Pair(config).reads_in([3, 5], **layout)


@LAYOUTS
def test_b32_the_newest_query_sees_the_last_keys_of_the_cache(layout: dict[str, Any]) -> None:
    """A window of 4, 6 keys, one query, one layer: keys 2 to 5 matter, 0 and 1 do not."""
    pair = Pair(windowed(4, n_layers=1, positions=c.Rotary()))

    def last(changed: int | None) -> np.ndarray:
        tokens = np.arange(6)[None].copy()
        if changed is not None:
            tokens[0, changed] = 50
        cache = Cache.for_model(pair.model, 1, 10, **layout)
        for start, end in ((0, 3), (3, 5), (5, 6)):
            found = pair.read(cache, tokens[:, start:end])
        return found[0, -1]

    differ = [bool(np.abs(last(changed) - last(None)).max() > 1e-6) for changed in range(6)]
    assert differ == [False, False, True, True, True, True]
