"""Blocks, one class per norm placement, and stacks of them.

pre       x + f(norm(x))                       GPT-2, Llama
post      norm(x + f(x))                       2017, BERT
sandwich  x + post_norm(f(norm(x)))            Gemma 3
parallel  x + attention(n) + ffn(n), n = norm(x)    GPT-J, PaLM
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkv import config as c
from qkv.nn.attention import AttentionModule
from qkv.nn.context import Context
from qkv.nn.registry import implements, make

Hidden = Float[Tensor, "B T D"]


class BlockModule(nn.Module):
    """One layer's sublayers and norms; a subclass says how they meet the residual stream."""

    def __init__(self, residual: c.Residual, config: c.Block, sizes: c.Sizes) -> None:
        super().__init__()
        self.sublayers, self.dropout = config.sublayers, config.dropout
        self.number = 0  # of the layer in its stack, which sets it
        self.attention = make(config.attention, sizes)
        if config.cross_attention is not None:
            self.cross_attention = make(config.cross_attention, sizes)
        self.ffn = make(config.ffn, sizes.d_model)
        for name in residual.norms(self.sublayers):
            self.add_module(name, make(config.norm, sizes.d_model))

    def run(self, sublayer: str, x: Hidden, ctx: Context) -> Hidden:
        """The sublayer's output, with dropout in training."""
        if sublayer == "attention":
            out = self.attention(x, self.seen(x, ctx), ctx)
        elif sublayer == "cross_attention":
            out = self.cross_attention(x, ctx.source, ctx.cross)
        else:
            out = self.ffn(x, ctx)
        return F.dropout(out, self.dropout) if self.dropout and self.training else out

    def seen(self, x: Hidden, ctx: Context) -> Float[Tensor, "B S D"]:
        """What attention looks at: what it asks from, and what the layer read before, if it is to recall that."""
        if ctx.recall is None or not ctx.recall.length:
            return x
        return torch.cat((self.before_attention(ctx.recall.layers[self.number]), x), 1)

    def before_attention(self, x: Hidden) -> Hidden:
        """What attention gets of the layer's input."""
        return x

    def normed(self, name: str, x: Hidden) -> Hidden:
        """The block's norm of that name."""
        normed: Hidden = getattr(self, name)(x)
        return normed


@implements(c.PreNorm)
class PreNorm(BlockModule):
    """x + f(norm(x))."""

    def before_attention(self, x: Hidden) -> Hidden:
        return self.normed("attention_norm", x)

    def forward(self, x: Hidden, ctx: Context) -> Hidden:
        for name in self.sublayers:
            x = x + ctx.tap(self, name, self.run(name, self.normed(f"{name}_norm", x), ctx))
        return x


@implements(c.PostNorm)
class PostNorm(BlockModule):
    """norm(x + f(x))."""

    def forward(self, x: Hidden, ctx: Context) -> Hidden:
        for name in self.sublayers:
            x = self.normed(f"{name}_norm", x + ctx.tap(self, name, self.run(name, x, ctx)))
        return x


@implements(c.SandwichNorm)
class SandwichNorm(BlockModule):
    """x + post_norm(f(norm(x)))."""

    def before_attention(self, x: Hidden) -> Hidden:
        return self.normed("attention_norm", x)

    def forward(self, x: Hidden, ctx: Context) -> Hidden:
        for name in self.sublayers:
            out = self.normed(f"{name}_post_norm", self.run(name, self.normed(f"{name}_norm", x), ctx))
            x = x + ctx.tap(self, name, out)
        return x


@implements(c.Parallel)
class Parallel(BlockModule):
    """x + attention(norm(x)) + ffn(norm(x)), with one norm or two."""

    def __init__(self, residual: c.Parallel, config: c.Block, sizes: c.Sizes) -> None:
        super().__init__(residual, config, sizes)
        self.shared_norm = residual.shared_norm

    def before_attention(self, x: Hidden) -> Hidden:
        return self.normed("norm" if self.shared_norm else "attention_norm", x)

    def forward(self, x: Hidden, ctx: Context) -> Hidden:
        if self.shared_norm:
            for_attention = for_ffn = self.normed("norm", x)
        else:
            for_attention, for_ffn = self.normed("attention_norm", x), self.normed("ffn_norm", x)
        attention = ctx.tap(self, "attention", self.run("attention", for_attention, ctx))
        return x + attention + ctx.tap(self, "ffn", self.run("ffn", for_ffn, ctx))


class Stack(nn.Module):
    """The layers of an encoder or decoder, the position tensors that they share, and the norm at the end."""

    def __init__(self, name: str, config: c.Stack, sizes: c.Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(block.residual, block, sizes) for block in config.blocks)
        self.positions = nn.ModuleList(
            make(positions, c.Sizes(sizes.d_model, sizes.max_seq_len, attention.n_heads, attention.query_dim))
            for positions, attention in config.shared_positions
        )
        self.norm = make(config.norm, sizes.d_model)
        self._number(name, config)

    def _number(self, name: str, config: c.Stack) -> None:
        """Name the attentions, and number the distinct patterns and schemes: each is worked out once per forward."""
        patterns: dict[c.Pattern, int] = {}
        schemes: dict[tuple[c.Positions, int, int], int] = {}
        for index, (block, layer) in enumerate(zip(config.blocks, self.layers, strict=True)):
            attention = block.attention
            for own in block.sublayers:
                mechanism = layer.get_submodule(own)
                if isinstance(mechanism, AttentionModule):
                    mechanism.name = f"{name}.layers.{index}.{own}"
            if isinstance(layer, BlockModule):
                layer.number = index
            module = layer.get_submodule("attention")
            assert isinstance(module, AttentionModule)
            module.pattern_key = patterns.setdefault(attention.pattern, len(patterns))
            scheme = (attention.positions, attention.n_heads, attention.query_dim)
            module.positions_key = schemes.setdefault(scheme, len(schemes))
        owners = zip(config.shared_positions, self.positions, strict=True)
        self.shared = {
            schemes[positions, attention.n_heads, attention.query_dim]: module
            for (positions, attention), module in owners
        }

    def forward(self, x: Hidden, ctx: Context) -> Hidden:
        ctx.shared = self.shared
        for key, scheme in self.shared.items():
            ctx.table(key, scheme)  # here, since a layer that is computed again in the backward pass would make it anew
        ctx.tap(self, "input", x)
        for layer in self.layers:
            ctx.tap(layer, "input", x)
            if ctx.recall is not None:
                ctx.inputs.append(x.detach())
            x = ctx.tap(layer, "output", layer(x, ctx))
        return ctx.tap(self, "output", self.norm(x))
