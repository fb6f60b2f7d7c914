"""Backends: every one that can serve a call agrees with `eager`; one that cannot says why and names those that can."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parity.cases import CASES, attention, block, decoder, inputs, positions
from parity.test_forward import deviation, float32_weights, model_with, tensors
from qkv import config as c
from qkv.config import ModelConfig
from qkv.errors import BackendError
from qkv.nn import Transformer
from qkv.nn.backends import BACKENDS

MASKED = (
    "no-positions", "rotary-halves", "multi-query", "alibi", "alibi-encoder", "t5-buckets-own", "transformer-xl",
    "prefix", "sliding-window", "sliding-window-sinks", "chunked", "dilated", "longformer", "longformer-projections",
    "bigbird", "all-of", "any-of", "latent", "latent-direct-wide-values", "softcap", "encoder-decoder", "shaw",
)  # fmt: skip
PATTERNS = {name: CASES[name] for name in MASKED}


def run(model: Transformer, given: dict[str, torch.Tensor], backend: str) -> torch.Tensor | None:
    """Hidden states through one backend; None where it refuses."""
    try:
        return model(**given, backend=backend).hidden
    except BackendError:
        return None


@pytest.mark.parametrize("kind", ["plain", "padded-left", "padded-right", "packed", "positions"])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_capable_backend_agrees_with_eager(name: str, kind: str) -> None:
    config = PATTERNS[name]
    given = inputs(config, kind, length=14)
    if given is None:
        return  # no packed encoder-decoder
    model = model_with(config, float32_weights(config), torch.float64)
    given_torch = tensors(given)
    valid = given.get("valid", np.ones(given["tokens"].shape, dtype=bool))
    with torch.no_grad():
        expected = run(model, given_torch, "eager")
        assert expected is not None
        for backend in ("flash", "sdpa", "window", "auto"):
            found = run(model, given_torch, backend)
            if found is not None:
                assert deviation(expected.numpy(), found, valid) < 1e-12, backend


LONG = {
    "sliding-window": c.SlidingWindow(window=9),
    "sliding-window-sinks": c.SlidingWindow(window=70, sinks=3),
    "chunked": c.Chunked(chunk=10),
    "dilated": c.Dilated(window=5, dilation=3),
    "longformer": c.Longformer(window=12),
    "sinks-and-globals": c.AnyOf(patterns=(c.SlidingWindow(window=4, sinks=2), c.Longformer(window=4))),
    "causal-longformer": c.AllOf(patterns=(c.Causal(), c.Longformer(window=12))),
}


@pytest.mark.parametrize("kind", ["plain", "padded-left", "padded-right", "packed"])
@pytest.mark.parametrize("name", LONG)
def test_windows_by_chunks_agree_with_eager_over_many_chunks(name: str, kind: str) -> None:
    """B41 too: no length needs to be a multiple of anything."""
    config = decoder(block(attention=attention(pattern=LONG[name], positions=c.Rotary())), head=c.NoHead())
    if name == "longformer":
        config = config.override({"decoder.layers.*.attention.global_projections": True})
    given = inputs(config, kind, length=203)
    assert given is not None
    valid = given.get("valid", np.ones(given["tokens"].shape, dtype=bool))
    model = model_with(config, float32_weights(config), torch.float64)
    with torch.no_grad():
        expected, found = run(model, tensors(given), "eager"), run(model, tensors(given), "window")
    assert expected is not None
    assert found is not None
    assert deviation(expected.numpy(), found, valid) < 1e-12


def test_a_document_in_pieces_is_no_band() -> None:
    """Documents that take turns: a key's index is twice as far as its position, so windows by chunks must refuse."""
    config = decoder(block(attention=attention(pattern=c.SlidingWindow(window=4))), head=c.NoHead())
    model = model_with(config, float32_weights(config), torch.float64)
    given = {"tokens": torch.arange(150)[None] % 61, "documents": torch.arange(150)[None] % 2}
    with torch.no_grad():
        assert run(model, given, "window") is None
        expected, found = run(model, given, "eager"), run(model, given, "auto")
    assert expected is not None
    assert found is not None
    assert deviation(expected.numpy(), found, np.ones((1, 150), dtype=bool)) < 1e-12


