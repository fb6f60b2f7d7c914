"""The sequence of operations of a whole model with the shape of every value, from the config alone.

    operations(config) -> sections (embedding, layers, norm, head), each a list of operations

Symbols: B rows, T tokens, S source tokens, D d_model, V vocabulary, H query heads over G key-value heads of width F,
E experts of which each token takes k. One function per class of the config tree, chosen by the type of its first
argument; a kind that a user registered is written as one operation. Layers that are equal are written once.
"""

from __future__ import annotations

from functools import singledispatch

from qkv import config as c
from qkv.config.parameter import Table
from qkv.plan.attention import attention
from qkv.plan.ffn import ffn
from qkv.plan.head import head
from qkv.plan.norm import norm
from qkv.plan.position import steps
from qkv.plan.program import B, Dim, S, Section, Shape, T, Writer, number


def operations(config: c.ModelConfig) -> tuple[Section, ...]:
    """What a forward pass of `config` computes, in order."""
    both = config.encoder is not None and config.decoder is not None
    w = Writer(S if both else T)
    owned = _tokens_table(config)
    if both:
        w.shapes["source"] = (B, S)
        _embedding(w, config, "embed", "source", owned)
        _stack(w, config, "encoder")
        w.op("[memory]", "memory = x, what cross-attention reads", ("x",), "memory")
        w.close("encoder")
        w.length = T
        w.shapes["targets"] = (B, T)
        w.op("[shift right]", "tokens = a start token, then targets without the last", ("targets",), "tokens")
        w.close("decoder input")
        if config.has_target_embedding:
            _embedding(w, config, "target_embed", "tokens", owned if config.sharing == "none" else {})
        else:
            _embedding(w, config, "embed", "tokens", {}, borrowed=True)
    else:
        w.shapes["tokens"] = (B, T)
        _embedding(w, config, "embed", "tokens", owned)
    last = list(config.stacks)[-1]
    _stack(w, config, last)
    w.close(last)
    head(config.head, w, config)
    w.close("head")
    return tuple(w.sections)


# Embedding


def _tokens_table(config: c.ModelConfig) -> Table:
    return config.embedding.tokens.parameters(config.vocab_size, config.d_model)


def _embedding(w: Writer, config: c.ModelConfig, path: str, read: str, tokens: Table, borrowed: bool = False) -> None:
    """norm(table[token] * scale + position + segment). What is `borrowed` counts where it is owned."""
    e, d = config.embedding, Dim("D", config.d_model)
    row: Shape = (B, w.length, d)
    lookup = "row of each token" if isinstance(e.tokens, c.FullTable) else f"{e.tokens.kind}: see its class"
    if isinstance(e.tokens, c.AdaptiveTable):
        lookup = "row of each token in its cluster, projected to D"
    w.op("tokens", f"x = {lookup}{'' if tokens else ' (the table of embed)'}", (read,), "x", row, tokens)
    if e.factor(config.d_model) != 1.0:
        w.op("[scale]", f"x = x * {number(e.factor(config.d_model))}", ("x",), "x")
    if e.positions.kind != "none":
        own = {} if borrowed else e.positions.parameters(config.sizes)
        w.op("positions", f"x = x + {steps(e.positions).embed}", ("x",), "x", parameters=own)
    if e.n_segments:
        segments = {} if borrowed else e.parameters(config.vocab_size, config.sizes, with_tokens=False)
        own = {name: p for name, p in segments.items() if name.startswith("segments.")}
        w.op("segments", f"x = x + row of each token's segment ({e.n_segments} of them)", ("x",), "x", parameters=own)
    norm(e.norm, w, "norm", "x", "x", owned=not borrowed)
    w.close(path)


# Stacks and blocks


def _stack(w: Writer, config: c.ModelConfig, name: str) -> None:
    stack = config.stacks[name]
    for index, (positions, user) in enumerate(stack.shared_positions):
        sizes = c.Sizes(config.d_model, config.max_seq_len, user.n_heads, user.query_dim)
        shape = (B, Dim("H", user.n_heads), w.length, w.length)
        formula = f"bias = {steps(positions).bias or steps(positions).values}, for all layers"
        w.op(f"positions.{index}", formula, ("x",), "bias", shape, positions.parameters(sizes))
        w.close(name)
    for block in dict.fromkeys(stack.blocks):
        layers = tuple(index for index, other in enumerate(stack.blocks) if other == block)
        residual(block.residual, w, block, config.sizes)
        w.close(f"{name}.layers", layers)
    norm(stack.norm, w, "norm", "x", "x")  # the caller ends this last section


def _sublayer(w: Writer, name: str, block: c.Block, sizes: c.Sizes, read: str) -> str:
    """The named sublayer from the value `read`; the name of its result."""
    if name == "ffn":
        return ffn(block.ffn, w, read, sizes.d_model)
    config = block.attention if name == "attention" else block.cross_attention
    assert config is not None, "a block names only sublayers that it has"
    return attention(config, w, name, read, read if name == "attention" else "memory", sizes)


@singledispatch
def residual(config: c.Residual, w: Writer, block: c.Block, sizes: c.Sizes) -> None:
    """A registered kind: its order is its own, so only its parts are listed."""
    for name in config.norms(block.sublayers):
        norm(block.norm, w, name, "x", "n")
    for name in block.sublayers:
        _sublayer(w, name, block, sizes, "x")


@residual.register
def _(config: c.PreNorm, w: Writer, block: c.Block, sizes: c.Sizes) -> None:
    for name in block.sublayers:
        read = norm(block.norm, w, f"{name}_norm", "x", "n")
        _add(w, _sublayer(w, name, block, sizes, read))


@residual.register
def _(config: c.PostNorm, w: Writer, block: c.Block, sizes: c.Sizes) -> None:
    for name in block.sublayers:
        _add(w, _sublayer(w, name, block, sizes, "x"))
        norm(block.norm, w, f"{name}_norm", "x", "x")


@residual.register
def _(config: c.SandwichNorm, w: Writer, block: c.Block, sizes: c.Sizes) -> None:
    for name in block.sublayers:
        read = norm(block.norm, w, f"{name}_norm", "x", "n")
        out = _sublayer(w, name, block, sizes, read)
        _add(w, norm(block.norm, w, f"{name}_post_norm", out, out))


@residual.register
def _(config: c.Parallel, w: Writer, block: c.Block, sizes: c.Sizes) -> None:
    shared = norm(block.norm, w, "norm", "x", "n") if config.shared_norm else None
    outputs = []
    for name in block.sublayers:
        read = shared or norm(block.norm, w, f"{name}_norm", "x", "n")
        outputs.append(_sublayer(w, name, block, sizes, read))
    _add(w, *outputs)


def _add(w: Writer, *outputs: str) -> None:
    w.op("[add]", f"x = x + {' + '.join(outputs)}", ("x", *outputs), "x")
