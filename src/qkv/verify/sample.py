"""What the paths are run on: random tokens, and whatever else the model reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qkv.config import ModelConfig, Stack
from qkv.nn import Transformer

PER_TOKEN = ("segments", "global_tokens")


@dataclass
class Sample:
    """Arguments of one call."""

    tokens: Tensor
    more: dict[str, Tensor] = field(default_factory=dict)

    def run(self, model: Transformer, **options: Any) -> Tensor:
        """The model's logits, or its hidden states where it has no logits."""
        with torch.no_grad():
            out = model(self.tokens, **self.more, **options)
        result: Tensor = out.hidden if out.logits is None else out.logits
        return result

    def arrays(self) -> dict[str, Any]:
        """For the oracle."""
        return {"tokens": self.tokens.numpy(), **{name: value.numpy() for name, value in self.more.items()}}

    def row(self, index: int, length: int) -> Sample:
        """One row alone, its first `length` tokens."""
        return self.rows([index]).part(0, length)

    def rows(self, indices: list[int]) -> Sample:
        """These rows, in this order."""
        return Sample(self.tokens[indices], {name: value[indices] for name, value in self.more.items()})

    def part(self, start: int, stop: int) -> Sample:
        """The tokens from `start` on, before `stop`; what is said once of a row is said with its first token."""
        more = {n: v[:, start:stop] if n in PER_TOKEN else v for n, v in self.more.items()}
        if start:
            more = {name: value for name, value in more.items() if name in PER_TOKEN}
        return Sample(self.tokens[:, start:stop], more)


def sample(config: ModelConfig, batch: int, length: int, seed: int) -> Sample:
    """Seeded random inputs for this model."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, length), generator=draw)
    reads = frozenset().union(*(b.attention.pattern.fields for s in config.stacks.values() for b in s.blocks))
    more: dict[str, Tensor] = {}
    if len(config.stacks) == 2:
        more["source"] = torch.randint(config.vocab_size, (batch, length), generator=draw)
    elif config.embedding.n_segments:
        more["segments"] = (torch.arange(length) >= length // 2).long().clamp(max=config.embedding.n_segments - 1)
        more["segments"] = more["segments"].expand(batch, -1).contiguous()
    if "prefix_length" in reads:
        more["prefix_length"] = torch.full((batch,), length // 3)
    if "is_global" in reads:
        more["global_tokens"] = (torch.arange(length) == 0).expand(batch, -1).contiguous()
    return Sample(tokens, more)


def truncated(config: ModelConfig, depth: int) -> ModelConfig:
    """The same model with at most `depth` layers in each stack."""

    def cut(stack: Stack | None) -> dict[str, Any] | None:
        if stack is None:
            return None
        kept = min(depth, stack.n_layers)
        return stack.to_dict() | {"n_layers": kept, "first": [block.to_dict() for block in stack.first[:kept]]}

    return config.override({name: cut(stack) for name, stack in config.stacks.items()})


def part_of(model: Transformer, config: ModelConfig) -> Transformer:
    """The first layers of `model` as a model of `config`, sharing its modules: what is wrong in them stays wrong."""
    with torch.device("meta"):
        part = Transformer(config)
    for name, child in model.named_children():
        if name not in ("encoder", "decoder"):
            setattr(part, name, child)
            continue
        stack, whole = part.get_submodule(name), child
        assert isinstance(whole.layers, torch.nn.ModuleList)
        stack.layers = whole.layers[: len(stack.layers)]  # type: ignore[arg-type]
        stack.norm, stack.positions, stack.shared = whole.norm, whole.positions, whole.shared
    return part.eval()
