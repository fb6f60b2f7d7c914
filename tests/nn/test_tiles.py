"""Patterns made of tiles: only the tiles that are seen are gathered, and the result and its gradients are eager's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from parity.cases import attention, block, decoder
from parity.test_forward import deviation, float32_weights, model_with
from qkv import config as c
from qkv.config import Coordinates, ModelConfig
from qkv.errors import BackendError
from qkv.nn.backends import BACKENDS, Scoring
from qkv.nn.backends.tiles import TILES
from qkv.nn.context import AttentionPlan, visible

PATTERN = c.BigBird(block=4, random_blocks=2)


def encoder(pattern: c.Pattern = PATTERN) -> ModelConfig:
    """Two layers, rotary, grouped heads."""
    layer = attention(pattern=pattern, positions=c.Rotary(), n_heads=4, n_kv_heads=2, head_dim=6)
    return decoder(block(attention=layer), head=c.NoHead(), max_seq_len=256)


def plan_of(lengths: list[int], pattern: c.Pattern = PATTERN) -> AttentionPlan:
    """Rows of these lengths, padded on the right to the longest."""
    index, length = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
    position = torch.where(index < length, index, -1)
    at = Coordinates(position, length=length.expand_as(position))
    return AttentionPlan(pattern, at, at, "partial", True, "auto")


def results(backend: str, plan: AttentionPlan, heads: tuple[int, int] = (4, 2)) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    random = torch.Generator().manual_seed(1)
    rows, length = plan.query.position.shape
    shapes = [(rows, heads[0], length, 8), (rows, heads[1], length, 8), (rows, heads[1], length, 10)]
    inputs = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]
    out = BACKENDS[backend].run(*inputs, plan, Scoring(0.3))
    goal = torch.randn(out.shape, generator=random, dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out * goal).sum(), inputs)]


@pytest.mark.parametrize("lengths", [[100], [101], [128, 128], [128, 103, 97], [99, 60]], ids=str)
@pytest.mark.parametrize("pattern", [PATTERN, c.BigBird(block=8, random_blocks=0), c.BigBird(block=3, seed=7)])
def test_tiles_agree_with_eager_with_their_gradients(lengths: list[int], pattern: c.BigBird) -> None:
    plan = plan_of(lengths, pattern)
    for found, expected in zip(results("tiles", plan), results("eager", plan), strict=True):
        assert deviation(expected.numpy(), found, np.ones(expected.shape, dtype=bool)) < 1e-12


@pytest.mark.parametrize("pattern", [PATTERN, c.BigBird(block=5, random_blocks=3, seed=2)])
def test_a_tile_is_seen_as_a_whole_or_not_at_all(pattern: c.BigBird) -> None:
    """What `tile` promises: the backend asks the predicate once per pair of tiles."""
    plan = plan_of([10 * pattern.block * 2], pattern)
    mask = visible(pattern, plan.query, plan.key)[0]
    assert pattern.tile is not None
    pairs = mask.unflatten(0, (-1, pattern.tile)).unflatten(2, (-1, pattern.tile)).transpose(1, 2).flatten(2)
    assert torch.equal(pairs.any(-1), pairs.all(-1))
    assert 0 < int(pairs.any(-1).sum()) < pairs.shape[0] * pairs.shape[1]


def test_a_long_row_is_gathered_and_a_short_one_is_not() -> None:
    for length, gathered in ((200, True), (40, False)):
        plan = plan_of([length])
        assert TILES.worthwhile(torch.zeros(1, 4, length, 8), plan) is gathered


def test_the_choice_for_a_whole_model_is_exact() -> None:
    config = encoder()
    model = model_with(config, float32_weights(config), torch.float64)
    tokens = torch.arange(200)[None] * 7 % 61
    with torch.no_grad():
        expected, found = (model(tokens, backend=name).hidden for name in ("eager", "auto"))
        assert torch.equal(found, model(tokens, backend="tiles").hidden)
    assert deviation(expected.numpy(), found, np.ones((1, 200), dtype=bool)) < 1e-12


@pytest.mark.parametrize(
    ("pattern", "given", "says"),
    [
        (c.Causal(), {}, "pattern 'causal' is not made of tiles"),
        (PATTERN, {"documents": torch.zeros(1, 100, dtype=torch.long)}, "its tiles begin with the row"),
        (PATTERN, {"valid": (torch.arange(100) > 5)[None]}, "its tiles begin with the row"),
        (PATTERN, {"positions": torch.arange(3, 103)[None]}, "its tiles begin with the row"),
    ],
)
def test_what_it_cannot_serve(pattern: c.Pattern, given: dict[str, Tensor], says: str) -> None:
    config = encoder(pattern)
    model = model_with(config, float32_weights(config), torch.float64)
    tokens = torch.zeros(1, 100, dtype=torch.long)
    with torch.no_grad(), pytest.raises(BackendError, match="cannot serve") as error:
        model(tokens, **given, backend="tiles")
    assert says in str(error.value)
    with torch.no_grad():
        expected, found = (model(tokens, **given, backend=name).hidden for name in ("eager", "auto"))
    valid = given.get("valid", torch.ones(1, 100, dtype=torch.bool)).numpy()
    assert deviation(expected.numpy(), found, valid) < 1e-12
