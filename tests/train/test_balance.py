"""The balance loss: of even routers, of padding, and of steps in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from qkv.config import LanguageModel, MixtureOfExperts, ModelConfig, training
from qkv.nn import Transformer
from qkv.nn.context import Routing
from qkv.nn.model import Output
from qkv.train.balance import balance_loss, gather, load, masks_of, together
from qkv.train.batch import Batch, Example
from qkv.train.loss import Loss, Setting, step_gradients

from .small import BARE, Case, apart, config, gradients, pairs, texts

OWN = LanguageModel(tied=False)
HOW = Loss(balance=3.0)


def experts(**changes: object) -> MixtureOfExperts:
    return MixtureOfExperts(n_experts=4, top_k=2, d_ff=8).override(changes)


def routed(logits: Tensor, top_k: int = 2) -> Routing:
    scores = logits.softmax(-1)
    best = scores.sort(dim=-1, descending=True, stable=True)
    return Routing(scores, best.indices[:, :top_k], best.values[:, :top_k])


def alone(routing: Routing, mask: Tensor | None = None) -> Tensor:
    return balance_loss([routing], [mask], load([routing], [mask]))


def test_b65_a_uniform_router_costs_the_coefficient() -> None:
    routing = routed(torch.zeros(6, 4, dtype=torch.float64))
    (sent,) = load([routing], [None])
    assert sent.sum() == 6 * 2
    assert (sent / sent.sum()).tolist() == [0.5, 0.5, 0, 0]
    assert alone(routing).item() == pytest.approx(1, abs=1e-15)
    three = [routing] * 3
    assert balance_loss(three, [None] * 3, load(three, [None] * 3)).item() == pytest.approx(1, abs=1e-15)


def test_b65_an_uneven_router_costs_more_and_has_a_gradient() -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0, 0.0]], dtype=torch.float64).repeat(8, 1).requires_grad_()
    found = alone(routed(logits))
    p = torch.tensor([3.0, 2.0, 0.0, 0.0], dtype=torch.float64).softmax(0)
    assert found.item() == pytest.approx(4 * float(0.5 * p[0] + 0.5 * p[1]), abs=1e-15)
    (gradient,) = torch.autograd.grad(found, logits)
    assert (gradient[:, :2] > 0).all()
    assert (gradient[:, 2:] < 0).all()


def test_b65_scores_are_summed_over_tokens_not_experts() -> None:
    """Two tokens, each sure of another expert: balanced, though each row of scores is not."""
    routing = routed(torch.tensor([[20.0, 0.0], [0.0, 20.0]], dtype=torch.float64), top_k=1)
    assert alone(routing).item() == pytest.approx(1, abs=1e-12)


def test_b66_padding_is_not_counted() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 4, dtype=torch.float64, generator=random)
    padding = torch.randn(100, 4, dtype=torch.float64, generator=random)
    mask = torch.arange(107) < 7
    padded = routed(torch.cat([logits, padding]))
    assert alone(padded, mask).item() == pytest.approx(alone(routed(logits)).item(), rel=1e-14)
    assert abs(alone(padded).item() - alone(padded, mask).item()) > 1e-3


def test_sigmoid_scores_are_divided_by_their_sum() -> None:
    routing = routed(torch.zeros(5, 4, dtype=torch.float64))
    sigmoid = Routing(torch.full((5, 4), 0.7, dtype=torch.float64), routing.experts, routing.weights)
    assert alone(sigmoid).item() == pytest.approx(1, abs=1e-15)


def test_the_load_of_parts_is_the_load_of_the_whole() -> None:
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    whole = load([routed(logits)], [None])
    parts = together(load([routed(part)], [None]) for part in logits.split(4))
    assert torch.equal(whole[0], parts[0])


def next_token(**changes: object) -> Case:
    return Case(training.NextToken(), config(OWN, ffn=experts(**changes)), BARE, [Example(one) for one in texts(5)])


CASES = {
    "softmax": next_token(),
    "sigmoid": next_token(score="sigmoid", scale=2.0),
    "encoder and decoder": Case(training.Seq2Seq(), config(OWN, "both", ffn=experts()), BARE, pairs(5)),
}


def lopsided(case: Case) -> Transformer:
    """The model with routers that are sure of themselves."""
    model = case.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.mul_(40)
    return model


def stepped(case: Case, parts: list[Batch]) -> tuple[float, float, dict[str, Tensor]]:
    model = lopsided(case)
    found = step_gradients(model, parts, HOW)
    assert found.balance is not None
    return found.mean.item(), found.balance.item(), gradients(model)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_b115_parts_have_the_balance_loss_of_the_step(name: str, rows: int) -> None:
    case = CASES[name]
    batch = case.batch()
    mean, balance, whole = stepped(case, [batch])
    mean_of_parts, balance_of_parts, parts = stepped(case, batch.split(rows))
    assert mean_of_parts == pytest.approx(mean, rel=1e-12)
    assert balance_of_parts == pytest.approx(balance, rel=1e-12)
    assert apart(parts, whole) < 1e-12


def test_a_balance_loss_per_part_would_be_another() -> None:
    """What the test above would find if loads were not gathered."""
    case = CASES["softmax"]
    model, batch = lopsided(case), case.batch()
    shares = []
    for part in batch.split(2):
        routing = model(**part.to("cpu").inputs).routing
        shares.append(balance_loss(routing, masks := masks_of(model.config, part.to("cpu")), load(routing, masks)))
    assert abs(HOW.balance * torch.stack(shares).mean().item() - stepped(case, [batch])[1]) > 1e-2


def test_every_layer_of_experts_has_its_mask() -> None:
    case = CASES["encoder and decoder"]
    batch = case.batch().to("cpu")
    routing = case.build()(**batch.inputs).routing
    masks = masks_of(case.model, batch)
    assert [mask.numel() for mask in masks if mask is not None] == [len(one.scores) for one in routing]
    assert torch.equal(masks[0], batch.inputs["source_valid"])
    assert torch.equal(masks[1], batch.inputs["valid"])


def with_dropout() -> ModelConfig:
    return next_token().model.override({"embedding.dropout": 0.3})


def test_dropout_leads_to_the_same_choices_in_both_passes() -> None:
    case, chosen = next_token(), []
    model = qkv.build(with_dropout(), seed=0).train()

    def run(*args: Tensor, **inputs: Tensor) -> Output:
        output = Transformer.forward(model, *args, **inputs)
        chosen.append(output.routing[0].experts)
        return output

    torch.manual_seed(5)
    step_gradients(model, case.batch().split(2), HOW, Setting(run=run))
    assert len(chosen) == 6
    assert all(torch.equal(first, second) for first, second in zip(chosen[:3], chosen[3:], strict=True))
    step_gradients(model, case.batch().split(2), HOW, Setting(run=run))
    assert not all(torch.equal(first, later) for first, later in zip(chosen[:3], chosen[6:9], strict=True))


def test_gathering_leaves_no_trace() -> None:
    case = next_token()
    model = qkv.build(with_dropout(), seed=0).train()
    before = torch.random.get_rng_state()
    parts = [part.to("cpu") for part in case.batch().split(2)]
    found = gather(lambda part: model(**part.inputs), model.config, parts, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not found[0].requires_grad
    assert found[0].sum() == 2 * sum(len(text) - 1 for text in texts(5))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_objectives_ask_for_it_only_where_there_are_experts() -> None:
    objective = training.NextToken(balance=0.02, smoothing=0.1, z_loss=1e-4)
    assert Loss.of(objective, next_token().model) == Loss(0.1, 1e-4, 0.02)
    assert Loss.of(objective, config(OWN)) == Loss(0.1, 1e-4, 0.0)
    assert Loss.of(training.Tag(), config(OWN)) == Loss()


def test_even_use_is_learned() -> None:
    """A router that starts lopsided is even after some steps of this loss alone."""
    torch.manual_seed(0)
    x = torch.randn(64, 8) + 0.5
    router = (torch.randn(4, 8) + torch.tensor([[2.0], [0], [0], [0]])).requires_grad_()
    optimizer = torch.optim.Adam([router], lr=0.05)
    shares = []
    for _ in range(150):
        routing = routed(x @ router.T)
        shares.append(np.asarray(load([routing], [None])[0] / 128).max())
        optimizer.zero_grad()
        torch.autograd.backward(alone(routing))
        optimizer.step()
    assert shares[0] > 0.45
    assert shares[-1] < 0.3
