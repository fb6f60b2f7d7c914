"""Losses: sums over real targets whose gradient does not depend on how a step is cut, whole logits or not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qkv
from qkv.config import NextSentence, NoHead, training
from qkv.errors import DataError
from qkv.evaluate import disjoint_windows
from qkv.nn import Transformer, head
from qkv.nn.registry import make as make_module
from qkv.train import loss
from qkv.train.batch import IGNORE, Batch, Example
from qkv.train.loss import (
    Loss,
    Matrix,
    Setting,
    adaptive_cross_entropy,
    cross_entropy,
    linear_cross_entropy,
    loss_sum,
    span_cross_entropy,
    step_gradients,
)

from .small import BARE, CASES, OWN, SIZE, TIED, Case, apart, config, gradients, texts

HOW = Loss(smoothing=0.1, z=1e-2)
EVERY = pytest.mark.parametrize("name", CASES)


def stepped(case: Case, parts: list[Batch], how: Loss = HOW) -> tuple[float, dict[str, Tensor]]:
    model = case.build()
    return step_gradients(model, parts, how).mean.item(), gradients(model)


# Any split


@EVERY
@pytest.mark.parametrize("large", [1, 1000], ids=["chunked", "whole"])
def test_b115_any_split_gives_the_same_gradient(name: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LARGE", large)
    case = CASES[name]
    batch = case.batch()
    assert "valid" in batch.inputs
    mean, whole = stepped(case, [batch])
    for rows in (1, 3):
        mean_of_parts, parts = stepped(case, batch.split(rows))
        assert mean_of_parts == pytest.approx(mean, rel=1e-12)
        assert apart(parts, whole) < 1e-12


@EVERY
def test_the_loss_is_the_mean_over_real_targets(name: str) -> None:
    """Against torch's own mean of whole logits, row by row without padding."""
    case = CASES[name]
    batch, model = case.batch(), case.build()
    logits, targets = [], []
    for row in batch.split(1):
        part = row.to("cpu")
        real = part.inputs.get("valid", torch.ones_like(part.inputs["tokens"]).bool())[0]
        inputs = {key: value[:, : int(real.sum())] for key, value in part.inputs.items() if key in PER_TOKEN}
        inputs |= {key: value for key, value in part.inputs.items() if key not in (*PER_TOKEN, "valid")}
        found = model(**inputs).logits
        if case.objective.kind == "span":
            found = found.transpose(1, 2)
        logits.append(F.pad(found.flatten(0, -2), (0, SIZE - found.shape[-1]), value=-torch.inf))
        flat = part.targets.reshape(-1)
        targets.append(flat[: len(logits[-1])])
    expected = F.cross_entropy(torch.cat(logits), torch.cat(targets))
    total, count = loss_sum(model, batch.to("cpu"))
    assert count == batch.count == int((torch.cat(targets) != IGNORE).sum())
    assert (total / count).item() == pytest.approx(expected.item(), rel=1e-12)


PER_TOKEN = ("tokens", "documents", "segments")


@EVERY
def test_what_padding_holds_does_not_matter(name: str) -> None:
    case = CASES[name]
    batch = case.batch()
    other = {key: value.copy() for key, value in batch.inputs.items()}
    for mask, key in (("valid", "tokens"), ("source_valid", "source")):
        if mask in other:
            other[key][~other[mask]] = SIZE - 1
    assert stepped(case, [replace(batch, inputs=other)])[0] == stepped(case, [batch])[0]


def test_b128_the_loss_is_the_log_of_the_perplexity() -> None:
    text = np.concatenate(texts(12))[:97]
    model = CASES["next-token"].build()
    windows = [Example(text[start : start + 17]) for start in range(0, 96, 16)]
    batch = replace(CASES["next-token"], examples=windows).batch()
    total, count = loss_sum(model, batch.to("cpu"))
    score = disjoint_windows(model.float(), torch.from_numpy(text), 16)
    assert count == score.tokens == 96
    assert math.exp(total.item() / count) == pytest.approx(math.exp(score.loss), rel=1e-5)


# Models learn


