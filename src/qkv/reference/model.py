"""The whole model, one row at a time. NumPy, float64.

embedding    norm(table[token] * factor + positions + segment)
blocks       self-attention, cross-attention (in a decoder beside an encoder), feed-forward; the residual kind says
             where the norms stand
hidden       the last stack's output after its final norm: (T, D)
head         logits and the pooled vector, whichever it has

forward(cfg, weights, tokens, ...) -> logits          run(...) -> Output with the rest
random_weights(cfg, seed) -> {name: array}            every tensor of `cfg.shapes()`, none of them neutral
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.config import (
    AdaptiveTable,
    Block,
    Coordinates,
    FullTable,
    ModelConfig,
    Parallel,
    PostNorm,
    PreNorm,
    SandwichNorm,
    Stack,
)
from qkv.errors import ConfigError, DataError
from qkv.reference.attention import View
from qkv.reference.codec import checked_codec
from qkv.reference.ffn import Routing
from qkv.reference.inputs import Inputs, Row, checked_weights, rows
from qkv.reference.ops import Array, Ints, Weights, below, norm
from qkv.reference.position import scheme
from qkv.reference.registry import function_of, register


@dataclass(frozen=True)
class Output:
    """What a forward pass gives."""

    logits: Array | None
    """(B, T, V), or what the head gives in its place; None for `none` and `pooler`."""
    hidden: Array
    """(B, T, D), after the last stack's final norm; where a token is not valid it means nothing."""
    pooled: Array | None
    """(B, D), from the heads that make one vector of a row."""
    routing: tuple[Routing, ...]
    """Of each mixture-of-experts layer, the encoder's first: scores (N, E) and choices (N, K), N = B * T."""


def forward(
    cfg: ModelConfig,
    weights: dict[str, Any],
    tokens: Any,
    *,
    source: Any = None,
    valid: Any = None,
    source_valid: Any = None,
    positions: Any = None,
    documents: Any = None,
    segments: Any = None,
    prefix_length: Any = None,
    global_tokens: Any = None,
    codec: str = "raw",
) -> Array:
    """The logits; `qkv.reference.inputs` says what each argument is, `qkv.reference.codec` what the last one is."""
    inputs = Inputs(tokens, valid, positions, documents, segments, prefix_length, global_tokens)
    logits = _run(cfg, weights, inputs, Inputs(source, source_valid, name="source"), codec).logits
    if logits is None:
        raise ConfigError(f"head {cfg.head.kind!r} gives no logits: use reference.run(...) for hidden and pooled")
    return logits


def run(
    cfg: ModelConfig,
    weights: dict[str, Any],
    tokens: Any,
    *,
    source: Any = None,
    valid: Any = None,
    source_valid: Any = None,
    positions: Any = None,
    documents: Any = None,
    segments: Any = None,
    prefix_length: Any = None,
    global_tokens: Any = None,
    codec: str = "raw",
) -> Output:
    """Everything that a forward pass gives; arguments as in `forward`."""
    inputs = Inputs(tokens, valid, positions, documents, segments, prefix_length, global_tokens)
    return _run(cfg, weights, inputs, Inputs(source, source_valid, name="source"), codec)


def random_weights(cfg: ModelConfig, seed: int) -> Weights:
    """Tensors from normal(0, 0.3), those that start at one around 1: none is neutral, so that each one matters."""
    random = np.random.default_rng(seed)
    return {
        name: (1.0 if parameter.role == "ones" else 0.0) + 0.3 * random.standard_normal(parameter.shape)
        for name, parameter in cfg.shapes().items()
    }


def _run(cfg: ModelConfig, weights: dict[str, Any], inputs: Inputs, source: Inputs, codec: str) -> Output:
    tensors = checked_weights(cfg, weights)
    codec = checked_codec(cfg, codec)
    last = cfg.decoder or cfg.encoder
    assert last is not None, "a ModelConfig has at least one stack"
    targets = rows(cfg, last, inputs)
    sources: list[Row | None] = [None] * len(targets)
    if cfg.encoder is None or cfg.decoder is None:
        if source.tokens is not None or source.valid is not None:
            raise DataError("source: given, but the model is no encoder-decoder: pass its input as tokens")
    elif source.tokens is None:
        raise DataError("source: required, since the model is an encoder-decoder: give the encoder's tokens")
    else:
        sources = list(rows(cfg, cfg.encoder, source))
    if len(sources) != len(targets):
        raise DataError(f"source: expected as many rows as tokens has ({len(targets)}), got {len(sources)}")
    done = [_row(cfg, tensors, target, beside, codec) for target, beside in zip(targets, sources, strict=True)]
    return Output(
        logits=_stacked([row.logits for row in done]),
        hidden=np.stack([row.hidden for row in done]),
        pooled=_stacked([row.pooled for row in done]),
        routing=tuple(
            (np.concatenate([scores for scores, _ in layer]), np.concatenate([chosen for _, chosen in layer]))
            for layer in zip(*(row.routing for row in done), strict=True)
        ),
    )


def _stacked(parts: list[Array | None]) -> Array | None:
    arrays = [part for part in parts if part is not None]
    return np.stack(arrays) if arrays else None


@dataclass(frozen=True)
class Context:
    """What the layers of one row see beside their input, and where they leave what experts decided."""

    at: Coordinates
    routing: list[Routing]
    memory: Array | None = None
    """The encoder's output (S, D), in a decoder beside an encoder."""
    memory_at: Coordinates | None = None
    codec: str = "raw"
    """How a cache would store what its attentions remember; an encoder has none."""


