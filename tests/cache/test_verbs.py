"""truncate, select, fork and abort: a model goes on as if it had read only what is left, to the last digit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cache.models import (
    CODECS,
    EXACT,
    EXTRA,
    LAYOUTS,
    MODELS,
    Text,
    deviations,
    model_of,
    read,
    text_for,
    weights_of,
)
from qkv import reference
from qkv.cache.cache import Cache
from qkv.errors import CacheError

NAMES = ("gemma", "window-latent", "window-sinks-of-attention", "longformer-in-causal", "encoder-decoder-window")
KEPT = ("auto", "page-3", "page-4")
WAYS = [(name, codec, KEPT[(n + m) % 3]) for n, name in enumerate(NAMES) for m, codec in enumerate(CODECS)]
every_way = pytest.mark.parametrize(("name", "codec", "layout"), WAYS)


def cache_for(name: str, codec: str, layout: str, slack: int = 0, batch: int = 2) -> Cache:
    return Cache.for_model(model_of(name), batch, 24, codec, slack=slack, **LAYOUTS[layout])


def oracle(name: str, text: Text, codec: str) -> reference.Output:
    return text.oracle(MODELS[name], weights_of(name), codec)


def spliced(first: Text, kept: list[int], second: Text) -> Text:
    """The first tokens of one text, then the other's; the source is the first's."""

    def join(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
        if a is None or b is None:
            return None
        return np.stack([np.concatenate((x[:n], y))[: a.shape[1]] for x, y, n in zip(a, b, kept, strict=True)])

    tokens, marks = join(first.tokens, second.tokens), join(first.globals, second.globals)
    assert tokens is not None
    return Text(tokens, marks, first.prefix, first.source, first.source_valid)


def rows_of(text: Text, rows: list[int]) -> Text:
    """The same rows, chosen anew."""
    fields = (text.tokens, text.globals, text.prefix, text.source, text.source_valid)
    return Text(*(None if field is None else field[rows] for field in fields))


def go_on(cache: Cache, name: str, text: Text, sizes: list[int]) -> Any:
    """Read the text from where each row stands, in pieces."""
    index = np.asarray(cache.lengths)[:, None]
    pieces = []
    for size in sizes:
        pieces.append((index + np.arange(size), None))
        index = index + size
    return read(model_of(name), cache, text, iter(pieces))


def run(cache: Cache, name: str, text: Text, sizes: list[int]) -> None:
    """Read, and look at nothing."""
    for _ in go_on(cache, name, text, sizes):
        pass


@every_way
def test_truncated_rows_go_on_as_if_they_had_read_no_more(name: str, codec: str, layout: str) -> None:
    """Each row to a length of its own, within slack, twice; then other tokens."""
    first, second = text_for(MODELS[name], 14, seed=1), text_for(MODELS[name], 14, seed=2)
    cache = cache_for(name, codec, layout, slack=4)
    run(cache, name, first, [6, 5, 1])
    cache.truncate([9, 8])
    text = spliced(first, [9, 8], second)
    run(cache, name, text, [2])
    cache.truncate([9, 10])
    text = spliced(text, [9, 10], text_for(MODELS[name], 14, seed=3))
    assert deviations(go_on(cache, name, text, [1, 3]), oracle(name, text, codec)) < EXACT


@every_way
def test_selected_rows_go_on_as_those_rows(name: str, codec: str, layout: str) -> None:
    """Reordered, repeated, dropped; the source of an encoder-decoder goes along (B17)."""
    first = text_for(MODELS[name], 13, batch=3, seed=1)
    cache = cache_for(name, codec, layout, batch=3)
    run(cache, name, first, [5, 1, 1])
    rows = [2, 0, 0, 1, 2]
    cache.select(rows)
    text = spliced(rows_of(first, rows), [7] * 5, text_for(MODELS[name], 13, batch=5, seed=2))
    expected = oracle(name, text, codec)
    assert deviations(go_on(cache, name, text, [1, 1]), expected) < EXACT
    cache.select([3, 1])
    assert cache.batch == 2
    text, expected = rows_of(text, [3, 1]), oracle(name, rows_of(text, [3, 1]), codec)
    assert deviations(go_on(cache, name, text, [1, 2]), expected) < EXACT


@every_way
def test_forks_know_nothing_of_each_other(name: str, codec: str, layout: str) -> None:
    """Both go on, in turns, with other tokens; a fork of a fork, too."""
    first = text_for(MODELS[name], 16, seed=1)
    cache = cache_for(name, codec, layout, slack=2)
    run(cache, name, first, [6, 1])
    forks = [cache, cache.fork()]
    forks.append(forks[1].fork())
    texts = [spliced(first, [7, 7], text_for(MODELS[name], 16, seed=seed)) for seed in (2, 3, 4)]
    expected = [oracle(name, text, codec) for text in texts]
    for sizes in ([1], [2, 1], [3]):
        for one, text, truth in zip(forks, texts, expected, strict=True):
            assert deviations(go_on(one, name, text, sizes), truth) < EXACT
    forks[1].truncate(12)
    forks[2].select([1, 0])
    assert deviations(go_on(forks[0], name, texts[0], [1]), expected[0]) < EXACT
    assert deviations(go_on(forks[1], name, texts[1], [1, 1]), expected[1]) < EXACT
    turned = rows_of(texts[2], [1, 0])
    assert deviations(go_on(forks[2], name, turned, [1]), oracle(name, turned, codec)) < EXACT


class Broken(torch.nn.Module):
    """Raises instead of computing."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, *given: Any) -> None:
        raise self.error("broken")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@every_way
