"""How much a cache takes: what the planner says from the config alone, and no more as a window moves on."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from cache.models import CODECS, LAYOUTS, MODELS, model_of, text_for, windowed
from cache.toys import SINKS, WINDOW, Twin
from parity.cases import block, decoder
from qkv import config as c
from qkv.cache.cache import Cache, Options
from qkv.cache.store import HostStore
from qkv.plan import kv_cache_bytes

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
SOURCE = 7


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_are_those_that_the_planner_predicts(name: str) -> None:
    config = MODELS[name]
    sizes = ((0, 20, 1), (3, 9, 3), (40, 20, 2))
    for number, (layout, codec, (slack, longest, batch)) in enumerate(product(LAYOUTS, CODECS, sizes)):
        dtype = list(BYTES)[number % 4]
        options = Options(longest, codec, slack=slack, **LAYOUTS[layout])
        cache = Cache(config, HostStore(dtype), batch, options)
        if cache.source is not None:
            cache.take_source(np.tile(np.arange(SOURCE), (batch, 1)))
        assert cache.nbytes == kv_cache_bytes(
            config,
            longest,
            batch=batch,
            source=SOURCE,
            codec=codec,
            slack=slack,
            page=LAYOUTS[layout].get("page"),
            bytes_per_element=BYTES[dtype],
        )


def test_bytes_by_hand() -> None:
    """2 layers, 2 heads of 6, keys and values, 10 tokens: 4 bytes a number, or codes and one 16-bit scale a vector."""
    for codec, vector in (("raw", 24), ("int8", 6 + 2), ("int4", 3 + 2)):
        cache = Cache(decoder(), HostStore("float32"), 3, Options(10, codec))
        assert cache.nbytes == 3 * 2 * 2 * 2 * 10 * vector
    window = decoder(block(attention=windowed(4, sinks=1).decoder.layers[0].attention))
    for slack, slots in ((0, 5), (2, 7), (10, 10)):
        assert Cache(window, HostStore("float32"), 1, Options(10, slack=slack)).nbytes == 2 * 2 * 2 * slots * 24


@pytest.mark.parametrize("layout", [{}, {"layout": "paged", "page": 1}, {"layout": "paged", "page": 3}])
@pytest.mark.parametrize("config", [WINDOW, SINKS])
@pytest.mark.parametrize("slack", [0, 3])
def test_a_window_takes_the_same_for_any_number_of_tokens(
    config: c.ModelConfig, layout: dict[str, object], slack: int
) -> None:
    """Ragged rows and chunks of every size, one beyond the window too."""
    twin = Twin(config, 3, Options(None, slack=slack, **layout))
    rng, expected = np.random.default_rng(0), twin.cache.nbytes
    while min(twin.cache.lengths) < 10 * 4:
        twin.append([*rng.integers(0, 9, 2).tolist(), 1], gaps=int(rng.integers(0, 2)))
        assert twin.cache.nbytes == expected
    page = layout.get("page")
    assert isinstance(page, int | None)
    predicted = kv_cache_bytes(config, None, batch=3, slack=slack, page=page, bytes_per_element=8)
    assert predicted == expected


def test_a_model_of_windows_runs_without_limit() -> None:
    name = "window-multi-query"
    model, text = model_of(name, torch.float32), text_for(MODELS[name], 40)
    cache = Cache.for_model(model, 2, None)
    sizes = []
    for start in range(0, 40, 8):
        model(torch.from_numpy(text.tokens[:, start : start + 8]), cache=cache)
        sizes.append(cache.nbytes)
    assert set(sizes) == {kv_cache_bytes(MODELS[name], None, batch=2, bytes_per_element=4)}
    assert cache.lengths == [40, 40]
