"""A model with a cache equals the oracle without one: layouts x codecs x ways to cut a text into pieces x all models.

In float64 both sides differ by rounding alone, some 1e-15. A quantised key or value would get another code only if it
lay that near to the middle of two codes, which happens once in some 1e13 numbers: the tolerance stays 1e-10.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from allpairspy import AllPairs

from cache.models import (
    CODECS,
    EXACT,
    EXTRA,
    LAYOUTS,
    MODELS,
    SCHEDULES,
    case,
    deviations,
    even,
    model_of,
    ragged,
    read,
    schedule,
    window_of,
)
from qkv import reference
from qkv.cache.cache import Cache


class Way(NamedTuple):
    """One way to keep and to read a text."""

    layout: str
    codec: str
    pieces: str
    slack: int
    canonical: bool
    rows: str

    def possible(self) -> bool:
        """In canonical order a window takes chunks of slack + 1; rings in whole granules have much slack anyway."""
        return not self.canonical or self.slack > 2 or self.layout == "auto"


def _possible(row: list[Any]) -> bool:
    """Whether a row, perhaps of the first columns only, can be."""
    return len(row) < 5 or Way(*row[:5], "even").possible()


FACTORS = (list(LAYOUTS), list(CODECS), list(SCHEDULES), [0, 2, 40], [False, True], ["even", "ragged"])
PAIRS = [Way(*row) for row in AllPairs(FACTORS, filter_func=_possible)]
EVERY = [way for row in product(*FACTORS) if (way := Way(*row)).possible()]


def check(name: str, way: Way, expected: reference.Output, dtype: torch.dtype = torch.float64) -> float:
    """How far the model is from what is expected; the second of ragged rows is three tokens shorter."""
    text, _ = case(name, "raw")
    options = LAYOUTS[way.layout] | {"slack": way.slack, "canonical": way.canonical}
    model = model_of(name, dtype)
    cache = Cache.for_model(model, 2, text.length, way.codec, **options)
    sizes = schedule(way.pieces, text, window_of(MODELS[name]))
    # A head that makes one vector of a row wants a token of each in every call.
    even_rows = way.rows == "even" or MODELS[name].head.kind == "classifier"
    lengths = [text.length] * 2 if even_rows else [text.length, text.length - 3]
    if even_rows:
        pieces = even(sizes, 2)
    else:
        pieces = ragged(sizes if text.prefix is None else [text.length], lengths, seed=len(sizes))
    found = deviations(read(model, cache, text, pieces), expected)
    assert cache.lengths == lengths
    return found


@pytest.mark.parametrize("number", range(len(MODELS)), ids=list(MODELS))
def test_every_model_in_two_ways(number: int) -> None:
    """Each way is met by some model and each model meets two ways, so that all pairs of choices occur."""
    name = list(MODELS)[number]
    for way in (PAIRS[(2 * number + turn) % len(PAIRS)] for turn in range(2)):
        assert check(name, way, case(name, way.codec)[1]) < EXACT, way


def test_the_ways_above_are_all_choices_in_pairs() -> None:
    assert 2 * len(MODELS) >= len(PAIRS) < 70
    for first, second in product(range(6), repeat=2):
        if first < second:
            possible = {(way[first], way[second]) for way in EVERY}
            assert {(way[first], way[second]) for way in PAIRS} == possible


@pytest.mark.parametrize("number", range(len(EXTRA)), ids=list(EXTRA))
def test_float32_is_as_near_to_no_cache_as_float32_can_be(number: int) -> None:
    """The same model without a cache, in the same numbers: only sums are in another order."""
    name = list(EXTRA)[number]
    text, expected = case(name, "raw")
    given = {"global_tokens": torch.from_numpy(text.globals)} if text.globals is not None else {}
    with torch.no_grad():
        out = model_of(name, torch.float32)(torch.from_numpy(text.tokens), **text.first(), **given)
    plain = reference.Output(out.logits.double().numpy(), out.hidden.double().numpy(), None, ())
    raw = [way for way in PAIRS if way.codec == "raw"]
    way = raw[number % len(raw)]
    assert check(name, way, plain, torch.float32) < 1e-5, way
    assert check(name, way, expected, torch.float32) < 1e-5, way


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.parametrize("name", MODELS)
def test_every_model_in_all_pairs_of_choices(name: str) -> None:
    for way in sorted(PAIRS, key=lambda way: way.codec):
        assert check(name, way, case(name, way.codec)[1]) < EXACT, way


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.parametrize("name", EXTRA)
def test_every_kind_of_attention_in_every_way(name: str) -> None:
    for way in sorted(EVERY, key=lambda way: way.codec):
        assert check(name, way, case(name, way.codec)[1]) < EXACT, way
