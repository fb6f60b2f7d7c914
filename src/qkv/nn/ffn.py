"""Feed-forward networks, applied to each position on its own.

- dense: down(act(up(x))) (Vaswani 2017, eq. 2); gated: down(act(gate(x)) * up(x)) (Shazeer 2020).
- mixture of experts: each token passes its `top_k` best gated networks, weighted by the router's scores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkv import config as c
from qkv.nn.context import Context, Routing
from qkv.nn.registry import implements, make

ACTIVATIONS: dict[c.Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@implements(c.Dense)
class Dense(nn.Module):
    """up, activation, down."""

    def __init__(self, config: c.Dense, d_model: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(d_model, config.d_ff, bias=config.bias)
        self.down_proj = nn.Linear(config.d_ff, d_model, bias=config.bias)
        self.activation, self.dropout = ACTIVATIONS[config.activation], config.dropout

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Float[Tensor, "B T D"]:
        hidden = ctx.tap(self, "hidden", self.activation(self.up_proj(x)))
        return self.down_proj(F.dropout(hidden, self.dropout) if self.dropout and self.training else hidden)


@implements(c.Gated)
class Gated(nn.Module):
    """The gate's activation multiplies the up-projection."""

    def __init__(self, config: c.Gated, d_model: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, config.d_ff, bias=config.bias)
        self.up_proj = nn.Linear(d_model, config.d_ff, bias=config.bias)
        self.down_proj = nn.Linear(config.d_ff, d_model, bias=config.bias)
        self.activation, self.dropout = ACTIVATIONS[config.activation], config.dropout

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Float[Tensor, "B T D"]:
        hidden = ctx.tap(self, "hidden", self.activation(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(F.dropout(hidden, self.dropout) if self.dropout and self.training else hidden)


class Router(nn.Module):
    """Scores of tokens for experts, and the choice of `top_k` (Shazeer 2017; DeepSeek-V2 2.2, V3 2.1.2)."""

    def __init__(self, config: c.MixtureOfExperts, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, d_model))
        self.correction = nn.Parameter(torch.empty(config.n_experts)) if config.correction else None

    def forward(self, x: Float[Tensor, "N D"]) -> Routing:
        logits = F.linear(x, self.weight).to(torch.promote_types(x.dtype, torch.float32))
        scores = logits.softmax(-1) if self.config.score == "softmax" else logits.sigmoid()
        experts = self.choose(scores if self.correction is None else scores + self.correction)
        weights = scores.gather(1, experts)
        if self.config.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(scores, experts, (weights * self.config.scale).to(x.dtype))

    def choose(self, scores: Float[Tensor, "N E"]) -> Tensor:
        """The `top_k` best experts of each token, ties to the lower index: (N, K)."""
        groups = self.config.n_groups
        if groups > 1:
            grouped = scores.detach().unflatten(-1, (groups, -1))
            best = 1 if self.config.group_score == "max" else 2
            group_scores = grouped.sort(dim=-1, descending=True).values[..., :best].sum(-1)
            kept = _best(group_scores, self.config.top_groups)
            allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, kept, True)
            scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return _best(scores.detach(), self.config.top_k)


class Experts(nn.Module):
    """`n_experts` gated networks whose matrices are stacked along a leading axis."""

    def __init__(self, config: c.MixtureOfExperts, d_model: int) -> None:
        super().__init__()
        wide, narrow = (config.n_experts, config.d_ff, d_model), (config.n_experts, d_model, config.d_ff)
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(narrow))
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "N D"], routing: Routing) -> Float[Tensor, "N D"]:
        """Tokens sorted by expert, one product per expert that has any, results summed back in place."""
        n_experts, top_k = self.gate_proj.shape[0], routing.experts.shape[1]
        flat = routing.experts.flatten()
        order = flat.argsort(stable=True)
        tokens = order // top_k
        counts = flat.bincount(minlength=n_experts).tolist()
        outputs = []
        for expert, part in enumerate(x[tokens].split(counts)):
            gate, up = F.linear(part, self.gate_proj[expert]), F.linear(part, self.up_proj[expert])
            outputs.append(F.linear(self.activation(gate) * up, self.down_proj[expert]))
        weighted = torch.cat(outputs) * routing.weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, tokens, weighted)


@implements(c.MixtureOfExperts)
class MixtureOfExperts(nn.Module):
    """Router, experts, and the shared network. The routing of each call is left in the context, for balance losses."""

    def __init__(self, config: c.MixtureOfExperts, d_model: int) -> None:
        super().__init__()
        self.router = Router(config, d_model)
        self.experts = Experts(config, d_model)
        self.shared = make(config.shared, d_model) if config.shared else None

    def forward(self, x: Float[Tensor, "B T D"], ctx: Context) -> Float[Tensor, "B T D"]:
        flat = x.flatten(0, 1)
        routing = self.router(flat)
        ctx.routing.append(routing)
        ctx.tap(self, "routing", routing.scores)
        out = self.experts(flat, routing).view_as(x)
        return out if self.shared is None else out + self.shared(x, ctx)


def _best(scores: Tensor, n: int) -> Tensor:
    # Not topk: it leaves the order of ties open.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]
