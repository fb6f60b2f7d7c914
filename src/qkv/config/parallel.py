"""How the processes of one run share the work: the section `parallel` of a recipe.

    [parallel]
    data = "fsdp"        each of the other processes has rows of its own
    tensor = 8           so many hold one matrix together
    context = 2          so many hold one row together

The number of processes is that of data ranks x context x tensor. torchrun says how many there are, so that one recipe
serves one process (where the section says nothing) and a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qkv.config.attention import Attention, MultiHead
from qkv.config.base import Config, Positive, Problem
from qkv.config.block import Block
from qkv.config.ffn import Dense, Gated
from qkv.config.head import AdaptiveSoftmax, LanguageModel, MaskedLanguageModel, NoHead, TokenClassifier
from qkv.config.model import ModelConfig
from qkv.config.position import NoPositions, Rotary, Shaw

_PER_TOKEN = (LanguageModel, MaskedLanguageModel, TokenClassifier, AdaptiveSoftmax, NoHead)
"""Heads that decide about each token by itself."""


class Parallel(Config):
    """What is divided among the processes that torchrun starts."""

    data: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: each data rank has the whole model (Li 2020); `fsdp`: each keeps a share of weights, gradients and
    optimizer, and gathers a block when it is needed (Zhao 2023; ZeRO-3, Rajbhandari 2019)."""
    tensor: Positive = 1
    """How many processes share each matrix of attention and feed-forward networks (Shoeybi 2019, Megatron)."""
    context: Positive = 1
    """How many processes share each row of tokens; keys and values go around in a ring (Liu 2023, arXiv 2310.01889)."""

    @property
    def splits_weights(self) -> bool:
        """Whether no process has the whole model."""
        return self.data == "fsdp" or self.tensor > 1

    def misfits(self, model: ModelConfig) -> Iterator[Problem]:
        """What of an architecture cannot be divided so."""
        if self.context > 1:
            yield from self._context_misfits(model)
        for name, stack in model.stacks.items():
            for index, block in enumerate(stack.layers):
                where = f"of {name}.layers.{index}"
                if self.context > 1:
                    yield from (("context", f"{what} {where}") for what in _unringed(block.attention))
                if self.tensor > 1:
                    yield from (("tensor", f"{what} {where}") for what in _undivided(block, self.tensor))

    def _context_misfits(self, model: ModelConfig) -> Iterator[Problem]:
        if len(model.stacks) > 1:
            yield "context", "rows of an encoder-decoder are not divided: set it to 1"
        if not isinstance(model.head, _PER_TOKEN):
            yield "context", f"head {model.head.kind!r} reads whole rows, which no process has: set it to 1"


def _unringed(attention: Attention) -> Iterator[str]:
    """What a row cannot be divided for."""
    positions = attention.positions
    if attention.pattern.fields - {"position", "prefix_length"}:
        yield f"set it to 1: pattern {attention.pattern.kind!r} reads more than positions, in the attention"
    if isinstance(positions, Rotary) and positions.scaling.reads_length:
        yield f"set it to 1: scaling {positions.scaling.kind!r} reads the length of whole rows, in the attention"
    if isinstance(positions, Shaw) and positions.values:
        yield "set it to 1: 'shaw' positions on values need all weights of a row, in the attention"
    if attention.dropout:
        yield "set it to 1, or set to 0 the dropout of attention weights, which no process has whole,"


def _undivided(block: Block, ranks: int) -> Iterator[str]:
    """What matrices cannot be divided for."""
    for attention in (block.attention, block.cross_attention):
        if attention is not None:
            yield from _undivided_attention(attention, ranks)
    ffn = block.ffn
    if not isinstance(ffn, Dense | Gated):
        yield f"set it to 1, and data to 'fsdp': experts are divided by that only, not the {ffn.kind!r}"
    elif ffn.d_ff % ranks:
        yield f"must divide d_ff, {ffn.d_ff},"
    elif ffn.dropout:
        yield "set it to 1, or set to 0 the dropout inside the feed-forward network"


def _undivided_attention(attention: Attention, ranks: int) -> Iterator[str]:
    if not isinstance(attention, MultiHead) or attention.global_projections or attention.sinks:
        yield f"set it to 1: only plain heads are divided, not attention {attention.kind!r} as it is"
        return
    if not isinstance(attention.positions, NoPositions | Rotary):
        yield f"set it to 1: {attention.positions.kind!r} positions have values for all heads, in the attention"
    if attention.n_heads % ranks or attention.kv_heads % ranks:
        yield f"must divide the numbers of heads, {attention.n_heads} and {attention.kv_heads} of keys and values,"
    if attention.dropout:
        yield "set it to 1, or set to 0 the dropout of attention weights"
