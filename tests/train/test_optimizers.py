"""Each optimizer against its paper, transcribed in plain NumPy, and which parameters it treats how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import qkv
from parity.cases import CASES
from qkv.config import ModelConfig
from qkv.config.training import Adafactor, AdamW, Lion, Muon, Optimizer
from qkv.errors import ConfigError
from qkv.nn import Transformer
from qkv.train.optimizers import make_optimizer, newton_schulz, set_rate

Array = npt.NDArray[np.float64]
Path = Iterator[Array]
"""The weights after each step."""
RATE, STEPS = 0.03, 6
FACES: dict[str, ModelConfig] = {
    "gpt2": qkv.preset("gpt2").toy(),
    "experts": qkv.preset("deepseek-v3").toy(),
    "bert": qkv.preset("bert-base-uncased").toy(),
}


# The papers, one matrix or vector at a time


def paper_adamw(config: AdamW | Muon, w: Array, gradients: list[Array], rate: float, decay: float) -> Path:
    """Loshchilov and Hutter 2017, algorithm 2; the decay is multiplied by the rate."""
    (b1, b2), m, v = config.betas, np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        w = w - rate * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + config.eps) + decay * w)
        yield w


def paper_lion(config: Lion, w: Array, gradients: list[Array], rate: float, decay: float) -> Path:
    """Chen 2023, algorithm 2."""
    (b1, b2), m = config.betas, np.zeros_like(w)
    for g in gradients:
        w = w - rate * (np.sign(b1 * m + (1 - b1) * g) + decay * w)
        m = b2 * m + (1 - b2) * g
        yield w


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def paper_adafactor(config: Adafactor, w: Array, gradients: list[Array], rate: float, decay: float) -> Path:
    """Shazeer and Stern 2018, algorithms 4 (matrices) and 5 (vectors), with the sums of the paper."""
    r, c, v = np.zeros(w.shape[0]), np.zeros(w.shape[-1]), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        alpha = max(config.min_scale, rms(w)) * rate if config.relative_step else rate
        kept = 1 - t ** (-config.decay)
        square = g**2 + config.eps
        if w.ndim == 2 and config.factored:
            r = kept * r + (1 - kept) * square.sum(1)
            c = kept * c + (1 - kept) * square.sum(0)
            v = np.outer(r, c) / r.sum()
        else:
            v = kept * v + (1 - kept) * square
        u = g / np.sqrt(v)
        u = u / max(1.0, rms(u) / config.clip)
        w = w - alpha * u - rate * decay * w
        yield w


def paper_muon(config: Muon, w: Array, gradients: list[Array], rate: float, decay: float) -> Path:
    """Jordan 2024, with the scale of either convention."""
    b = np.zeros_like(w)
    rows, columns = w.shape
    for g in gradients:
        b = config.momentum * b + g
        x = g + config.momentum * b if config.nesterov else b
        x = x / (np.linalg.norm(x) + 1e-7)
        for _ in range(config.iterations):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        scale = {"rms": 0.2 * max(rows, columns) ** 0.5, "aspect": max(1.0, rows / columns) ** 0.5}[config.scale]
        w = w - rate * (scale * x + decay * w)
        yield w


PAPERS: dict[type[Optimizer], Callable[..., Path]] = {
    AdamW: paper_adamw,
    Lion: paper_lion,
    Adafactor: paper_adafactor,
    Muon: paper_muon,
}
CONFIGS = [
    AdamW(),
    AdamW(betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0),
    AdamW(betas=(0.0, 0.999), eps=1e-3, decay_embeddings=False),
    Adafactor(),
    Adafactor(relative_step=False, weight_decay=0.1),
    Adafactor(factored=False, clip=0.5, decay=1.0, weight_decay=0.05),
    Adafactor(min_scale=0.5, eps=1e-2),
    Lion(),
    Lion(betas=(0.95, 0.98), weight_decay=0.0),
    Muon(),
    Muon(scale="aspect", other_rate=0.015, nesterov=False, iterations=3, eps=1e-3),
]


def expected(config: Optimizer, sort: str, w: Array, gradients: list[Array]) -> list[Array]:
    """What the paper makes of a parameter of this sort."""
    decay = config.weight_decay if sort in {"hidden", "matrix"} or (sort == "table" and config.decay_embeddings) else 0
    if w.ndim == 3:  # experts: each as if it were alone
        each = [expected(config, sort, w[e], [g[e] for g in gradients]) for e in range(len(w))]
        return [np.stack(step) for step in zip(*each, strict=True)]
    if isinstance(config, Muon) and sort != "hidden":
        return list(paper_adamw(config, w, gradients, RATE * config.other_rate, decay))
    return list(PAPERS[type(config)](config, w, gradients, RATE, decay))


def in_float64(config: ModelConfig) -> Transformer:
    model = qkv.build(config, seed=3)
    return model.to(torch.float64)


def sort_of(role: str) -> str:
    """Written out again, by hand: what a role is to an optimizer."""
    if role in {"query", "key", "value", "attention_output", "ffn_input", "ffn_output"}:
        return "hidden"
    if role in {"token_embedding", "position_embedding", "segment_embedding"}:
        return "table"
    return "vector" if role in {"relative_embedding", "ones", "zeros"} else "matrix"


def gradients_for(model: Transformer, seed: int) -> dict[str, list[Array]]:
    random = np.random.default_rng(seed)
    size = 10.0 ** random.integers(-4, 2, STEPS)  # gradients of very different sizes
    return {n: [s * random.standard_normal(tuple(p.shape)) for s in size] for n, p in model.named_parameters()}


def largest_deviation(a: Array, b: Array) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("face", ["experts", "bert"])
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_several_steps_are_those_of_the_paper(config: Optimizer, face: str) -> None:
    model = in_float64(FACES[face])
    with torch.no_grad():
        for parameter in model.parameters():  # no parameter at 0, so that every one has a deviation
            parameter.add_(torch.linspace(0.01, 0.02, parameter.numel(), dtype=torch.float64).view_as(parameter))
    gradients = gradients_for(model, seed=1)
    roles = {name: parameter.role for name, parameter in model.config.shapes().items()}
    wanted = {
        name: expected(config, sort_of(roles[name]), p.detach().numpy().copy(), gradients[name])
        for name, p in model.named_parameters()
    }
    optimizer = make_optimizer(model, config)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name][step].copy())
        set_rate(optimizer, RATE)
        optimizer.step()
        for name, parameter in model.named_parameters():
            got = parameter.detach().numpy()
            assert largest_deviation(got, wanted[name][step]) < 1e-12, f"{name}, step {step + 1}"
    assert {p.dim() for p in model.parameters()} == ({1, 2, 3} if face == "experts" else {1, 2})


# Which parameters are treated how


@pytest.mark.parametrize("decay_embeddings", [True, False])
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_each_parameter_is_in_one_group_and_only_matrices_decay(config: ModelConfig, decay_embeddings: bool) -> None:
    model = Transformer(config)
    optimizer = make_optimizer(model, Lion(weight_decay=0.5, decay_embeddings=decay_embeddings))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert count == config.n_parameters
    for name, parameter in model.named_parameters():
        role = config.shapes()[name].role
        tables = 0.5 if decay_embeddings else 0.0
        wanted = {"hidden": 0.5, "matrix": 0.5, "table": tables, "vector": 0.0}[sort_of(role)]
        assert decay[id(parameter)] == wanted, name
        if name.endswith(("bias", "norm.weight", ".u", ".v", "sinks", "correction")) or parameter.dim() < 2:
            assert decay[id(parameter)] == 0.0, name


def test_muon_orthogonalises_hidden_matrices_and_nothing_else() -> None:
    for name, wanted in {
        "gpt2": {
            "attention.q_proj",
            "attention.k_proj",
            "attention.v_proj",
            "attention.o_proj",
            "up_proj",
            "down_proj",
        },
        "experts": {"experts.gate_proj", "experts.up_proj", "experts.down_proj", "kv_up_proj", "shared.up_proj"},
    }.items():
        model = Transformer(FACES[name])
        (hidden,) = [g for g in make_optimizer(model, Muon()).param_groups if g["sort"] == "hidden"]
        inside = {id(p) for p in hidden["params"]}
        names = [n for n, p in model.named_parameters() if id(p) in inside]
        assert all(any(part in n for n in names) for part in wanted)
        assert not [n for n in names if "embed" in n or "head" in n or "norm" in n or "router" in n or "bias" in n]


def test_the_rate_of_muons_other_weights_is_its_own() -> None:
    optimizer = make_optimizer(Transformer(FACES["gpt2"]), Muon(other_rate=0.25))
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}
    set_rate(optimizer, 0.02)
    assert {g["sort"]: g["lr"] for g in optimizer.param_groups} == {"hidden": 0.02, "table": 0.005, "vector": 0.005}


def test_frozen_parameters_are_left_out() -> None:
    model = Transformer(FACES["gpt2"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("decoder.layers.0.attention."))
    optimizer = make_optimizer(model, AdamW())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.decoder.layers[0].attention.parameters()}
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="optimizer: no parameter of the model asks for a gradient"):
        make_optimizer(model, AdamW())


def test_what_an_adapter_adds_is_sorted_by_its_axes() -> None:
    model = Transformer(FACES["gpt2"])
    model.requires_grad_(False)
    layer = model.decoder.layers[0].attention.q_proj
    layer.register_parameter("down", nn.Parameter(torch.zeros(2, 8)))
    layer.register_parameter("factor", nn.Parameter(torch.zeros(3)))
    groups = make_optimizer(model, Muon()).param_groups
    assert [(g["sort"], g["weight_decay"], len(g["params"])) for g in groups] == [("hidden", 0.1, 1), ("vector", 0, 1)]


def test_adamw_is_torchs_fused_one() -> None:
    optimizer = make_optimizer(Transformer(FACES["gpt2"]), AdamW())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all(group["fused"] for group in optimizer.param_groups)


# Steps as the loop makes them


def loss_of(model: Transformer, seed: int) -> torch.Tensor:
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, model.config.vocab_size, (2, 6)))
    loss: torch.Tensor = model(tokens).hidden.square().mean() + model(tokens).logits.square().mean()
    return loss


def steps(model: Transformer, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        set_rate(optimizer, 0.01 * (seed + 1))
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


@pytest.mark.parametrize("face", ["gpt2", "experts"])
@pytest.mark.parametrize("config", [AdamW(), Adafactor(), Adafactor(factored=False), Lion(), Muon()], ids=repr)
def test_a_saved_state_goes_on_bit_for_bit(config: Optimizer, face: str, tmp_path: Any) -> None:
    whole = qkv.build(FACES[face], seed=0)
    optimizer = make_optimizer(whole, config)
    steps(whole, optimizer, range(2))
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    steps(whole, optimizer, range(2, 4))

    resumed = qkv.build(FACES[face], seed=1)
    again = make_optimizer(resumed, config)
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    steps(resumed, again, range(2, 4))
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("config", [AdamW(), Adafactor(), Lion(), Muon()], ids=lambda c: c.kind)
def test_what_has_no_gradient_stays_and_zero_gradients_give_finite_weights(config: Optimizer) -> None:
    model = qkv.build(FACES["gpt2"], seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, config)
    set_rate(optimizer, 0.1)
    still = "decoder.layers.0.ffn.up_proj.weight"
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == still else torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.dim() > 1 or torch.equal(parameter, before[name]), "no gradient and no decay: no step"
    assert torch.equal(dict(model.named_parameters())[still], before[still])


@pytest.mark.parametrize("config", [AdamW(), Adafactor(relative_step=False), Lion(), Muon()], ids=lambda c: c.kind)
def test_training_lowers_a_loss(config: Optimizer) -> None:
    model = qkv.build(FACES["gpt2"], seed=0)
    tokens = torch.arange(12).view(2, 6)
    optimizer, losses = make_optimizer(model, config), []
    for _ in range(30):
        set_rate(optimizer, 0.01)
        logits = model(tokens).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix() -> None:
    model = qkv.build(FACES["experts"], seed=0)
    optimizer = make_optimizer(model, Adafactor())
    steps(model, optimizer, range(1))
    held = sum(x.numel() for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))
    shapes = [tuple(p.shape) for p in model.parameters() if p.grad is not None]
    assert held == sum(int(np.prod(s[:-2])) * (s[-2] + s[-1]) if len(s) > 1 else s[0] for s in shapes)


def test_a_closure_is_called_once_with_gradients() -> None:
    model = qkv.build(FACES["gpt2"], seed=0)
    optimizer = make_optimizer(model, Lion())
    called = []

    def closure() -> float:
        loss = loss_of(model, 0)
        loss.backward()
        called.append(loss.item())
        return loss.item()

    assert optimizer.step(closure) == called[0]
    assert len(called) == 1


# Newton and Schulz


def test_singular_values_come_near_one_and_vectors_stay() -> None:
    random = np.random.default_rng(0)
    for shape in ((12, 12), (8, 20), (20, 8)):
        u, _, vt = np.linalg.svd(random.standard_normal(shape), full_matrices=False)
        values = np.linspace(1, 30, min(shape))
        x = newton_schulz(torch.from_numpy(u * values @ vt), 5).numpy()
        inside = u.T @ x @ vt.T  # diagonal, if the singular vectors are the same
        assert np.abs(inside - np.diag(np.diag(inside))).max() < 1e-12
        assert np.diag(inside).min() > 0.65
        assert np.diag(inside).max() < 1.25


def test_in_bfloat16_it_is_near() -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 8, 12)))
    exact, rounded = newton_schulz(x, 5), newton_schulz(x.bfloat16(), 5)
    assert rounded.dtype == torch.bfloat16
    assert largest_deviation(rounded.double().numpy(), exact.numpy()) < 0.1
    model = qkv.build(FACES["gpt2"], seed=0)
    steps(model, make_optimizer(model, Muon(bf16=True)), range(1))
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())


def test_a_kind_without_a_rule_is_named() -> None:
    class Strange(Optimizer):
        kind: str = "strange"

    with pytest.raises(ConfigError, match="optimizer: 'strange' has no rule"):
        make_optimizer(Transformer(FACES["gpt2"]), Strange())
