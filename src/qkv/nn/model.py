"""The Transformer: embedding, encoder and/or decoder, head.

    logits = head(decoder(embed(tokens), encoder(embed(source))))

One class for encoder-only (BERT), decoder-only (GPT) and encoder-decoder models (2017, T5); what each part is, its
config says. Vaswani et al. 2017, figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv.cache.cache import Cache
from qkv.cache.store import Store
from qkv.config import ModelConfig
from qkv.errors import DataError
from qkv.nn.block import Stack
from qkv.nn.capture import active_trace
from qkv.nn.context import Context, Routing
from qkv.nn.embedding import Embedding
from qkv.nn.inputs import Inputs, begin, check_arguments, check_recall
from qkv.nn.memory import Memory, store_for
from qkv.nn.recall import Recall
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
    recall: Recall | None = None
    """What the layers recall after these tokens, if they were given a `recall`."""


class Transformer(nn.Module):
    """One Transformer, from which every Transformer is made."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.embedding, config)
        self.target_embed = None
        if config.has_target_embedding:
            self.target_embed = Embedding(config.embedding, config, with_tokens=config.sharing == "none")
        self.encoder = None if config.encoder is None else Stack("encoder", config.encoder, config.sizes)
        self.decoder = None if config.decoder is None else Stack("decoder", config.decoder, config.sizes)
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
        cache: Cache | None = None,
        recall: Recall | None = None,
        logits_at: Int[Tensor, "B N"] | None = None,
        backend: str = "auto",
    ) -> Output:
        """Run the model; docs/design.md says what each input means.

        With a `cache`, the tokens follow those that it holds, and it holds them afterwards; `source` and
        `prefix_length` are given with the first only. Nothing is differentiated then. With a `recall`, they follow
        those that it recalls, and only these have no gradient. `logits_at`: the indices of the tokens whose logits are
        wanted, by default all. `backend` forces one for every attention.
        """
        inputs = Inputs(tokens, valid, positions, documents, segments, prefix_length, global_tokens)
        if source_valid is not None and source is None:
            raise DataError("source_valid: given without source")
        seen = None if source is None else Inputs(source, source_valid)
        check_arguments(self.config, inputs, seen, self._reads, cache)
        if recall is not None:
            check_recall(self.config, inputs, cache)
            return self._run_on(inputs, recall, logits_at, backend)
        if cache is None:
            return self._run_all(inputs, seen, None, logits_at, backend)
        step, output = begin(cache, inputs), None
        try:
            with torch.no_grad():
                memory = Memory(cache, step, tokens.device)
                output = self._run_all(inputs, seen, memory, logits_at, backend)
        finally:  # after an interrupt too: the cache must not count what was not read
            cache.abort(step) if output is None else cache.commit(step)
        return output

    def cache_store(self) -> Store:
        """Where the arrays of this model's caches lie."""
        return store_for(next(self.parameters()))

    def _run_all(
        self, inputs: Inputs, seen: Inputs | None, memory: Memory | None, logits_at: Tensor | None, backend: str
    ) -> Output:
        if self.encoder is None or self.decoder is None:
            stack = self.encoder if self.decoder is None else self.decoder
            ctx = self._context(inputs, self.embed, backend, memory)
            return self._answer(self._run(stack, self.embed, inputs, ctx), self.embed, ctx, logits_at)
        target = self.embed if self.target_embed is None else self.target_embed
        ctx = self._context(inputs, target, backend, memory)
        if seen is None:
            assert memory is not None
            ctx.cross = ctx.towards(memory.stored_source(), whole=False)
        else:
            source_ctx = self._context(seen, self.embed, backend)
            ctx.source = self._run(self.encoder, self.embed, seen, source_ctx)
            ctx.cross = ctx.towards(source_ctx.query, whole=ctx.regular and source_ctx.regular)
            ctx.routing = source_ctx.routing
            if memory is not None:
                memory.take_source(source_ctx.query.position)
        return self._answer(self._run(self.decoder, target, inputs, ctx), target, ctx, logits_at)

    def _run_on(self, inputs: Inputs, recall: Recall, logits_at: Tensor | None, backend: str) -> Output:
        """A decoder alone, whose tokens follow those that it recalls."""
        ctx = self._context(inputs, self.embed, backend)
        if recall.seen:
            query, key = recall.coordinates(inputs.tokens)
            ctx = replace(ctx, query=query, key=key, regular=False, contiguous=False, gathered=True)
        ctx.recall = recall
        output = self._answer(self._run(self.decoder, self.embed, inputs, ctx), self.embed, ctx, logits_at)
        output.recall = recall.after(ctx.inputs)
        return output

    def _context(self, inputs: Inputs, embed: Embedding, backend: str, memory: Memory | None = None) -> Context:
        """Where the tokens stand, and whether that is as plain as can be."""
        trace = None if torch.compiler.is_compiling() else active_trace(self)
        dtype = next(self.parameters()).dtype
        if memory is not None:
            at, plain = memory.query, memory.fresh and inputs.regular
            embed.positions.check(memory.longest)
            contiguous = memory.fresh and inputs.contiguous(at)
            return Context(at, at, plain, contiguous, dtype, backend, trace, memory=memory)
        at = inputs.coordinates("is_global" in self._reads)
        if not inputs.regular and not inputs.visible:
            pass  # explicit positions are not looked at
        elif inputs.regular:
            embed.positions.check(inputs.tokens.shape[1])
        else:
            embed.positions.check(int(at.position.max()) + 1)
        return Context(at, at, inputs.regular, inputs.contiguous(at), dtype, backend, trace)

    def _run(self, stack: Stack | None, embed: Embedding, inputs: Inputs, ctx: Context) -> Tensor:
        assert stack is not None
        return stack(embed(inputs.tokens, inputs.segments, self._table(embed), ctx), ctx)

    def _answer(self, hidden: Tensor, embed: Embedding, ctx: Context, logits_at: Tensor | None) -> Output:
        wanted, exists = hidden, ctx.query.position >= 0
        if logits_at is not None:
            wanted = hidden.gather(1, logits_at[..., None].expand(-1, -1, hidden.shape[-1]))
            exists = exists.expand(len(hidden), -1).gather(1, logits_at)
        logits, pooled = self.head(wanted, self._table(embed), exists)
        if logits is not None:
            ctx.tap(self.head, "logits", logits)
        return Output(logits, hidden, pooled, list(ctx.routing))

    def _table(self, embed: Embedding) -> nn.Module:
        """The token table that this embedding reads: its own, or the shared one."""
        table = self.embed.tokens if embed.tokens is None else embed.tokens
        assert table is not None
        return table


def _reads(config: ModelConfig) -> frozenset[str]:
    """The coordinates that the model's patterns read."""
    blocks = [block for stack in config.stacks.values() for block in stack.blocks]
    return frozenset().union(*(block.attention.pattern.fields for block in blocks))
