"""Optimizers: which weights decay, which are orthogonalised, and the rules that torch does not have as their papers.

    adamw      m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2                      Loshchilov and Hutter 2017
               w <- w - rate (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
    adafactor  v is a row and a column of averages; steps relative to the weights     Shazeer and Stern 2018
    lion       w <- w - rate (sign(b1 m + (1 - b1) g) + decay w),  m <- b2 m + ...    Chen 2023
    muon       m <- mu m + g,  w <- w - rate (scale orthogonal(g + mu m) + decay w)   Jordan 2024

AdamW is torch's, in its fused form. Its Adafactor adds eps elsewhere than the paper and bounds the rate; its Muon is
bound to bfloat16 and to two axes: these two are written here, for stacked experts too. A tensor (E, a, b) is E
matrices, each updated as if it were alone.

`make_optimizer` sorts the parameters by their roles in `ModelConfig.shapes()`; `set_rate` gives all groups the rate of
a step. States have the dtype of their parameter, as torch's own, so that a saved one is restored to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from qkv.config import training as c
from qkv.config.parameter import Parameter, Role
from qkv.errors import ConfigError
from qkv.nn import Transformer

Group = dict[str, Any]
Sort = Literal["hidden", "matrix", "table", "vector"]

_SORTS: dict[Role, Sort] = {
    "query": "hidden", "key": "hidden", "value": "hidden", "attention_output": "hidden",
    "ffn_input": "hidden", "ffn_output": "hidden",
    "router": "matrix", "head": "matrix", "projection": "matrix",
    "token_embedding": "table", "position_embedding": "table", "segment_embedding": "table",
    # Biases of scores, whatever their shape: rows of heads (T5), of one head (Shaw), u and v (Transformer-XL).
    "relative_embedding": "vector", "ones": "vector", "zeros": "vector",
}  # fmt: skip
_FUSED = {"cpu", "cuda", "mps", "xpu"}
"""Where torch has a fused AdamW."""


def make_optimizer(model: Transformer, config: c.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of the parameters that ask for a gradient. Its rate is 0 until `set_rate`."""
    groups = parameter_groups(model, config)
    match config:
        case c.AdamW():
            devices = {p.device.type for group in groups for p in group["params"]}
            return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=devices <= _FUSED)
        case c.Adafactor():
            return Adafactor(groups, config)
        case c.Lion():
            return Lion(groups, config)
        case c.Muon():
            return Muon(groups, config)
    raise ConfigError(f"optimizer: {config.kind!r} has no rule in qkv.train.optimizers; choose another kind")


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the schedule's rate, or its own multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_factor"]


