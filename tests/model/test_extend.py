"""`register`: a user's own variant, usable wherever a built-in one is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import qkv
import qkv.config as c
from qkv import reference
from qkv.errors import ConfigError
from qkv.model import save

BASE = qkv.preset("llama-3-8b").toy()
FFN = "decoder.layers.0.ffn"


@pytest.fixture(autouse=True)
def _unions_as_before() -> Iterator[None]:
    """What a test registers is gone after it: other tests walk the unions."""
    before = {union: union.members for union in c.UNIONS}
    yield
    for union, members in before.items():
        union.members = members


def square() -> tuple[type[c.FeedForward], type[nn.Module], Any]:
    """A feed-forward network of the user's: weight * x^2."""

    class Square(c.FeedForward):
        kind: Literal["square"] = "square"

        def parameters(self, d_model: int) -> dict[str, c.Parameter]:
            return {"weight": c.Parameter((d_model,), "ones")}

    class SquareModule(nn.Module):
        def __init__(self, config: Square, d_model: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(d_model))

        def forward(self, x: torch.Tensor, ctx: object) -> torch.Tensor:
            return self.weight * x * x

    def square_reference(config: Square, weights: dict[str, Any], x: Any, routing: list[Any]) -> Any:
        return weights["weight"] * x**2

    return Square, SquareModule, square_reference


def test_a_member_with_its_module_and_reference(tmp_path: Path) -> None:
    member, module, function = square()
    assert qkv.register(member, module=module, reference=function) is member
    config = BASE.override({FFN: {"kind": "square"}})
    model = qkv.build(config, seed=1)
    tokens = np.arange(12)[None] % 96
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = reference.forward(config, weights, tokens)
    save(model, tmp_path / "m")
    got = qkv.load(tmp_path / "m").model(torch.from_numpy(tokens)).logits.detach().numpy()
    assert np.abs(got - expected).max() / np.abs(expected).max() < 1e-5


def test_it_is_a_decorator_with_and_without_arguments() -> None:
    member, module, _ = square()
    assert qkv.register(module=module)(member) is member
    qkv.build(BASE.override({FFN: {"kind": "square"}}))

    @qkv.register
    class Every(c.Pattern):
        kind: Literal["every"] = "every"
        past_only = True

        def allowed(self, query: c.Coordinates, key: c.Coordinates) -> Any:
            return key.position <= query.position

    assert c.Pattern.kinds()["every"] is Every


def test_a_pattern_needs_its_predicate_alone() -> None:
    @qkv.register
    class SameAsCausal(c.Pattern):
        kind: Literal["same-as-causal"] = "same-as-causal"
        past_only = True

        def allowed(self, query: c.Coordinates, key: c.Coordinates) -> Any:
            return key.position <= query.position

    path = "decoder.layers.*.attention.pattern"
    tokens = torch.arange(12)[None]
    own = qkv.build(BASE.override({path: {"kind": "same-as-causal"}}), seed=1)(tokens).logits
    causal = qkv.build(BASE.override({path: {"kind": "causal"}}), seed=1)(tokens).logits
    assert torch.allclose(own, causal, atol=1e-6)


def test_a_member_without_a_module_says_what_is_missing() -> None:
    member, _, _ = square()
    qkv.register(member)
    with pytest.raises(ConfigError, match=r"Square has no torch module: pass one with qkv.register\(Square, module="):
        qkv.build(BASE.override({FFN: {"kind": "square"}}))


def test_a_kind_that_is_taken_is_refused() -> None:
    class Mine(c.FeedForward):
        kind: Literal["dense"] = "dense"

    with pytest.raises(ConfigError, match="kind 'dense' is already"):
        qkv.register(Mine)
