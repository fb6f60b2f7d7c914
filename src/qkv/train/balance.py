"""The balance loss of experts: it grows when a router sends most tokens to a few of them.

    L = coefficient * E * sum_i f_i P_i,    f_i = pairs (token, choice) sent to expert i / all pairs,
                                            P_i = mean over tokens of the router's score for expert i

(Fedus 2021, Switch, equation 4; DeepSeek-V2, 2.2.3.) f and P both sum to 1 - sigmoid scores are divided by their sum
first (DeepSeek-V3, equation 19) - so that L of an even router is the coefficient, whatever E and the number of choices.
Padding is in neither. With several layers of experts, L is the mean of theirs.

f has no gradient; only P has. So L of a step that is cut into parts is the sum over parts of

    coefficient * E * sum_i f_i * (sum over the part's tokens of the scores for i) / tokens of the step

with f of the whole step: exactly L of the step in one batch, provided that f is known before the first part's backward.
`gather` finds it by running the parts once without gradients, with the random numbers that the second pass will draw
again, so that dropout leads to the same choices; a step in one part needs no such pass. Averaging a loss per part
instead asks each part to be balanced for itself, which is another objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from qkv.config import MixtureOfExperts, ModelConfig
from qkv.nn.context import Routing
from qkv.nn.model import Output
from qkv.train.batch import Tensors

Load = list[Tensor]
"""For each layer of experts (E,): how many pairs of a token and one of its choices went to each."""


def load(routing: Sequence[Routing], masks: Sequence[Tensor | None]) -> Load:
    """The load of one forward; `masks`: of each layer, which tokens are real (any shape of N), or None if all are."""
    return [_load(one, mask) for one, mask in zip(routing, masks, strict=True)]


def _load(routing: Routing, mask: Tensor | None) -> Tensor:
    n_experts = routing.scores.shape[1]
    sent = torch.zeros(n_experts, dtype=torch.float64, device=routing.scores.device)
    real = torch.ones_like(routing.experts, dtype=sent.dtype)
    if mask is not None:
        real = real * mask.reshape(-1, 1)
    return sent.scatter_add(0, routing.experts.flatten(), real.flatten())


def together(loads: Iterable[Load]) -> Load:
    """The load of several forwards."""
    return [torch.stack(layer).sum(0) for layer in zip(*loads, strict=True)]


def balance_loss(routing: Sequence[Routing], masks: Sequence[Tensor | None], whole: Load) -> Tensor:
    """This forward's share of the loss of the step whose load is `whole`, for a coefficient of 1."""
    layers = zip(routing, masks, whole, strict=True)
    return torch.stack([_balance(one, mask, sent) for one, mask, sent in layers]).mean()


def _balance(routing: Routing, mask: Tensor | None, sent: Tensor) -> Tensor:
    n_experts, top_k = routing.scores.shape[1], routing.experts.shape[1]
    pairs = sent.sum().clamp(min=1)  # a step of nothing but padding has none
    scores = routing.scores / routing.scores.sum(-1, keepdim=True)
    if mask is not None:
        scores = scores * mask.reshape(-1, 1)
    fraction = (sent / pairs).to(scores.dtype)
    mean = scores.sum(0) / (pairs / top_k).to(scores.dtype)
    return n_experts * (fraction * mean).sum()


def masks_of(config: ModelConfig, batch: Tensors) -> list[Tensor | None]:
    """Which tokens are real, for each layer of experts in the order in which they run."""
    both = config.encoder is not None and config.decoder is not None
    masks: list[Tensor | None] = []
    for name, stack in config.stacks.items():
        mask = batch.inputs.get("source_valid" if both and name == "encoder" else "valid")
        masks += [mask for block in stack.blocks if isinstance(block.ffn, MixtureOfExperts)]
    return masks


def gather(
    run: Callable[[Tensors], Output], config: ModelConfig, parts: Iterable[Tensors], device: torch.device
) -> Load:
    """The load of a whole step, by a pass without gradients; the state of random numbers is as it was before."""
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        return together(load(run(part).routing, masks_of(config, part)) for part in parts)