@EVERY
def test_each_objective_is_learned_by_heart(name: str) -> None:
    case = CASES[name]
    batch, model = case.batch(), case.build(torch.float32)
    pair_head = None
    if batch.pairs is not None:
        pair_head = make_module(NextSentence(), SIZE, case.model.d_model)
        torch.manual_seed(0)
        for parameter in pair_head.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    extra = [] if pair_head is None else list(pair_head.parameters())
    optimizer = torch.optim.Adam([*model.parameters(), *extra], lr=1e-2)
    found = []
    for _ in range(100):
        optimizer.zero_grad()
        found.append(step_gradients(model, [batch], setting=Setting(pair_head=pair_head)))
        optimizer.step()
    assert found[-1].mean < 0.1 < found[0].mean
    if pair_head is not None:
        assert found[0].pairs is not None
        assert found[-1].pairs is not None
        assert found[-1].pairs < 0.1 < found[0].pairs


# The second head of pairs


def pair_step(rows: int) -> tuple[float, dict[str, Tensor]]:
    case = CASES["masked, pairs"]
    model, batch = case.build(), case.batch()
    torch.manual_seed(3)
    read = make_module(NextSentence(), SIZE, case.model.d_model).double()
    for parameter in read.parameters():
        torch.nn.init.normal_(parameter)
    found = step_gradients(model, batch.split(rows), HOW, Setting(pair_head=read))
    assert found.pairs is not None
    return found.pairs.item(), gradients(torch.nn.ModuleList([model, read]))


def test_b115_the_loss_of_pairs_is_per_row() -> None:
    whole = pair_step(5)
    for rows in (1, 2):
        pairs, parts = pair_step(rows)
        assert pairs == pytest.approx(whole[0], rel=1e-12)
        assert apart(parts, whole[1]) < 1e-12


def test_a_head_for_pairs_needs_pairs() -> None:
    case = CASES["masked"]
    read = make_module(NextSentence(), SIZE, case.model.d_model)
    with pytest.raises(DataError, match="next_sentence"):
        step_gradients(case.build(), [case.batch()], setting=Setting(pair_head=read))


# The chunked loss


def problem(rows: int = 23, width: int = 5, size: int = 37, *, bias: bool = True) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random).requires_grad_()

    tensors = {"hidden": normal(rows, width), "weight": normal(size, width)}
    return tensors | ({"bias": normal(size)} if bias else {})


def wanted(rows: int = 23, size: int = 37) -> Tensor:
    targets = torch.randint(size, (rows,), generator=torch.Generator().manual_seed(1))
    targets[::5] = IGNORE
    return targets


def plain(tensors: dict[str, Tensor], softcap: float | None, how: Loss) -> Tensor:
    logits = F.linear(tensors["hidden"], tensors["weight"], tensors.get("bias"))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return cross_entropy(logits, wanted(), how)


