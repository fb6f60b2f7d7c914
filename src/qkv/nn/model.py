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

from qkv.config import Coordinates, ModelConfig
from qkv.errors import DataError
from qkv.nn.block import Stack
from qkv.nn.capture import active_trace
from qkv.nn.context import Context, Routing, default_positions, lengths
from qkv.nn.embedding import Embedding
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


@dataclass
class Inputs:
    """What a caller says of one sequence besides its tokens; None takes the default."""

    tokens: Int[Tensor, "B T"]
    valid: Bool[Tensor, "B T"] | None = None
    positions: Int[Tensor, "B T"] | None = None
    documents: Int[Tensor, "B T"] | None = None
    segments: Int[Tensor, "B T"] | None = None
    prefix_length: Int[Tensor, " B"] | None = None
    global_tokens: Bool[Tensor, "B T"] | None = None


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
        read = {name: _fields(stack) for name, stack in config.stacks.items()}
        self._reads_prefix = any("prefix_length" in fields for fields in read.values())
        self._reads_global = any("is_global" in fields for fields in read.values())

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
        self._check(inputs, source, source_valid)
        if self.decoder is None:
            hidden, ctx = self._encode(inputs, backend)
            return self._answer(hidden, ctx, self.table_of(self.embed), [])
        encoded, source_ctx = None, None
        if self.encoder is not None:
            assert source is not None
            encoded, source_ctx = self._encode(Inputs(source, source_valid), backend)
        hidden, ctx = self._decode(inputs, encoded, source_ctx, backend)
        before = [] if source_ctx is None else source_ctx.routing
        return self._answer(hidden, ctx, self.table_of(self.target_embed), before)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _encode(self, inputs: Inputs, backend: str) -> tuple[Tensor, Context]:
        ctx = self._context(inputs, backend)
        hidden = self.embed(inputs.tokens, inputs.segments, self.table_of(self.embed), ctx)
        assert self.encoder is not None
        return self.encoder(hidden, ctx), ctx

    def _decode(
        self, inputs: Inputs, encoded: Tensor | None, source: Context | None, backend: str
    ) -> tuple[Tensor, Context]:
        ctx = self._context(inputs, backend)
        if encoded is not None and source is not None:
            regular = ctx.regular and source.regular
            ctx.source = encoded
            ctx.cross = Context(ctx.query, source.key, regular, False, ctx.dtype, backend, ctx.trace)
        embed = self.embed if self.target_embed is None else self.target_embed
        hidden = embed(inputs.tokens, inputs.segments, self.table_of(embed), ctx)
        assert self.decoder is not None
        return self.decoder(hidden, ctx), ctx

    def _answer(self, hidden: Tensor, ctx: Context, table: nn.Module, before: list[Routing]) -> Output:
        logits, pooled = self.head(hidden, table, ctx.query.position >= 0)
        if logits is not None:
            ctx.tap(self.head, "logits", logits)
        return Output(logits, hidden, pooled, before + ctx.routing)

    def table_of(self, embed: Embedding | None) -> nn.Module:
        """The token table that this embedding reads: its own, or the shared one."""
        own = self.embed.tokens if embed is None or embed.tokens is None else embed.tokens
        assert own is not None
        return own

    def _context(self, inputs: Inputs, backend: str) -> Context:
        """Where the tokens stand, and whether that is as plain as can be."""
        valid, documents = inputs.valid, inputs.documents
        compiling = torch.compiler.is_compiling()
        if valid is not None and valid.device.type == "cpu" and not compiling and bool(valid.all()):
            valid = None  # nothing is padding: no mask is needed for it
        given = inputs.positions is not None
        if inputs.positions is None:
            position = default_positions(valid, documents, inputs.tokens)
        else:
            position = inputs.positions.long()  # the predicates' arithmetic needs 64 bits
            position = position if valid is None else torch.where(valid, position, -1)
        regular = valid is None and documents is None and not given and inputs.prefix_length is None
        contiguous = not given and (valid is None or (not compiling and _no_gaps(valid)))
        prefix = None if inputs.prefix_length is None else inputs.prefix_length[:, None]
        is_global = inputs.global_tokens
        if is_global is None and self._reads_global:
            is_global = torch.zeros_like(position, dtype=torch.bool)
        elif is_global is not None:
            regular = regular and not self._reads_global
        at = Coordinates(position, documents, is_global, prefix, lengths(position, documents))
        trace = None if compiling else active_trace(self)
        return Context(at, at, regular, contiguous, self._dtype, backend, trace)

    def _check(self, inputs: Inputs, source: Tensor | None, source_valid: Tensor | None) -> None:
        """One clear line for inputs that this model cannot take."""
        both = self.encoder is not None and self.decoder is not None
        if both != (source is not None):
            need = "needs source= (B, S)" if both else "has no encoder beside its decoder: leave source out"
            raise DataError(f"source: this model {need}")
        if source_valid is not None and source is None:
            raise DataError("source_valid: given without source")
        if both and inputs.documents is not None:
            raise DataError("documents: packing is for models with one stack; give one pair per row")
        if both and inputs.segments is not None:
            raise DataError("segments: not for an encoder-decoder; leave them out")
        if self._reads_prefix != (inputs.prefix_length is not None):
            need = "needs prefix_length= (B,)" if self._reads_prefix else "reads no prefix: leave it out"
            raise DataError(f"prefix_length: this model {need}")
        if inputs.global_tokens is not None and not self._reads_global:
            raise DataError("global_tokens: no pattern of this model reads them; leave them out")
        _check_shapes(inputs, source, source_valid)
        if torch.compiler.is_compiling() or inputs.tokens.device.type != "cpu":
            return  # values are not looked at: that would break the graph, or wait for the device
        embed = self.embed if self.target_embed is None else self.target_embed
        embed.check("tokens", inputs.tokens, inputs.positions, inputs.segments)
        if source is not None:
            self.embed.check("source", source, None, None)


def _check_shapes(inputs: Inputs, source: Tensor | None, source_valid: Tensor | None) -> None:
    """Every input per token has the tokens' shape, and masks are boolean."""
    shape: tuple[int, ...] = tuple(inputs.tokens.shape)
    if len(shape) != 2:
        raise DataError(f"tokens: must be (B, T), got shape {shape}; add a batch axis with tokens[None]")
    per_token = ("valid", "positions", "documents", "segments", "global_tokens")
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {}
    expected |= {name: (getattr(inputs, name), shape) for name in per_token}
    expected["prefix_length"] = (inputs.prefix_length, shape[:1])
    if source is not None:
        expected["source"] = (source, (shape[0], source.shape[-1]))
        expected["source_valid"] = (source_valid, tuple(source.shape))
    for name, (value, needed) in expected.items():
        if value is not None and tuple(value.shape) != needed:
            raise DataError(f"{name}: must have shape {needed} to fit the tokens, got {tuple(value.shape)}")
        if name in ("valid", "source_valid", "global_tokens") and value is not None and value.dtype != torch.bool:
            raise DataError(f"{name}: must be boolean, True = yes, got {value.dtype}; use {name}.bool()")


def _fields(stack: object) -> frozenset[str]:
    return frozenset().union(*(block.attention.pattern.fields for block in stack.blocks))  # type: ignore[attr-defined]


def _no_gaps(valid: Tensor) -> bool:
    """Whether each row's real tokens stand together."""
    starts = (valid[:, 1:] & ~valid[:, :-1]).sum(-1) + valid[:, 0]
    return bool((starts <= 1).all())
