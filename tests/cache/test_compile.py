"""One compiled graph serves every step of one token, as long as views of the cache have one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cache.models import LAYOUTS, MODELS, model_of, text_for
from qkv.cache.cache import Cache
from qkv.nn import Transformer

pytestmark = pytest.mark.unhooked
NAMES = [
    ("multi-query", "raw", "auto"),
    ("gemma", "int8", "page-4"),
    ("latent", "int4", "auto"),
    ("window-sinks-of-attention", "int8", "auto"),
    ("window-alibi", "raw", "page-3"),
    ("t5-shared", "int4", "page-16"),
    ("shaw", "raw", "auto"),
    ("encoder-decoder", "raw", "page-4"),
]


def steps(model: Transformer, cache: Cache, name: str, start: int, stop: int) -> torch.Tensor:
    """Logits (B, T, V) of the tokens from `start` to `stop`, read one by one."""
    text = text_for(MODELS[name], 100)
    tokens = torch.from_numpy(text.tokens)
    found = []
    if start == 0:
        found.append(model(tokens[:, :3], cache=cache, **text.first()).logits)
        start = 3
    found += [model(tokens[:, i : i + 1], cache=cache).logits for i in range(start, stop)]
    return torch.cat(found, 1)


@pytest.mark.parametrize(("name", "codec", "layout"), NAMES)
def test_a_step_is_one_graph_until_the_view_grows(
    name: str, codec: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """61 steps within 64 slots are one graph without a break, the next a second one; windows have one for ever."""
    model = model_of(name, torch.float32)
    caches = [Cache.for_model(model, 2, 200, codec, **LAYOUTS[layout]) for _ in range(2)]
    expected = steps(model, caches[0], name, 0, 90)
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model.decoder, fullgraph=True, backend=count)
    found = [steps(model, caches[1], name, 0, 3)]
    monkeypatch.setitem(model._modules, "decoder", compiled)
    found.append(steps(model, caches[1], name, 3, 64))
    assert len(graphs) == 1
    found.append(steps(model, caches[1], name, 64, 90))
    assert len(graphs) == (1 if all(group.behind is not None for group in caches[1].groups) else 2)
    assert torch.equal(torch.cat(found, 1), expected)


@pytest.mark.slow
def test_the_compiled_kernels_agree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real compiler on one model."""
    name = "gemma"
    model = model_of(name, torch.float32)
    caches = [Cache.for_model(model, 2, 200) for _ in range(2)]
    expected = steps(model, caches[0], name, 0, 20)
    torch._dynamo.reset()
    steps(model, caches[1], name, 0, 3)
    monkeypatch.setitem(model._modules, "decoder", torch.compile(model.decoder, fullgraph=True))
    found = steps(model, caches[1], name, 3, 20)
    assert (found - expected[:, 3:]).abs().max() < 1e-5 * expected.abs().max()
