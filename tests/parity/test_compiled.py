"""What needs a process without the shape-checking hook: compiled graphs, FlexAttention, memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from parity.cases import CASES, attention, block, decoder, inputs
from parity.test_backends import PATTERNS
from parity.test_forward import deviation, float32_weights, model_with, tensors
from qkv import config as c
from qkv.config import ModelConfig
from qkv.config.presets import preset, presets
from qkv.errors import ConfigError
from qkv.nn import Transformer, capture

pytestmark = pytest.mark.unhooked
EVERY = np.ones((2, 11), dtype=bool)


# Experts, adaptive tables and global tokens sort tokens by their data, which no graph without breaks can.
SORTS = ("mixture-of-experts", '"adaptive"', '"global_projections": true')
COMPILE = ("llama-3.1-8b", "bert-base-uncased", "t5-small", "mistral-7b", "gemma-3-270m")
REST = [name for name in presets() if name not in COMPILE and not any(s in preset(name).to_json() for s in SORTS)]


@pytest.mark.parametrize("name", [*COMPILE, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_the_whole_model_is_one_graph(name: str) -> None:
    config = preset(name).toy()
    model = model_with(config, float32_weights(config), torch.float32)
    given = inputs(config, "plain", length=30)
    assert given is not None
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=count)
    with torch.no_grad():
        expected, found = model(**tensors(given)), compiled(**tensors(given))
        compiled(**tensors(given))
    assert len(graphs) == 1
    assert deviation(expected.hidden.double().numpy(), found.hidden, np.ones((2, 30), dtype=bool)) < 1e-6


def test_the_compiled_kernels_agree_too() -> None:
    """The real compiler on the smallest model: forward and gradients."""
    config = decoder(n_layers=1)
    model = model_with(config, float32_weights(config), torch.float32)
    tokens = torch.arange(22).reshape(2, 11)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    expected = model(tokens).logits
    expected.sum().backward()
    gradient = model.embed.tokens.weight.grad.clone()
    model.zero_grad()
    found = compiled(tokens).logits
    found.sum().backward()
    assert deviation(expected.detach().double().numpy(), found, EVERY) < 1e-5
    assert deviation(gradient.double().numpy(), model.embed.tokens.weight.grad, EVERY) < 1e-5


def test_a_compiled_model_refuses_to_be_watched() -> None:
    model = Transformer(decoder(n_layers=1))
    with pytest.raises(ConfigError, match="before torch"), capture(torch.compile(model)):
        pass
    model.compile()
    with pytest.raises(ConfigError, match="before torch"), capture(model):
        pass


FLEX = ("rotary-halves", "multi-query", "alibi", "sliding-window-sinks", "longformer", "bigbird", "any-of", "softcap")


@pytest.mark.parametrize("name", FLEX)
def test_flex_agrees_with_eager(name: str) -> None:
    """Forward only on a CPU; left-padded, so that coordinates differ from indices."""
    config = PATTERNS.get(name, CASES[name])
    given = inputs(config, "padded-left")
    assert given is not None
    model = model_with(config, float32_weights(config), torch.float32)
    with torch.no_grad():
        expected = model(**tensors(given), backend="eager").hidden
        found = model(**tensors(given), backend="flex").hidden
    assert deviation(expected.double().numpy(), found, given["valid"]) < 1e-5


def peak_bytes(config: ModelConfig, length: int, backend: str) -> int:
    """The most memory that one attention call holds beyond its inputs, by torch's own allocation records."""
    model = Transformer(config).eval()
    for parameter in model.parameters():
        parameter.data.zero_()
    tokens = torch.zeros(1, length, dtype=torch.long)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        model(tokens, backend=backend)
    level = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


@pytest.mark.parametrize(
    ("pattern", "backend"),
    [(c.Causal(), "flash"), (c.Bidirectional(), "flash"), (c.SlidingWindow(window=64), "window")],
)
def test_peak_memory_grows_linearly(pattern: c.Pattern, backend: str) -> None:
    """1k, 2k, 4k tokens: twice the tokens take at most 2.2 times the memory; all scores would take four times."""
    layer = attention(pattern=pattern, n_heads=4, n_kv_heads=2, head_dim=16)
    config = decoder(block(attention=layer), n_layers=1, head=c.NoHead(), max_seq_len=4096)
    peaks = [peak_bytes(config, length, backend) for length in (1024, 2048, 4096)]
    assert all(1.5 < after / before < 2.2 for before, after in pairwise(peaks)), peaks
    everything = peak_bytes(config, 2048, "eager")
    assert everything > 8 * peaks[1]
