"""The whole model as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from qkv.config.base import Config, Positive, Problem
from qkv.config.block import Block, Stack
from qkv.config.embedding import AdaptiveTable, Embedding, FullTable
from qkv.config.head import AdaptiveSoftmax, Head, LanguageModel, MaskedLanguageModel, NoHead
from qkv.config.init import Distribution, Init, LlamaInit
from qkv.config.parameter import Sizes, Table, under


class ModelConfig(Config):
    """One Transformer: an embedding, an encoder and/or a decoder, and a head."""

    vocab_size: Positive
    d_model: Positive
    max_seq_len: Positive
    """The trained context; a limit only where positions are learned, or a scaling rule speaks of it."""
    embedding: Embedding = Embedding()
    encoder: Stack | None = None
    decoder: Stack | None = None
    sharing: Literal["all", "tokens", "none"] = "all"
    """Encoder-decoder: whether source and target share the whole embedding, the token table only, or nothing."""
    head: Head = NoHead()
    init: Init = LlamaInit()

    def problems(self) -> Iterator[Problem]:
        return self.check()

    def check(self) -> Iterator[Problem]:
        """What does not fit together across the tree."""
        if self.encoder is None and self.decoder is None:
            yield "", "a model needs an encoder, a decoder, or both"
        if self.sharing != "all" and (self.encoder is None or self.decoder is None):
            yield "sharing", f"{self.sharing!r} speaks of source and target: it needs an encoder and a decoder"
        if self.d_model % 2:
            for kind in sorted(self._position_kinds & {"sinusoidal", "transformer-xl"}):
                yield "d_model", f"must be even for {kind!r} positions, got {self.d_model}"
        if isinstance(self.embedding.tokens, AdaptiveTable):
            yield from _cutoff_problems("embedding.tokens", self.embedding.tokens, self.vocab_size, self.d_model)
        yield from self._stack_problems()
        yield from self._head_problems()

    @property
    def _position_kinds(self) -> set[str]:
        blocks = (block for name, stack in self.stacks.items() for _, block in _named_blocks(name, stack))
        return {self.embedding.positions.kind, *(block.attention.positions.kind for block in blocks)}

    def _stack_problems(self) -> Iterator[Problem]:
        for name, stack in self.stacks.items():
            for path, block in _named_blocks(name, stack):
                if block.cross_attention is not None and (name == "encoder" or self.encoder is None):
                    where = "an encoder" if name == "encoder" else "a model without an encoder"
                    yield f"{path}.cross_attention", f"{where} has no source to look at: remove it"
                if name == "decoder" and self.encoder is not None and block.cross_attention is None:
                    yield f"{path}.cross_attention", "required: without it this decoder layer never sees the encoder"
            for shared, _ in stack.shared_positions:
                widths = {
                    (b.attention.n_heads, b.attention.query_dim)
                    for b in stack.blocks
                    if b.attention.positions == shared
                }
                if len(widths) > 1:
                    yield (
                        f"{name}.layers",
                        f"layers that share {shared.kind!r} need equal n_heads and head_dim, got {sorted(widths)}",
                    )

    def _head_problems(self) -> Iterator[Problem]:
        head = self.head
        if head.reads == "past":
            if self.decoder is None:
                yield (
                    "head",
                    f"{head.kind!r} predicts the next token: it needs a decoder, and this model has only an encoder",
                )
            else:
                for path, block in _named_blocks("decoder", self.decoder):
                    if not block.attention.pattern.causal:
                        kind = block.attention.pattern.kind
                        yield (
                            f"{path}.attention.pattern",
                            f"{kind!r} sees the tokens that head {head.kind!r} must predict",
                        )
        if head.reads == "both sides" and self.encoder is None:
            yield (
                "head",
                f"{head.kind!r} reads both sides of a token: it needs an encoder, and this model has only a decoder",
            )
        if head.reads == "both sides" and self.encoder is not None and self.decoder is not None:
            yield "head", f"{head.kind!r} reads an encoder, but heads of an encoder-decoder read the decoder"
        ties = isinstance(head, LanguageModel | MaskedLanguageModel) and head.tied
        if ties and not isinstance(self.embedding.tokens, FullTable):
            kind = self.embedding.tokens.kind
            yield "head.tied", f"a tied {head.kind!r} head needs a 'full' token table, not {kind!r}"
        if isinstance(head, AdaptiveSoftmax):
            yield from _cutoff_problems("head", head.table, self.vocab_size, self.d_model)
            if not head.fits(self.embedding.tokens):
                yield (
                    "head.tied",
                    "ties to the token table: embedding.tokens must be 'adaptive' with equal cutoffs and divisor",
                )

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks that exist, by name, in the order in which they run."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in both.items() if stack is not None}

    @property
    def sizes(self) -> Sizes:
        """The widths that every part takes from the model."""
        return Sizes(self.d_model, self.max_seq_len)

    @property
    def has_target_embedding(self) -> bool:
        """Whether the decoder has an embedding of its own, called `target_embed`."""
        return self.sharing != "all"

    def shapes(self) -> Table:
        """Every tensor by its `state_dict` name: shape and role. A tied tensor stands once, where it is stored."""
        table = under("embed", self.embedding.parameters(self.vocab_size, self.sizes))
        if self.has_target_embedding:
            own = self.sharing == "none"
            table |= under("target_embed", self.embedding.parameters(self.vocab_size, self.sizes, with_tokens=own))
        for name, stack in self.stacks.items():
            table |= under(name, stack.parameters(self.sizes))
        return table | under("head", self.head.parameters(self.vocab_size, self.d_model))

    def parameters(self) -> dict[str, tuple[tuple[int, ...], Distribution]]:
        """The parameter table: name -> (shape, distribution that it starts from)."""
        depth = {name: stack.n_layers for name, stack in self.stacks.items()}
        deepest = max(depth.values())
        return {
            name: (p.shape, self.init.distribution(p, depth.get(name.split(".")[0], deepest)))
            for name, p in self.shapes().items()
        }

    @property
    def n_parameters(self) -> int:
        """The exact number of parameters; tied ones count once."""
        return sum(parameter.size for parameter in self.shapes().values())

    def toy(self) -> ModelConfig:
        """The same architecture at a size for tests; see `qkv.config.toy`."""
        from qkv.config.toy import toy

        return toy(self)

    def override(self, changes: Mapping[str, Any]) -> ModelConfig:
        return super().override(changes)


def _named_blocks(stack_name: str, stack: Stack) -> Iterator[tuple[str, Block]]:
    for group in ("first", "layers"):
        for index, block in enumerate(getattr(stack, group)):
            yield f"{stack_name}.{group}.{index}", block


def _cutoff_problems(path: str, table: AdaptiveTable, vocab_size: int, d_model: int) -> Iterator[Problem]:
    if table.cutoffs and table.cutoffs[-1] >= vocab_size:
        yield f"{path}.cutoffs", f"must stay below vocab_size ({vocab_size}), got {table.cutoffs[-1]}"
    if d_model % table.divisor ** len(table.cutoffs):
        yield f"{path}.divisor", f"{table.divisor}^{len(table.cutoffs)} must divide d_model ({d_model})"