def test_a_step_that_fails_leaves_the_cache_as_it_was(
    name: str, codec: str, layout: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last layer, when the others have stored: in a first call, a short one, and one beyond the window."""
    model = model_of(name)
    assert model.decoder is not None
    last = model.decoder.layers[-1]
    text = text_for(MODELS[name], 20)
    expected = oracle(name, text, codec)
    cache = cache_for(name, codec, layout)

    def fail(size: int) -> None:
        with monkeypatch.context() as patch:
            patch.setitem(last._modules, "ffn", Broken(error))
            with pytest.raises(error, match="broken"):
                run(cache, name, text, [size])

    fail(6)
    assert cache.lengths == [0, 0]
    assert deviations(go_on(cache, name, text, [3, 4]), expected) < EXACT
    for size in (1, 9):
        before = cache.lengths
        fail(size)
        assert cache.lengths == before
        assert deviations(go_on(cache, name, text, [1]), expected) < EXACT
    fail(2)
    assert deviations(go_on(cache, name, text, [9, 1]), expected) < EXACT


def test_a_failing_encoder_leaves_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    name, text = "encoder-decoder", text_for(MODELS["encoder-decoder"], 6)
    model, cache = model_of(name), cache_for(name, "raw", "auto")
    assert model.encoder is not None
    with monkeypatch.context() as patch:
        patch.setitem(model.encoder.layers[-1]._modules, "ffn", Broken(RuntimeError))
        with pytest.raises(RuntimeError, match="broken"):
            run(cache, name, text, [2])
    assert not cache.has_source
    assert deviations(go_on(cache, name, text, [2, 4]), oracle(name, text, "raw")) < EXACT


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", KEPT)
def test_b21_keys_and_values_are_moved_alike(codec: str, layout: str) -> None:
    """Every stream of every layer, after select and fork, is that of the chosen rows; keys are no values."""
    name = "gemma"
    cache = cache_for(name, codec, layout)
    run(cache, name, text_for(MODELS[name], 12), [5, 2])
    before = held(cache)
    chosen = cache.fork()
    chosen.select([1, 1, 0])
    for key, streams in held(chosen).items():
        assert np.array_equal(streams, before[key][[1, 1, 0]]), key
    for key, streams in held(cache).items():
        assert np.array_equal(streams, before[key])
        other = key.replace(".k.", ".v.")
        assert other == key or not np.array_equal(streams, before[other])


def held(cache: Cache) -> dict[str, np.ndarray]:
    """Every part of every stream at the positions that are there, row by row."""
    step = cache.begin(1)
    found = {}
    for group, one in zip(cache.groups, step.groups, strict=True):
        assert one.view is not None
        there = np.broadcast_to(one.view.positions, (cache.batch, one.view.positions.shape[1]))
        order = np.argsort(there, 1)[:, -3:-1]  # the two newest tokens that were read
        for name, array in group.arrays.items():
            rows = array[:, :, : one.view.slots] if one.view.pages is None else array[one.view.pages]
            if one.view.pages is not None:
                rows = rows.swapaxes(1, 2).reshape(cache.batch, array.shape[1], -1, array.shape[3])
            found[name] = np.stack([row[:, places] for row, places in zip(rows, order, strict=True)])
    cache.abort(step)
    return found


def test_a_prefix_is_not_cut_in_its_middle() -> None:
    name = "prefix"
    first, second = text_for(MODELS[name], 8, seed=1), text_for(MODELS[name], 8, seed=2)
    cache = cache_for(name, "raw", "auto")
    run(cache, name, first, [5])
    with pytest.raises(
        CacheError, match=r"inside prefixes of \[3, 0\], whose tokens have seen all of them; cut behind"
    ):
        cache.truncate([2, 2])
    cache.truncate([3, 2])
    text = spliced(first, [3, 2], second)
    assert deviations(go_on(cache, name, text, [1, 3]), oracle(name, text, "raw")) < EXACT
    cache.truncate(0)
    assert deviations(go_on(cache, name, second, [4, 1]), oracle(name, second, "raw")) < EXACT


def test_a_row_that_begins_anew_keeps_its_prefix_whole() -> None:
    """Only that row is cut to nothing: what it reads next must bring the prefix whole."""
    name = "prefix"
    text = text_for(MODELS[name], 8)
    cache = cache_for(name, "raw", "auto")
    run(cache, name, text, [5])
    cache.truncate([0, 5])
    with pytest.raises(CacheError, match="prefix_length: 3 in row 0, but the first call brings 1 tokens"):
        run(cache, name, text, [1])
    assert cache.lengths == [0, 5]
    assert deviations(go_on(cache, name, text, [3]), oracle(name, text, "raw")) < EXACT


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*EXTRA, "encoder-decoder", "prefix", "learned", "alibi"])
def test_every_verb_of_every_model(name: str, layout: str) -> None:
    for codec in CODECS:
        test_truncated_rows_go_on_as_if_they_had_read_no_more(name, codec, layout)
        test_selected_rows_go_on_as_those_rows(name, codec, layout)
        test_forks_know_nothing_of_each_other(name, codec, layout)
