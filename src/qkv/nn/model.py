"""The Transformer: embedding, encoder and/or decoder, head.

    logits = head(decoder(embed(tokens), encoder(embed(source))))

One class for encoder-only (BERT), decoder-only (GPT) and encoder-decoder models (2017, T5); what each part is, its
config says. Vaswani et al. 2017, figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv.config import ModelConfig
from qkv.errors import DataError
from qkv.nn.block import Stack
from qkv.nn.capture import active_trace
from qkv.nn.context import Context, Routing
from qkv.nn.embedding import Embedding
from qkv.nn.inputs import Inputs, check_arguments
from qkv.nn.registry import make


@dataclass
class Output:
    """What a forward pass gives."""

    logits: Tensor | None
    """(B, T, V) of language models, (B, T, n) or (B, n) of classifiers; None without such a head."""
    hidden: Float[Tensor, "B T D"]
    """The last stack's output after its final norm."""
    pooled: Float[Tensor, "B D"] | None = None
    """The row's vector, of heads that make one."""
    routing: list[Routing] = field(default_factory=list)
    """How each mixture-of-experts layer sent its tokens."""


class Transformer(nn.Module):
    """One Transformer, from which every Transformer is made."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.embedding, config)
        self.target_embed = None
        if config.has_target_embedding:
            self.target_embed = Embedding(config.embedding, config, with_tokens=config.sharing == "none")
        self.encoder = None if config.encoder is None else Stack(config.encoder, config.sizes)
        self.decoder = None if config.decoder is None else Stack(config.decoder, config.sizes)
        self.head = make(config.head, config.vocab_size, config.d_model)
        self._reads = _reads(config)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        source: Int[Tensor, "B S"] | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
        source_valid: Bool[Tensor, "B S"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
        prefix_length: Int[Tensor, " B"] | None = None,
        global_tokens: Bool[Tensor, "B T"] | None = None,
        backend: str = "auto",
    ) -> Output:
        """Run the model; docs/design.md says what each input means. `backend` forces one for every attention."""
        inputs = Inputs(tokens, valid, positions, documents, segments, prefix_length, global_tokens)
        if source_valid is not None and source is None:
            raise DataError("source_valid: given without source")
        seen = None if source is None else Inputs(source, source_valid)
        check_arguments(self.config, inputs, seen, self._reads)
        if self.encoder is None or self.decoder is None:
            stack = self.encoder if self.decoder is None else self.decoder
            ctx = self._context(inputs, self.embed, backend)
            return self._answer(self._run(stack, self.embed, inputs, ctx), self.embed, ctx)
        assert seen is not None
        target = self.embed if self.target_embed is None else self.target_embed
        source_ctx, ctx = self._context(seen, self.embed, backend), self._context(inputs, target, backend)
        ctx.source = self._run(self.encoder, self.embed, seen, source_ctx)
        ctx.cross = ctx.towards(source_ctx)
        ctx.routing = source_ctx.routing
        return self._answer(self._run(self.decoder, target, inputs, ctx), target, ctx)

    def _context(self, inputs: Inputs, embed: Embedding, backend: str) -> Context:
        """Where the tokens stand, and whether that is as plain as can be."""
        at = inputs.coordinates("is_global" in self._reads)
        if not inputs.regular and not inputs.visible:
            pass  # explicit positions are not looked at
        elif inputs.regular:
            embed.positions.check(inputs.tokens.shape[1])
        else:
            embed.positions.check(int(at.position.max()) + 1)
        trace = None if torch.compiler.is_compiling() else active_trace(self)
        dtype = next(self.parameters()).dtype
        return Context(at, at, inputs.regular, inputs.contiguous(at), dtype, backend, trace)

    def _run(self, stack: Stack | None, embed: Embedding, inputs: Inputs, ctx: Context) -> Tensor:
        assert stack is not None
        return stack(embed(inputs.tokens, inputs.segments, self._table(embed), ctx), ctx)

    def _answer(self, hidden: Tensor, embed: Embedding, ctx: Context) -> Output:
        logits, pooled = self.head(hidden, self._table(embed), ctx.query.position >= 0)
        if logits is not None:
            ctx.tap(self.head, "logits", logits)
        return Output(logits, hidden, pooled, ctx.routing)

    def _table(self, embed: Embedding) -> nn.Module:
        """The token table that this embedding reads: its own, or the shared one."""
        table = self.embed.tokens if embed.tokens is None else embed.tokens
        assert table is not None
        return table


def _reads(config: ModelConfig) -> frozenset[str]:
    """The coordinates that the model's patterns read."""
    blocks = [block for stack in config.stacks.values() for block in stack.blocks]
    return frozenset().union(*(block.attention.pattern.fields for block in blocks))
