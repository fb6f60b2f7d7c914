"""What a KV cache must hold: which streams each layer stores for a token, and how many tokens it must keep.

    bytes of a layer = batch * slots * sum over streams of heads * width * bytes of an element

A stream is one array per token: keys and values of every key-value head, or latent attention's one latent and one
turned key for all heads (DeepSeek-V2 2024, section 2.1). A layer whose pattern reaches `behind` positions back needs
that many slots, its own and the sinks', however long the text; all others need one per position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qkv.config import Attention, ModelConfig


@dataclass(frozen=True)
class Stored:
    """One attention of one layer."""

    name: str
    """`decoder.layers.0.attention`."""
    streams: dict[str, tuple[int, int]]
    """Name -> (heads, width)."""
    slots: int
    """How many tokens are kept."""

    @property
    def elements(self) -> int:
        """Numbers per token."""
        return sum(heads * width for heads, width in self.streams.values())


def stored(config: ModelConfig, context: int, source: int = 0) -> Iterator[Stored]:
    """Everything that decoding `context` tokens keeps; cross-attention keeps the `source` tokens' keys and values.

    A model without a decoder keeps nothing: it reads its input once.
    """
    if config.decoder is None:
        return
    for index, block in enumerate(config.decoder.blocks):
        name = f"decoder.layers.{index}"
        yield Stored(f"{name}.attention", block.attention.streams(), slots(block.attention, context))
        if block.cross_attention is not None:
            yield Stored(f"{name}.cross_attention", block.cross_attention.streams(), source)


def slots(attention: Attention, context: int) -> int:
    """How many of `context` tokens an attention can still see at the end."""
    reach = attention.pattern.reach()
    if reach.behind is None:
        return context
    return min(context, reach.behind + 1 + reach.sinks)
