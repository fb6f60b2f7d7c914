"""What the model refuses, each in one line that names the argument, the requirement and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parity.cases import CASES, V
from qkv.errors import DataError
from qkv.nn import Transformer

TOKENS = torch.arange(8).reshape(2, 4)
MASK = torch.ones(2, 4, dtype=torch.bool)

LONG = torch.zeros(1, 33, dtype=torch.long)
IDS = f"is outside 0 to {V - 1}"
BOTH = {"tokens": TOKENS, "source": TOKENS}

Refusal = tuple[str, dict[str, Any], str]
REFUSED: list[Refusal] = [
    ("no-positions", {"tokens": torch.tensor([[0, V]])}, f"tokens: id {V} {IDS}"),
    ("no-positions", {"tokens": torch.tensor([[-1, 3]])}, f"tokens: id -1 {IDS}"),
    ("no-positions", {"tokens": LONG[:, :0]}, "tokens: empty, shape (1, 0)"),
    ("learned", {"tokens": LONG}, "positions: 33 tokens, but the model has learned 32"),
    ("learned", {"tokens": TOKENS, "positions": TOKENS + 26}, "positions: 34 tokens, but the model has learned 32"),
    ("learned-offset", {"tokens": LONG}, "has learned 32"),
    ("no-positions", BOTH, "source: this model has no encoder beside its decoder"),
    ("masked-lm", BOTH, "source: this model has no encoder beside its decoder"),
    ("encoder-decoder", {"tokens": TOKENS}, "source: this model needs source= (B, S)"),
    ("encoder-decoder", {"tokens": TOKENS, "source": TOKENS + V}, f"source: id {V + 7} {IDS}"),
    ("encoder-decoder", {**BOTH, "documents": TOKENS}, "documents: packing is for models"),
    ("encoder-decoder", {**BOTH, "segments": TOKENS}, "segments: not for an encoder-decoder"),
    ("no-positions", {"tokens": TOKENS, "source_valid": MASK}, "source_valid: given without source"),
    ("no-positions", {"tokens": TOKENS, "segments": TOKENS}, "segments: this model has no segment table"),
    ("masked-lm", {"tokens": TOKENS, "segments": TOKENS}, "segments: id 7 is outside 0 to 1"),
    ("prefix", {"tokens": TOKENS}, "prefix_length: this model needs prefix_length= (B,)"),
    ("no-positions", {"tokens": TOKENS, "prefix_length": TOKENS[:, 0]}, "reads no prefix: leave it out"),
    ("no-positions", {"tokens": TOKENS, "global_tokens": MASK}, "global_tokens: no pattern of this model reads them"),
]
SHAPES: list[Refusal] = [
    ("no-positions", {"tokens": TOKENS[0]}, "tokens: must be (B, T), got shape (4,)"),
    ("no-positions", {"tokens": TOKENS, "valid": MASK.long()}, "valid: must be boolean, True = yes, got torch.int64"),
    ("no-positions", {"tokens": TOKENS, "valid": MASK[:1]}, "valid: must have shape (2, 4) to fit the tokens"),
    ("encoder-decoder", {"tokens": TOKENS, "source": TOKENS[:1]}, "source: must have shape (2, 4) to fit the tokens"),
    ("prefix", {"tokens": TOKENS, "prefix_length": TOKENS}, "prefix_length: must have shape (2,)"),
]


@pytest.mark.parametrize(("name", "given", "says"), REFUSED)
def test_bad_inputs_are_named(name: str, given: dict[str, Any], says: str) -> None:
    model = Transformer(CASES[name]).eval()
    with pytest.raises(DataError) as error:
        model(**given)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.unhooked  # the shape-checking hook of the tests would speak first
@pytest.mark.parametrize(("name", "given", "says"), SHAPES)
def test_bad_shapes_are_named(name: str, given: dict[str, Any], says: str) -> None:
    test_bad_inputs_are_named(name, given, says)


def test_the_last_learned_position_is_usable() -> None:
    """B24: the limit itself is no error."""
    out = Transformer(CASES["learned"]).eval()(torch.zeros(1, 32, dtype=torch.long))
    assert out.logits.shape == (1, 32, V)


def test_int32_tokens_and_positions_mean_the_same() -> None:
    model = Transformer(CASES["bigbird"]).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.randint(0, V, (1, 32))
    place = torch.arange(32)[None]
    with torch.no_grad():
        expected = model(tokens, positions=place).hidden
        assert torch.equal(model(tokens.int(), positions=place.int()).hidden, expected)
