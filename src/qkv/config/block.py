"""Blocks and stacks: one layer, and how layers make an encoder or a decoder."""

from __future__ import annotations

from collections.abc import Iterator

from qkv.config.attention import Attention
from qkv.config.base import Config, Positive, Probability, Problem, Tuple
from qkv.config.ffn import FeedForward
from qkv.config.norm import NoNorm, Norm
from qkv.config.parameter import Sizes, Table, under
from qkv.config.position import Positions
from qkv.config.residual import Parallel, Residual


class Block(Config):
    """One layer: self-attention, in a decoder beside an encoder cross-attention, and a feed-forward network."""

    attention: Attention
    cross_attention: Attention | None = None
    ffn: FeedForward
    norm: Norm
    """The kind of every norm of the block."""
    residual: Residual
    dropout: Probability = 0.0
    """Applied to each sublayer's output before it joins the residual stream, in training."""

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The names of the sublayers in the order in which they run."""
        return ("attention", "cross_attention", "ffn") if self.cross_attention is not None else ("attention", "ffn")

    def problems(self) -> Iterator[Problem]:
        cross = self.cross_attention
        if cross is None:
            return
        if isinstance(self.residual, Parallel):
            yield "residual", "'parallel' joins attention and ffn only: a block with cross-attention needs another kind"
        if cross.positions.kind != "none":
            yield (
                "cross_attention.positions",
                f"source and target have no common positions: use 'none', not {cross.positions.kind!r}",
            )
        if cross.pattern.kind != "bidirectional":
            yield (
                "cross_attention.pattern",
                f"the whole source is visible: use 'bidirectional', not {cross.pattern.kind!r}",
            )

    def parameters(self, sizes: Sizes) -> Table:
        """The tensors of one layer."""
        table = under("attention", self.attention.parameters(sizes))
        if self.cross_attention is not None:
            table |= under("cross_attention", self.cross_attention.parameters(sizes))
        table |= under("ffn", self.ffn.parameters(sizes.d_model))
        for name in self.residual.norms(self.sublayers):
            table |= under(name, self.norm.parameters(sizes.d_model))
        return table


class Stack(Config):
    """`n_layers` blocks: those of `first` once, then `layers` over and over, and a norm at the end."""

    n_layers: Positive
    layers: Tuple[Block]
    """The cycle of blocks: one for a uniform stack, six for Gemma 3's five local layers and one global."""
    first: Tuple[Block] = ()
    """Blocks before the cycle, once each (DeepSeek's dense layers before its experts)."""
    norm: Norm = NoNorm()
    """After the last layer; a post-norm stack needs none."""

    def block(self, index: int) -> Block:
        """The config of layer `index`."""
        cycled = index - len(self.first)
        return self.first[index] if cycled < 0 else self.layers[cycled % len(self.layers)]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The config of every layer."""
        return tuple(self.block(index) for index in range(self.n_layers))

    @property
    def shared_positions(self) -> tuple[tuple[Positions, Attention], ...]:
        """The distinct position schemes that layers share, each with the first attention that uses it."""
        found: dict[Positions, Attention] = {}
        for block in self.blocks:
            if block.attention.positions.shared:
                found.setdefault(block.attention.positions, block.attention)
        return tuple(found.items())

    def problems(self) -> Iterator[Problem]:
        if not self.layers:
            yield "layers", "needs at least one block"
        if len(self.first) > self.n_layers:
            yield "first", f"has {len(self.first)} blocks, more than n_layers ({self.n_layers})"

    def parameters(self, sizes: Sizes) -> Table:
        """The tensors of the whole stack."""
        table: Table = {}
        for index, (positions, attention) in enumerate(self.shared_positions):
            shared = positions.parameters(
                Sizes(sizes.d_model, sizes.max_seq_len, attention.n_heads, attention.query_dim)
            )
            table |= under(f"positions.{index}", shared)
        for index, block in enumerate(self.blocks):
            table |= under(f"layers.{index}", block.parameters(sizes))
        return table | under("norm", self.norm.parameters(sizes.d_model))
