"""Functions with gradients of their own: the gradient is that of the formula, and the value the same to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parity.test_backends import LONG
from qkv import config as c
from qkv.config import Coordinates
from qkv.nn.backends import BACKENDS, Scoring
from qkv.nn.backends.window import pieces
from qkv.nn.context import AttentionPlan
from qkv.nn.norm import RMSNorm, normalised
from qkv.nn.position import turned


def numbers(*shape: int) -> Tensor:
    """That ask for a gradient."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def test_the_norm() -> None:
    x = numbers(2, 3, 8)
    assert torch.autograd.gradcheck(lambda x: normalised(x, 1e-3), x)
    assert torch.equal(normalised(x, 1e-3), normalised(x.detach(), 1e-3))
    assert "_Normalised" in type(normalised(x, 1e-3).grad_fn).__name__


@pytest.mark.parametrize("halves", [True, False])
def test_the_turn(halves: bool) -> None:
    x, angle = numbers(2, 3, 4, 6).transpose(1, 2), numbers(1, 1, 3, 3).detach()
    both = torch.cat((angle, angle), -1) if halves else angle.repeat_interleave(2, -1)
    table = both.cos(), both.sin(), halves
    assert torch.autograd.gradcheck(lambda x: turned(x, *table), x)
    assert torch.equal(turned(x, *table), turned(x.detach(), *table))
    assert "_Turned" in type(turned(x, *table).grad_fn).__name__


def test_overlapping_pieces() -> None:
    x, spans = numbers(1, 2, 9, 3), [(0, 4), (2, 9), (3, 5), (8, 9)]
    assert torch.autograd.gradcheck(lambda x: pieces(x, spans), x)
    for found, (low, high) in zip(pieces(x, spans), spans, strict=True):
        assert torch.equal(found, x[:, :, low:high])


def test_a_piece_without_a_say_has_no_gradient() -> None:
    x = numbers(1, 1, 6, 2)
    pieces(x, [(0, 4), (2, 6)])[1].sum().backward()
    assert torch.equal(x.grad, (torch.arange(6) >= 2).double()[None, None, :, None].expand_as(x))


@pytest.mark.parametrize("name", LONG)
def test_windows_by_chunks_have_eager_gradients(name: str) -> None:
    """More than one chunk, whose keys overlap."""
    position = torch.arange(203)[None]
    at = Coordinates(position, is_global=position % 50 == 7, length=torch.full_like(position, 203))
    found = []
    for backend in ("window", "eager"):
        inputs = [numbers(1, heads, 203, 8) for heads in (4, 2, 2)]
        plan = AttentionPlan(LONG[name], at, at, "partial", True, backend)
        out = BACKENDS[backend].run(*inputs, plan, Scoring(0.4))
        found.append(torch.autograd.grad((out * numbers(*out.shape).detach()).sum(), inputs))
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 1e-12 * other.abs().max()


def test_functional_transforms_get_the_formula() -> None:
    norm, x = norm_of(6), numbers(4, 6)
    expected = torch.autograd.functional.jacobian(norm, x)
    assert torch.allclose(torch.func.jacrev(norm)(x.detach()), expected, rtol=0, atol=1e-14)


@pytest.mark.unhooked
def test_compilers_get_the_formula() -> None:
    norm, x = norm_of(6), numbers(4, 6)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), norm(x))


def norm_of(width: int) -> RMSNorm:
    """With weights of 1."""
    norm = RMSNorm(c.RMSNorm(), width).double()
    torch.nn.init.ones_(norm.weight)
    return norm