def served(config: ModelConfig, backend: str, **given: torch.Tensor) -> bool:
    """Whether the backend serves this model."""
    tokens = torch.zeros(1, 30, dtype=torch.long)
    with torch.no_grad():
        return run(Transformer(config).eval(), {"tokens": tokens, **given}, backend) is not None


def test_who_serves_what() -> None:
    """The comparison above would pass if a backend refused everything."""
    assert served(CASES["rotary-halves"], "flash")
    assert served(CASES["latent"], "flash")
    assert served(CASES["sliding-window"], "window")
    assert served(CASES["sliding-window-sinks"], "window")
    assert served(CASES["chunked"], "window")
    assert served(CASES["longformer-projections"], "window")
    assert not served(CASES["bigbird"], "window")
    assert served(CASES["prefix"], "sdpa", prefix_length=torch.tensor([3]))
    assert not served(CASES["sliding-window"], "flash")
    assert not served(CASES["softcap"], "sdpa")
    assert not served(CASES["alibi"], "flash")
    assert not served(CASES["rotary-halves"], "window")


@pytest.mark.parametrize(
    ("config", "backend", "says"),
    [
        (CASES["softcap"], "sdpa", "it has no softcap; capable: flex, eager"),
        (CASES["alibi"], "flash", "it has no bias; capable: sdpa, flex, eager"),
        (
            CASES["sliding-window"],
            "flash",
            "pattern 'sliding-window' with these inputs needs a mask; capable: window, sdpa",
        ),
        (
            CASES["rotary-halves"],
            "flsh",
            "backend 'flsh' does not exist; choose auto, flash, window, sdpa, flex, eager",
        ),
    ],
)
def test_a_forced_backend_that_cannot_serve_raises(config: ModelConfig, backend: str, says: str) -> None:
    model = Transformer(config).eval()
    with torch.no_grad(), pytest.raises(BackendError) as error:
        model(torch.zeros(1, 20, dtype=torch.long), backend=backend)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", [7, 8, 9])  # window - 1, window, window + 1
@pytest.mark.parametrize("backend", ["sdpa", "window", "auto", "eager"])
def test_windows_agree_around_their_own_length(length: int, backend: str) -> None:
    """B07, B09, B33: no off-by-one, and causality is kept where the window covers the row."""
    layer = attention(pattern=c.SlidingWindow(window=8), positions=c.Rotary())
    config = decoder(block(attention=layer))
    model = model_with(config, float32_weights(config), torch.float64)
    full = model_with(
        config.override({"decoder.layers.*.attention.pattern": c.Causal()}), float32_weights(config), torch.float64
    )
    tokens = torch.arange(length)[None]
    with torch.no_grad():
        windowed, causal = model(tokens, backend=backend).logits, full(tokens, backend="eager").logits
    assert deviation(causal[:, :8].numpy(), windowed[:, :8], np.ones((1, 1), dtype=bool)[:0]) < 1e-12
    if length > 8:
        assert (windowed[:, 8:] - causal[:, 8:]).abs().max() > 1e-6


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("flash", "flex", "tiles")])
def test_a_query_that_sees_nothing_gives_zero_and_zero_gradient(backend: str) -> None:
    """B29: the first two tokens are padding, so their rows are dead: no NaN forward or backward."""
    pattern = c.SlidingWindow(window=4)
    config = decoder(block(attention=attention(pattern=pattern, positions=c.Rotary())))
    model = model_with(config, float32_weights(config), torch.float64)
    tokens = torch.arange(24).reshape(2, 12)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, :2] = False
    contexts = []
    hook = model.decoder.layers[0].attention.o_proj.register_forward_pre_hook(lambda _, x: contexts.append(x[0]))
    out = model(tokens, valid=valid, backend=backend).logits
    hook.remove()
    assert (contexts[0][0, :2] == 0).all()
    assert torch.isfinite(out).all()
    out[valid].sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_dropout_of_weights_only_in_training() -> None:
    config = positions(c.Rotary(), dropout=0.5)
    model = model_with(config, float32_weights(config), torch.float32)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, model(tokens).logits)
        model.train()
        assert not torch.equal(model(tokens).logits, model(tokens).logits)