def _row(cfg: ModelConfig, weights: Weights, target: Row, source: Row | None, codec: str) -> Output:
    """The output for one row, without the batch axis."""
    context = Context(target.at, [], codec=codec)
    own = below(weights, "embed")
    table = below(own, "tokens")
    if cfg.encoder is not None and source is not None:
        beside = Context(source.at, context.routing)
        memory = run_stack(cfg.encoder, below(weights, "encoder"), embed(cfg, own, table, source), beside)
        context = Context(target.at, context.routing, memory, source.at, codec)
    if cfg.has_target_embedding:
        own = below(weights, "target_embed")
        table = below(own, "tokens") if cfg.sharing == "none" else table
    name, stack = list(cfg.stacks.items())[-1]
    hidden = run_stack(stack, below(weights, name), embed(cfg, own, table, target), context)
    logits, pooled = function_of(cfg.head)(cfg.head, below(weights, "head"), table, hidden, target.exists)
    return Output(logits, hidden, pooled, tuple(context.routing))


def embed(cfg: ModelConfig, weights: Weights, table: Weights, row: Row) -> Array:
    """norm(table[token] * factor + positions + segment): (T, D)."""
    config = cfg.embedding
    x = function_of(config.tokens)(config.tokens, table, row.tokens, cfg.d_model)
    x = x * config.factor(cfg.d_model)
    x = x + scheme(config.positions, below(weights, "positions")).embed(row.at.position, cfg.d_model)
    if config.n_segments:
        x = x + weights["segments.weight"][row.segments]
    return norm(config.norm, below(weights, "norm"), x)


def full_table(config: FullTable, weights: Weights, tokens: Ints, d_model: int) -> Array:
    """Row `token` of the one table."""
    return weights["weight"][tokens]


def adaptive_table(config: AdaptiveTable, weights: Weights, tokens: Ints, d_model: int) -> Array:
    """The token's row in its cluster's narrow table, projected to d_model (Baevski and Auli 2018)."""
    out = np.zeros((len(tokens), d_model))
    starts = (0, *config.cutoffs)
    for t, token in enumerate(tokens):
        c = max(c for c, start in enumerate(starts) if start <= token)
        out[t] = weights[f"projections.{c}.weight"] @ weights[f"clusters.{c}.weight"][token - starts[c]]
    return out


def run_stack(stack: Stack, weights: Weights, x: Array, context: Context) -> Array:
    """x (T, D) through every block and the final norm."""
    shared = {positions: index for index, (positions, _) in enumerate(stack.shared_positions)}
    for index, block in enumerate(stack.blocks):
        own = below(weights, f"layers.{index}")
        positions = block.attention.positions
        if positions.shared:
            tensors = below(weights, f"positions.{shared[positions]}")
            own |= {f"attention.positions.{name}": tensor for name, tensor in tensors.items()}
        x = run_block(block, own, x, context)
    return norm(stack.norm, below(weights, "norm"), x)


def run_block(block: Block, weights: Weights, x: Array, context: Context) -> Array:
    """One layer: its sublayers, put together by the residual kind."""

    def attention(h: Array) -> Array:
        at = View(context.at, context.at, context.codec)
        out: Array = function_of(block.attention)(block.attention, below(weights, "attention"), h, h, at)
        return out

    def cross_attention(h: Array) -> Array:
        cross, there = block.cross_attention, context.memory_at
        assert cross is not None, "only blocks with cross-attention run this"
        assert there is not None, "the config allows cross-attention only beside an encoder"
        at = View(context.at, there, context.codec)
        out: Array = function_of(cross)(cross, below(weights, "cross_attention"), h, context.memory, at)
        return out

    def ffn(h: Array) -> Array:
        out: Array = function_of(block.ffn)(block.ffn, below(weights, "ffn"), h, context.routing)
        return out

    def named_norm(name: str, h: Array) -> Array:
        return norm(block.norm, below(weights, name), h)

    all_three = {"attention": attention, "cross_attention": cross_attention, "ffn": ffn}
    sublayers = {name: all_three[name] for name in block.sublayers}
    out: Array = function_of(block.residual)(block.residual, x, sublayers, named_norm)
    return out


Sublayers = dict[str, Callable[[Array], Array]]
NamedNorm = Callable[[str, Array], Array]


def pre_norm(config: PreNorm, x: Array, sublayers: Sublayers, norm: NamedNorm) -> Array:
    """x + f(norm(x))."""
    for name, f in sublayers.items():
        x = x + f(norm(f"{name}_norm", x))
    return x


def post_norm(config: PostNorm, x: Array, sublayers: Sublayers, norm: NamedNorm) -> Array:
    """norm(x + f(x))."""
    for name, f in sublayers.items():
        x = norm(f"{name}_norm", x + f(x))
    return x


def sandwich_norm(config: SandwichNorm, x: Array, sublayers: Sublayers, norm: NamedNorm) -> Array:
    """x + post_norm(f(norm(x)))."""
    for name, f in sublayers.items():
        x = x + norm(f"{name}_post_norm", f(norm(f"{name}_norm", x)))
    return x


def parallel(config: Parallel, x: Array, sublayers: Sublayers, norm: NamedNorm) -> Array:
    """x + attention(n) + ffn(m): n and m are one norm of x, or each sublayer's own norm of the same x."""
    return x + sum(f(norm("norm" if config.shared_norm else f"{name}_norm", x)) for name, f in sublayers.items())


register(FullTable, full_table)
register(AdaptiveTable, adaptive_table)
register(PreNorm, pre_norm)
register(PostNorm, post_norm)
register(SandwichNorm, sandwich_norm)
register(Parallel, parallel)
