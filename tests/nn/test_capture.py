"""`capture` shows what the model computed, and never changes it."""

from __future__ import annotations

import threading

import pytest
import torch

from parity.cases import CASES, inputs
from parity.test_forward import float32_weights, model_with, tensors
from qkv.errors import ConfigError
from qkv.nn import Transformer, capture

TOKENS = torch.arange(12).reshape(2, 6)


def build(name: str) -> Transformer:
    return model_with(CASES[name], float32_weights(CASES[name]), torch.float32)


@pytest.mark.parametrize("name", ["rotary-halves", "sliding-window", "softcap", "alibi", "masked-lm", "latent"])
def test_watching_leaves_the_output_bitwise_alone(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        alone = model(TOKENS).hidden
        with capture(model) as trace:
            watched = model(TOKENS).hidden
    assert torch.equal(alone, watched)
    weights = trace[f"{'en' if name == 'masked-lm' else 'de'}coder.layers.0.attention.weights"]
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_weights_times_values_are_the_context() -> None:
    model = build("rotary-halves")
    with torch.no_grad(), capture(model, "decoder.layers.1.attention.*") as trace:
        model(TOKENS)
    at = "decoder.layers.1.attention."
    values = trace[at + "v"].repeat_interleave(2, 1)
    context = (trace[at + "weights"] @ values).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(context, trace[at + "context"])


def test_blocks_add_up() -> None:
    model = build("dense-relu")
    with torch.no_grad(), capture(model, "decoder.layers.0.*") as trace:
        model(TOKENS)
    at = "decoder.layers.0."
    total = trace[at + "input"] + trace[at + "attention"] + trace[at + "ffn"]
    torch.testing.assert_close(total, trace[at + "output"])


def test_encoder_decoder_names() -> None:
    model = build("encoder-decoder")
    given = inputs(CASES["encoder-decoder"], "plain")
    assert given is not None
    with torch.no_grad(), capture(model, "*.cross_attention.weights", "encoder.output", "head.logits") as trace:
        model(**tensors(given))
    assert list(trace) == [
        "encoder.output",
        "decoder.layers.0.cross_attention.weights",
        "decoder.layers.1.cross_attention.weights",
        "head.logits",
    ]
    assert trace["decoder.layers.0.cross_attention.weights"].shape == (2, 4, 11, 9)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    model = build("rotary-halves")
    with pytest.raises(ConfigError, match=r"nothing is called 'decoder\.\*\.wieghts'"):  # noqa: SIM117
        with capture(model, "decoder.*.wieghts"):
            model(TOKENS)


def test_each_model_and_thread_has_its_own_trace() -> None:
    first, second = build("rotary-halves"), build("alibi")
    with torch.no_grad(), capture(first, "head.logits") as outer, capture(second, "head.logits") as inner:
        first(TOKENS)
        assert len(outer) == 1
        assert len(inner) == 0
        second(TOKENS)
        assert len(inner) == 1
        worker = threading.Thread(target=lambda: first(TOKENS + 1))
        kept = outer["head.logits"].clone()
        worker.start()
        worker.join()
        assert torch.equal(outer["head.logits"], kept)
