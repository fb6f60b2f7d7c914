"""What a cache refuses: what, where and the remedy, in one line; and after that everything is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cache.models import CHANGING, EXACT, LAYOUTS, MODELS, case, deviations, even, model_of, read, weights_of, windowed
from parity.cases import attention, block, decoder, encoder
from parity.test_forward import float32_weights, model_with
from qkv import config as c
from qkv import reference
from qkv.cache.cache import Cache, Options
from qkv.cache.store import HostStore
from qkv.errors import CacheError, DataError, QkvError


def refused(call: Callable[[], Any], expected: str, error: type[QkvError] = CacheError) -> None:
    """It raises, and says exactly this, which is one line and gives a remedy."""
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    assert said.startswith(expected), said
    assert "\n" not in said
    assert ": " in said


def made(config: c.ModelConfig, batch: int = 1, **options: Any) -> Cache:
    return Cache(config, HostStore("float64"), batch, Options(**({"max_len": 10} | options)))


def looks(pattern: c.Pattern) -> c.ModelConfig:
    return decoder(block(attention=attention(pattern=pattern)), head=c.NoHead())


# Which models


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (encoder(c.NoHead()), "the model has no decoder: it reads its whole input at once"),
        (
            looks(c.Bidirectional()),
            "pattern 'bidirectional' lets earlier tokens look at later ones, which changes what was stored",
        ),
        (
            looks(c.Longformer(window=4)),
            "pattern 'longformer' lets earlier tokens look at later ones, which changes what was stored",
        ),
        (
            looks(c.AllOf(patterns=(c.Causal(), c.BigBird(block=2, random_blocks=1)))),
            "pattern 'all-of' depends on the length of the row, which grows with each token",
        ),
    ],
)
def test_models_whose_past_changes(config: c.ModelConfig, reason: str) -> None:
    refused(lambda: made(config), f"cache: not for this model: {reason}")


def test_a_cache_of_another_config() -> None:
    cache = made(decoder(n_layers=3))
    refused(
        lambda: _read("no-positions", cache), "cache: made for another config; make one with Cache.for_model(model)"
    )
    assert cache.lengths == [0]


# How it is made


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"max_len": 0},
            "cache: batch, max_len, page and pages must be 1 or more and slack 0 or more, got 1 rows, Options(",
        ),
        ({"slack": -1}, "cache: batch, max_len, page and pages must be 1 or more"),
        ({"page": 0}, "cache: batch, max_len, page and pages must be 1 or more"),
        ({"batch": 0}, "cache: batch, max_len, page and pages must be 1 or more"),
        ({"pages": 0}, "cache: batch, max_len, page and pages must be 1 or more"),
        ({"layout": "ring"}, "layout: 'ring' does not exist; choose auto or paged"),
        ({"codec": "int5"}, "codec: unknown 'int5'; choose one of raw, int8, int4"),
        (
            {"max_len": None},
            "max_len: decoder.layers.0.attention has no window and keeps every token; give a length",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], expected: str) -> None:
    refused(lambda: made(decoder(), **options), expected)


# What is read


def _read(name: str, cache: Cache, rows: int = 1, size: int = 2, **given: Any) -> Any:
    text, _ = case(name, "raw")
    with torch.no_grad():
        return model_of(name)(torch.from_numpy(text.tokens[:rows, :size]), cache=cache, **given)


def test_another_number_of_rows() -> None:
    expected = "tokens: 1 rows, but the cache has 2; use cache.select, or make another"
    refused(lambda: _read("no-positions", made(decoder(), 2)), expected)


@pytest.mark.parametrize("name", ["positions", "documents"])
def test_positions_and_documents_follow_from_the_cache(name: str) -> None:
    cache = made(decoder())
    expected = f"{name}: with a cache they follow from the tokens that it holds: leave them out"
    refused(lambda: _read("no-positions", cache, **{name: torch.zeros(1, 2, dtype=torch.long)}), expected)
    assert cache.lengths == [0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_cache_goes_on_after_it_was_taken_back(layout: str) -> None:
    name = "no-positions"
    text, truth = case(name, "raw")
    model = model_of(name)
    cache = Cache.for_model(model, 2, 10, **LAYOUTS[layout])
    assert deviations(read(model, cache, text, even([8], 2)), truth) < EXACT
    expected = "cache: 11 tokens do not fit a max_len of 10; make a cache with more"
    refused(lambda: _read(name, cache, 2, 3), expected)
    assert cache.lengths == [8, 8]
    pieces = [(np.tile([8, 9], (2, 1)), None)]
    assert deviations(read(model, cache, text, iter(pieces)), truth) < EXACT
    refused(lambda: _read(name, cache, 2, 1), expected)
    cache.truncate(9)
    pieces = [(np.tile([9], (2, 1)), None)]
    assert deviations(read(model, cache, text, iter(pieces)), truth) < EXACT


def test_a_source_is_given_once_and_with_the_first() -> None:
    name = "encoder-decoder"
    text, truth = case(name, "raw")
    model = model_of(name)
    cache = Cache.for_model(model, 2, 12)
    refused(lambda: _read(name, cache, 2), "source: this model needs source= (B, S)", DataError)
    assert deviations(read(model, cache, text, even([3], 2)), truth) < EXACT
    expected = "source: the cache holds one already: leave it out"
    refused(lambda: _read(name, cache, 2, **text.first()), expected, DataError)
    expected = "source: the cache holds one already; leave it out after the first call"
    refused(lambda: cache.take_source(np.zeros((2, 3), np.int64)), expected)
    pieces = [(np.tile([3, 4], (2, 1)), None)]
    assert deviations(read(model, cache, text, iter(pieces)), truth) < EXACT


def test_a_prefix_comes_at_once() -> None:
    name = "prefix"
    text, truth = case(name, "raw")
    model = model_of(name)
    cache = Cache.for_model(model, 2, 20)
    expected = (
        "prefix_length: 3 in row 0, but the first call brings 2 tokens; give the whole prefix at once, since its "
        "tokens see each other"
    )
    refused(lambda: _read(name, cache, 2, 2, **text.first()), expected)
    refused(lambda: _read(name, cache, 2), "prefix_length: this model needs prefix_length= (B,)", DataError)
    assert deviations(read(model, cache, text, even([3], 2)), truth) < EXACT
    expected = "prefix_length: given anew, but the cache began with another; leave it out after the first call"
    refused(lambda: _read(name, cache, 2, prefix_length=torch.tensor([2, 2])), expected)
    pieces = [(np.tile([3, 4], (2, 1)), None)]
    assert deviations(read(model, cache, text, iter(pieces)), truth) < EXACT


def test_in_canonical_order_a_window_takes_its_slack_and_one() -> None:
    cache = made(windowed(4), max_len=500, canonical=True)
    cache.commit(cache.begin(61))
    expected = (
        "cache: a chunk of 62 tokens, but in canonical order a window with slack 60 takes 61; give smaller chunks, or "
        "a cache with slack=61 or more"
    )
    refused(lambda: cache.begin(62), expected)
    assert cache.lengths == [61]


def test_positions_that_were_never_learned() -> None:
    """The table has 32 rows: refused before anything is computed, and shorter calls go on."""
    name = "window-learned"
    text = np.random.default_rng(0).integers(0, 61, (1, 40))
    model = model_of(name)
    cache = Cache.for_model(model, 1, None)
    truth = reference.run(MODELS[name], weights_of(name), text[:, :32])

    def call(start: int, end: int) -> Any:
        return model(torch.from_numpy(text[:, start:end]), cache=cache)

    call(0, 30)
    expected = "positions: 33 tokens, but the model has learned 32; shorten the input"
    refused(lambda: call(30, 33), expected, DataError)
    found = call(30, 32).logits
    assert np.abs(found.numpy() - truth.logits[:, 30:]).max() < EXACT
    refused(lambda: call(32, 33), expected, DataError)


# Angles that change with the length


@pytest.mark.parametrize("name", CHANGING)
def test_angles_that_change_are_exact_before_and_refused_beyond(name: str) -> None:
    """Also after rows were cut: what is stored was turned for the longer row."""
    trained = CHANGING[name]
    config, weights, model = MODELS[name], weights_of(name), model_of(name)
    tokens = np.random.default_rng(0).integers(0, 61, (1, 12))

    def call(cache: Cache, start: int, end: int) -> np.ndarray:
        return model(torch.from_numpy(tokens[:, start:end]), cache=cache).logits.numpy()

    def truth(length: int) -> np.ndarray:
        return reference.forward(config, weights, tokens[:, :length])

    cache = Cache.for_model(model, 1, 12)
    for start in range(trained):
        assert np.abs(call(cache, start, start + 1) - truth(start + 1)[:, -1:]).max() < EXACT
    kind = config.decoder.layers[0].attention.positions.scaling.kind
    expected = f"cache: {kind!r} turns a row of {trained + 1} tokens otherwise than what is stored of row 0"
    refused(lambda: call(cache, trained, trained + 1), expected)
    assert cache.lengths == [trained]

    cache = Cache.for_model(model, 1, 12)
    assert np.abs(call(cache, 0, trained + 3) - truth(trained + 3)).max() < EXACT
    if name == "rotary-dynamic-ntk":
        refused(lambda: call(cache, trained + 3, trained + 4), "cache: 'dynamic-ntk' turns a row of 9 tokens")
    else:
        found = call(cache, trained + 3, trained + 4)
        assert np.abs(found - truth(trained + 4)[:, -1:]).max() < EXACT
    cache.truncate(2)
    refused(lambda: call(cache, 2, 3), f"cache: {kind!r} turns a row of 3 tokens otherwise than what is stored")
    cache.truncate(0)
    assert np.abs(call(cache, 0, 3) - truth(3)).max() < EXACT


def test_a_row_that_waits_keeps_its_angles() -> None:
    """Another row's tokens do not make a cut row's stored keys right."""
    config = MODELS["rotary-dynamic-ntk"]
    model = model_with(config, float32_weights(config), torch.float64)
    cache = Cache.for_model(model, 2, 20)
    tokens = torch.arange(16).reshape(2, 8)
    model(tokens, cache=cache)
    cache.truncate([2, 0])
    model(tokens[:, :2], cache=cache, valid=torch.tensor([[False, False], [True, True]]))
    refused(
        lambda: model(tokens[:, 2:3], cache=cache), "cache: 'dynamic-ntk' turns a row of 3 tokens otherwise than what"
    )


# What is cut and chosen


def test_cuts_and_choices_that_cannot_be() -> None:
    cache = made(decoder(), 2)
    cache.commit(cache.begin(4))
    for lengths in ([5, 4], [-1, 2], 5):
        shown = [5, 5] if lengths == 5 else lengths
        expected = f"truncate: lengths must be between 0 and [4, 4], got {shown}"
        refused(lambda lengths=lengths: cache.truncate(lengths), expected)
    for lengths in ([1], [1, 2, 3]):
        expected = f"truncate: give one length, or one for each of 2 rows, not {lengths}"
        refused(lambda lengths=lengths: cache.truncate(lengths), expected)
    for rows in ([], [2], [0, -1]):
        expected = f"select: rows must be one or more of 0 to 1, got {rows}"
        refused(lambda rows=rows: cache.select(rows), expected)
    assert cache.lengths == [4, 4]