def parameter_groups(model: Transformer, config: c.Optimizer) -> list[Group]:
    """The trainable parameters, each in exactly one group, sorted by what they are for."""
    table = model.config.shapes()
    sorts: dict[Sort, list[Tensor]] = {"hidden": [], "matrix": [], "table": [], "vector": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sorts[_sort(table.get(name), parameter)].append(parameter)
    groups = []
    for sort, members in sorts.items():
        decays = sort in {"hidden", "matrix"} or (sort == "table" and config.decay_embeddings)
        group: Group = {
            "params": members,
            "sort": sort,
            "weight_decay": config.weight_decay if decays else 0.0,
            "rate_factor": 1.0,
        }
        if isinstance(config, c.Muon) and sort != "hidden":
            group["rate_factor"] = config.other_rate
        groups.append(group)
    placed = [id(p) for group in groups for p in group["params"]]
    wanted = {id(p) for p in model.parameters() if p.requires_grad}
    assert sorted(placed) == sorted(wanted), "each parameter is in exactly one group"
    if not placed:
        raise ConfigError("optimizer: no parameter of the model asks for a gradient; unfreeze some")
    return [group for group in groups if group["params"]]


def _sort(known: Parameter | None, parameter: Tensor) -> Sort:
    """What a parameter is, by its role. An adapter's stand in no table: those with two axes are hidden matrices."""
    if known is None:
        return "hidden" if parameter.dim() > 1 else "vector"
    return _SORTS[known.role]


class _Rule(torch.optim.Optimizer):
    """w <- w - rate (update + decay w), one parameter after the other, in place."""

    def __init__(self, groups: list[Group]) -> None:
        # Copies: torch completes the groups that it is given in place.
        super().__init__([dict(group) for group in groups], {"lr": 0.0, "weight_decay": 0.0, "rate_factor": 1.0})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    update = self._update(weights, weights.grad, group)
                    weights.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        return loss

    def _update(self, weights: Tensor, gradient: Tensor, group: Group) -> Tensor:
        raise NotImplementedError


class Lion(_Rule):
    """Chen 2023, algorithm 2. State: `average`, of the parameter's shape."""

    def __init__(self, groups: list[Group], config: c.Lion) -> None:
        super().__init__(groups)
        self._betas = config.betas

    def _update(self, weights: Tensor, gradient: Tensor, group: Group) -> Tensor:
        now, kept = self._betas
        average = _held(self.state[weights], "average", gradient)
        update = average.lerp(gradient, 1 - now).sign_()
        average.lerp_(gradient, 1 - kept)
        return update


class Adafactor(_Rule):
    """Shazeer and Stern 2018, algorithms 4 and 5.

    State: `step`, and `row` (..., a, 1) with `column` (..., 1, b), or `square` of the parameter's shape.
    """

    def __init__(self, groups: list[Group], config: c.Adafactor) -> None:
        super().__init__(groups)
        self._config = config

    def _update(self, weights: Tensor, gradient: Tensor, group: Group) -> Tensor:
        state, config = self.state[weights], self._config
        state["step"] = state.get("step", 0) + 1
        update = gradient * self._inverse_root(state, gradient, 1 - state["step"] ** -config.decay)
        update /= (_size(update) / config.clip).clamp(min=1.0)
        return update.mul_(_size(weights).clamp(min=config.min_scale)) if config.relative_step else update

    def _inverse_root(self, state: dict[str, Any], gradient: Tensor, kept: float) -> Tensor:
        """1 / sqrt(V), of the averages of squares after this gradient."""
        square = gradient.square().add_(self._config.eps)
        if gradient.dim() < 2 or not self._config.factored:
            return _averaged(state, "square", square, kept).rsqrt()
        row = _averaged(state, "row", square.mean(dim=-1, keepdim=True), kept)
        column = _averaged(state, "column", square.mean(dim=-2, keepdim=True), kept)
        # Two roots, not that of the product: row * column of squares near eps, 1e-60, is 0 in fp32. The paper's sums
        # are means here, so their total divides as a mean.
        return (row / row.mean(dim=-2, keepdim=True)).rsqrt() * column.rsqrt()


def _averaged(state: dict[str, Any], name: str, new: Tensor, kept: float) -> Tensor:
    """The running average after `new`."""
    return _held(state, name, new).lerp_(new, 1 - kept)


def _held(state: dict[str, Any], name: str, like: Tensor) -> Tensor:
    """A tensor of the state, zeros at first."""
    if name not in state:
        state[name] = torch.zeros_like(like)
    tensor: Tensor = state[name]
    return tensor


def _size(x: Tensor) -> Tensor:
    """The root mean square of a vector, or of each matrix, shaped to multiply it."""
    axes = tuple(range(-min(x.dim(), 2), 0))
    return x.square().mean(dim=axes, keepdim=True).sqrt() if axes else x.abs()


class Muon(_Rule):
    """Jordan 2024 for the group of hidden matrices, AdamW for the others.

    State: `momentum` of the parameter's shape; of the others `step`, `average`, `square`.
    """

    def __init__(self, groups: list[Group], config: c.Muon) -> None:
        super().__init__(groups)
        self._config = config

    def _update(self, weights: Tensor, gradient: Tensor, group: Group) -> Tensor:
        state = self.state[weights]
        return self._orthogonal(state, gradient) if group["sort"] == "hidden" else self._adam(state, gradient)

    def _orthogonal(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        config = self._config
        momentum = _held(state, "momentum", gradient).mul_(config.momentum).add_(gradient)
        direction = gradient + config.momentum * momentum if config.nesterov else momentum
        rows, columns = gradient.shape[-2:]
        scale = 0.2 * math.sqrt(max(rows, columns)) if config.scale == "rms" else math.sqrt(max(1.0, rows / columns))
        work = direction.bfloat16() if config.bf16 else direction
        return newton_schulz(work, config.iterations).to(gradient.dtype) * scale

    def _adam(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        first, second = self._config.betas
        step = state["step"] = state.get("step", 0) + 1
        average = _averaged(state, "average", gradient, first) / (1 - math.pow(first, step))
        square = _averaged(state, "square", gradient.square(), second) / (1 - math.pow(second, step))
        return average.div_(square.sqrt_().add_(self._config.eps))


def newton_schulz(matrices: Tensor, iterations: int) -> Tensor:
    """Matrices (..., a, b) of the same singular vectors, all singular values brought near 1.

    The quintic x <- 3.4445 x - 4.775 x^3 + 2.0315 x^5 of each singular value, as products of the matrix (Jordan 2024).
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices  # the smaller Gram matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
