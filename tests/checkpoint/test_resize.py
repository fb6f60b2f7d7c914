"""Tokens added to a model: every tensor with a row per token grows, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import qkv
from qkv.checkpoint.resize import resized
from qkv.config import ModelConfig
from qkv.errors import CheckpointError

ADDED = 5
CASES = {
    "tied": lambda: qkv.preset("llama-3.2-1b").toy(),
    "own head": lambda: qkv.preset("llama-3-8b").toy(),
    "biased head": lambda: qkv.preset("llama-3-8b").toy().override({"head.bias": True}),
    "masked": lambda: qkv.preset("bert-base-uncased").toy().override({"head": {"kind": "masked-lm"}}),
    "both stacks": lambda: qkv.preset("t5-small").toy(),
}
GROWN = {
    "tied": {"embed.tokens.weight"},
    "own head": {"embed.tokens.weight", "head.weight"},
    "biased head": {"embed.tokens.weight", "head.weight", "head.bias"},
    "masked": {"embed.tokens.weight", "head.bias"},
    "both stacks": {"embed.tokens.weight"},
}


def drawn(config: ModelConfig) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {name: generator.normal(0, 0.3, p.shape).astype(np.float32) for name, p in config.shapes().items()}


def logits(config: ModelConfig, tensors: dict[str, np.ndarray], tokens: torch.Tensor) -> torch.Tensor:
    model = qkv.build(config)
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in tensors.items()})
    source = {"source": tokens} if len(config.stacks) == 2 else {}
    with torch.no_grad():
        found: torch.Tensor = model(tokens, **source).logits
    return found


@pytest.mark.parametrize("name", CASES)
def test_five_tokens_more(name: str) -> None:
    """B76: head, bias and tie stay consistent, and old rows are the same."""
    config = CASES[name]()
    tensors = drawn(config)
    larger, grown = resized(config, tensors, config.vocab_size + ADDED)
    assert larger.override({"vocab_size": config.vocab_size}) == config
    assert {n for n in tensors if grown[n].shape != tensors[n].shape} == GROWN[name]
    assert {n: array.shape for n, array in grown.items()} == {n: p.shape for n, p in larger.shapes().items()}
    for n, array in tensors.items():
        assert np.array_equal(grown[n][: len(array)], array), n
    for n in GROWN[name]:
        np.testing.assert_allclose(
            grown[n][-ADDED:], np.broadcast_to(tensors[n].mean(0), grown[n][-ADDED:].shape), atol=1e-6
        )
    tokens = torch.arange(2, 9)[None]
    before, after = logits(config, tensors, tokens), logits(larger, grown, tokens)
    assert torch.equal(after[..., : config.vocab_size], before)
    # The mean row says the mean logit.
    torch.testing.assert_close(after[..., config.vocab_size :], before.mean(-1, keepdim=True).expand(1, 7, ADDED))
    assert logits(larger, grown, torch.tensor([[2, config.vocab_size + 1]])).isfinite().all()


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.uint16])
def test_every_type_stays_itself(dtype: type) -> None:
    config = CASES["own head"]()
    tensors = drawn(config)
    if dtype is np.uint16:
        kept = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in tensors.items()}
    else:
        kept = {name: array.astype(dtype) for name, array in tensors.items()}
    _, grown = resized(config, kept, config.vocab_size + 1)
    assert {array.dtype for array in grown.values()} == {np.dtype(dtype)}
    last = grown["head.weight"][-1]
    found = (last.astype(np.uint32) << 16).view(np.float32) if dtype is np.uint16 else last
    np.testing.assert_allclose(found.astype(np.float64), tensors["head.weight"].mean(0), atol=2e-3)


def test_the_same_size_changes_nothing() -> None:
    config = CASES["tied"]()
    tensors = drawn(config)
    same, kept = resized(config, tensors, config.vocab_size)
    assert same == config
    assert all(kept[name] is array for name, array in tensors.items())


def test_a_table_is_never_cut() -> None:
    """Not to the tokenizer's size either: the peer's resize to `len(tokenizer)` throws padding rows away."""
    config = CASES["tied"]()
    with pytest.raises(CheckpointError, match=rf"{config.vocab_size - 1} is less than the {config.vocab_size} rows"):
        resized(config, drawn(config), config.vocab_size - 1)


def test_tables_in_parts_grow_at_their_end() -> None:
    """Transformer-XL: new tokens join the last cluster."""
    config = qkv.preset("transformer-xl-wt103").toy()
    tensors = drawn(config)
    larger, grown = resized(config, tensors, config.vocab_size + ADDED)
    assert {n: array.shape for n, array in grown.items()} == {n: p.shape for n, p in larger.shapes().items()}
    changed = {n for n in tensors if grown[n].shape != tensors[n].shape}
    assert changed
    assert all(np.array_equal(grown[n][: len(tensors[n])], tensors[n]) for n in changed)