def differentiated(total: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(tensors, torch.autograd.grad(total, list(tensors.values())), strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("how", [Loss(), Loss(smoothing=0.1), Loss(z=0.1), HOW])
@pytest.mark.parametrize("chunk", [1, 7, 23, 256])
def test_chunks_equal_whole_logits(chunk: int, how: Loss, softcap: float | None, bias: bool) -> None:
    tensors = problem(bias=bias)
    matrix = Matrix(tensors["weight"], tensors.get("bias"), softcap)
    expected = plain(tensors, softcap, how)
    found = linear_cross_entropy(tensors["hidden"], matrix, wanted(), how, chunk=chunk)
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    grads = differentiated(expected, tensors)
    assert apart(differentiated(found, tensors), grads) < 1e-12
    weighted = linear_cross_entropy(tensors["hidden"], matrix, wanted(), how, 0.25, chunk)
    assert apart(differentiated(weighted * 4, tensors), grads) < 1e-12


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_chunks_pass_gradcheck(softcap: float | None) -> None:
    tensors, targets = problem(5, 3, 7), wanted(5, 7)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, Matrix(weight, bias, softcap), targets, HOW, 0.5, 2)

    assert torch.autograd.gradcheck(run, tuple(tensors.values()))


def test_a_tied_matrix_gets_both_gradients() -> None:
    tensors = problem(bias=False)
    tokens = torch.arange(23) % 37
    hidden = F.embedding(tokens, tensors["weight"])
    expected = torch.autograd.grad(plain(tensors | {"hidden": hidden}, None, HOW), tensors["weight"])[0]
    hidden = F.embedding(tokens, tensors["weight"])
    found = linear_cross_entropy(hidden, Matrix(tensors["weight"]), wanted(), HOW, chunk=8)
    assert apart({"": torch.autograd.grad(found, tensors["weight"])[0]}, {"": expected}) < 1e-12


def test_only_what_is_asked_is_differentiated() -> None:
    tensors = problem()
    frozen = Matrix(tensors["weight"].detach(), tensors["bias"].detach())
    (found,) = torch.autograd.grad(
        linear_cross_entropy(tensors["hidden"], frozen, wanted(), chunk=8), tensors["hidden"]
    )
    expected = differentiated(plain(tensors, None, Loss()), tensors)["hidden"]
    assert apart({"": found}, {"": expected}) < 1e-12
    with torch.no_grad():
        found = linear_cross_entropy(tensors["hidden"], Matrix(tensors["weight"], tensors["bias"]), wanted())
    assert not found.requires_grad
    assert found.item() == pytest.approx(plain(tensors, None, Loss()).item(), rel=1e-13)


def test_no_tokens_cost_nothing() -> None:
    tensors = problem()
    found = linear_cross_entropy(tensors["hidden"][:0], Matrix(tensors["weight"], tensors["bias"]), wanted()[:0])
    assert found.item() == 0
    grads = torch.autograd.grad(found, [tensors["weight"], tensors["bias"]])
    assert all(not grad.any() for grad in grads)


def test_large_logits_stay_finite() -> None:
    tensors = {name: (value * 300).detach().requires_grad_() for name, value in problem().items()}
    found = linear_cross_entropy(tensors["hidden"], Matrix(tensors["weight"], tensors["bias"]), wanted(), chunk=8)
    assert apart(differentiated(found, tensors), differentiated(plain(tensors, None, Loss()), tensors)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_exact_as_the_plain_loss(dtype: torch.dtype) -> None:
    tensors = {name: value.detach().float().requires_grad_() for name, value in problem(bias=False).items()}
    exact = differentiated(plain(tensors, None, Loss()), tensors)
    with torch.autocast("cpu", dtype):
        whole = plain(tensors, None, Loss())
        found = linear_cross_entropy(tensors["hidden"], Matrix(tensors["weight"]), wanted(), Loss(), 2**-16, chunk=8)
    scaled = differentiated(found * 2.0**16, tensors)
    assert {grad.dtype for grad in scaled.values()} == {torch.float32}
    assert apart(scaled, exact) < 2 * apart(differentiated(whole, tensors), exact) + 1e-4


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            self.elements = max(self.elements, one.numel() if isinstance(one, Tensor) else 0)
        return out


@pytest.mark.parametrize("which", [TIED, OWN])
def test_a_large_vocabulary_never_has_whole_logits(which: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = config(which).override({"vocab_size": 8192})
    case = Case(training.NextToken(), model, BARE, [Example(text) for text in texts(40)])
    batch = case.batch()

    def largest() -> int:
        with Largest() as seen:
            step_gradients(case.build(torch.float32), [batch])
        return seen.elements

    monkeypatch.setattr(loss, "chunk_size", lambda size, device: 16)
    assert batch.count > 300
    assert largest() <= 16 * 8192  # a chunk, or the matrix
    monkeypatch.setattr(loss, "LARGE", 10**9)
    assert largest() >= batch.count * 8192


@pytest.mark.parametrize(("size", "tokens"), [(4096, 256), (32_000, 256), (49_152, 128), (152_000, 64), (10**6, 64)])
def test_chunks_are_smaller_where_vocabularies_are_larger(size: int, tokens: int) -> None:
    assert loss.chunk_size(size, torch.device("cpu")) == tokens


# Heads with losses of their own


@pytest.mark.parametrize("how", [Loss(), HOW])
def test_an_adaptive_softmax_computes_only_what_is_asked(how: Loss) -> None:
    case = CASES["next-token, adaptive"]
    model = case.build()
    read = model.head
    assert isinstance(read, head.AdaptiveSoftmax)
    hidden = torch.randn(30, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    targets = torch.arange(30) * 2
    targets[3] = IGNORE
    table = model.embed.tokens
    assert table is not None
    found = adaptive_cross_entropy(read, hidden, table, targets, how)
    log_p, _ = read(hidden[None], table, torch.ones(1, 30, dtype=torch.bool))
    picked = -log_p[0].gather(1, targets.clamp(min=0)[:, None])[:, 0]
    losses = (1 - how.smoothing) * picked - how.smoothing * log_p[0].mean(-1)  # its lse is 0
    expected = (losses * (targets != IGNORE)).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    leaves = {"hidden": hidden, **dict(read.named_parameters())}
    assert apart(differentiated(found, leaves), differentiated(expected, leaves)) < 1e-12


def test_rare_clusters_are_left_alone_where_nothing_is_asked_of_them() -> None:
    case = CASES["next-token, adaptive"]
    model = case.build()
    batch = case.batch()
    few = replace(batch, targets=np.where(batch.targets == IGNORE, IGNORE, 3))
    total, _ = loss_sum(model, few.to("cpu"))
    torch.autograd.backward(total)
    read = model.head
    assert isinstance(read, head.AdaptiveSoftmax)
    grads = [bias.grad for bias in read.biases]
    assert grads[0] is not None
    assert grads[0].any()
    assert all(grad is None or not grad.any() for grad in grads[1:])


def test_a_span_is_looked_for_among_real_tokens_only() -> None:
    logits = torch.zeros(1, 4, 2, dtype=torch.float64)
    logits[0, 3] = 50.0
    valid = torch.tensor([[True, True, True, False]])
    found = span_cross_entropy(logits, torch.tensor([[0, 2]]), valid)
    assert found.item() == pytest.approx(2 * math.log(3), rel=1e-12)
    assert span_cross_entropy(logits, torch.tensor([[0, IGNORE]]), valid).item() == pytest.approx(
        math.log(3), rel=1e-12
    )
    assert span_cross_entropy(logits, torch.tensor([[0, 2]]), None).item() > 90


# What cannot be


def test_a_step_without_targets_is_refused() -> None:
    case = CASES["answers"]
    batch = case.batch()
    with pytest.raises(DataError, match="nothing to predict"):
        step_gradients(case.build(), [replace(batch, targets=np.full_like(batch.targets, IGNORE))])


def test_a_part_without_targets_is_not() -> None:
    case = CASES["answers"]
    batch = case.batch()
    targets = batch.targets.copy()
    targets[0] = IGNORE
    batch = replace(batch, targets=targets)
    assert batch.split(1)[0].count == 0
    assert apart(stepped(case, batch.split(1))[1], stepped(case, [batch])[1]) < 1e-12


def test_a_model_without_logits_is_refused() -> None:
    model = qkv.build(config(NoHead(), "encoder"), seed=0)
    with pytest.raises(DataError, match="'none' has no logits"):
        loss_sum(model, CASES["classify"].batch().to("cpu"))


def test_wrappers_and_scales_are_asked() -> None:
    case = CASES["next-token"]
    calls, model = [], case.build()

    def run(*args: Any, **inputs: Any) -> Any:
        calls.append(len(inputs["tokens"]))
        return Transformer.forward(model, *args, **inputs)

    batch = case.batch()
    found = step_gradients(model, batch.split(2), setting=Setting(run=run, scale=lambda total: total * 8))
    assert calls == [2, 2, 1]
    mean, whole = stepped(case, [batch], Loss())
    assert found.mean.item() == pytest.approx(mean, rel=1e-12)
    assert apart(gradients(model), {name: grad * 8 for name, grad in whole.items()}) < 1e-12


def test_a_process_may_know_of_more_targets() -> None:
    case = CASES["next-token"]
    first, second = case.batch().split(3)
    whole = stepped(case, [case.batch()])[1]
    model, count = case.build(), first.count + second.count
    for part in (first, second):
        step_gradients(model, [part], HOW, Setting(count=count))
    assert apart(gradients(model), whole) < 1e-12


def test_a_frozen_matrix_gets_no_gradient_and_hidden_the_same() -> None:
    """As under LoRA: what is below the head learns, the head does not."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 8, dtype=torch.float64), torch.randn(50, 8, dtype=torch.float64)
    targets, found = torch.randint(0, 50, (70,)), []
    for moves in (True, False):
        below, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_(moves)
        linear_cross_entropy(below, Matrix(matrix, None, None), targets, chunk=32).backward()  # type: ignore[no-untyped-call]
        found.append(below.grad)
        assert (matrix.grad is not None) == moves
    assert torch.equal(*found)
