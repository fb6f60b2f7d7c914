"""What a KV cache must hold: which streams each layer stores for a token, and how many tokens it must keep.

    bytes of a layer = batch * slots * sum over streams of heads * bytes of a stored vector

A stream is one array per token: keys and values of every key-value head, or latent attention's one latent and one
turned key for all heads (DeepSeek-V2 2024, section 2.1). A layer whose pattern reaches `behind` positions back needs
that many slots, its own, the sinks', and `slack` more so that as many tokens can be taken back; all others need one per
position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qkv.config import Attention, Block, ModelConfig, Pattern, Positions


@dataclass(frozen=True)
class Retention:
    """How much of the past the tokens to come may still look at."""

    behind: int | None
    """How far before its own position a query looks; None: everything must be kept."""
    sinks: int = 0
    """The first positions, which stay visible for ever."""

    def slots(self, context: int | None, slack: int = 0, granule: int = 1) -> int | None:
        """How many of `context` tokens are kept, in whole granules; None stands for any number."""
        limit = None if context is None else rounded_up(context, granule)
        if self.behind is None:
            return limit
        kept = rounded_up(self.sinks + self.behind + 1 + slack, granule)
        return kept if limit is None else min(limit, kept)

    def pages(self, context: int | None, slack: int, page: int) -> int | None:
        """How many pages of `page` tokens hold them: a window may begin and end in the middle of one."""
        whole = None if context is None else -(-context // page)
        if self.behind is None or (context is not None and self.slots(context, slack) == context):
            return whole
        kept = -(-self.sinks // page) + -(-(self.behind + slack) // page) + 1
        return kept if whole is None else min(whole, kept)


def rounded_up(n: int, granule: int) -> int:
    """The next multiple of `granule`."""
    return -(-n // granule) * granule


def view_slots(n: int) -> int:
    """The length of the shortest view that shows `n` slots."""
    whole, rest = divmod(n, VIEWS[-1])
    return whole * VIEWS[-1] + (next(size for size in VIEWS if size >= rest) if rest else 0)


def vector_bytes(codec: str, width: int, bytes_per_element: int) -> int:
    """Bytes of one stored vector: codes, and a 16-bit scale for each group of 32; `raw` has neither."""
    if codec == "raw":
        return width * bytes_per_element
    return -(-width * CODE_BITS[codec] // 8) + 2 * -(-width // GROUP)


VIEWS = (64, 128, 192, 384, 512)
"""How many slots a view of a cache has, and the same after each 512: few lengths occur, and matrix products sum over as
many keys in one order (`nn.invariant` has measured which)."""
GRANULE = VIEWS[0]
GROUP = 32
"""How many neighbours along a vector share a scale."""
CODE_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Stored:
    """One attention of one layer."""

    name: str
    """`decoder.layers.0.attention`."""
    streams: dict[str, tuple[int, int]]
    """Name -> (heads, width)."""
    pattern: Pattern
    positions: Positions
    cross: bool

    @property
    def retention(self) -> Retention:
        """What it keeps; cross-attention keeps the whole source."""
        return Retention(None) if self.cross else retention(self.pattern)

    @property
    def elements(self) -> int:
        """Numbers per token."""
        return sum(heads * width for heads, width in self.streams.values())


def stored(config: ModelConfig) -> Iterator[Stored]:
    """Every attention that decoding remembers. A model without a decoder remembers nothing: it reads its input once."""
    if config.decoder is None:
        return
    for index, block in enumerate(config.decoder.blocks):
        name = f"decoder.layers.{index}"
        yield _stored(f"{name}.attention", block.attention, cross=False)
        if block.cross_attention is not None:
            yield _stored(f"{name}.cross_attention", block.cross_attention, cross=True)


def _stored(name: str, attention: Attention, cross: bool) -> Stored:
    return Stored(name, attention.streams(), attention.pattern, attention.positions, cross)


def retention(pattern: Pattern) -> Retention:
    """What the pattern obliges a cache to keep; a global token may come at any time, and sees everything."""
    reach = pattern.reach()
    if reach.behind is None or "is_global" in pattern.fields:
        return Retention(None)
    return Retention(reach.behind, reach.sinks)


def why_not(config: ModelConfig) -> str | None:
    """Why this model's past cannot be kept and reused, in words; None where it can."""
    if config.decoder is None:
        return "the model has no decoder: it reads its whole input at once"
    return next((reason for block in config.decoder.blocks if (reason := _why_not(block)) is not None), None)


def _why_not(block: Block) -> str | None:
    pattern = block.attention.pattern
    if not pattern.causal:
        return f"pattern {pattern.kind!r} lets earlier tokens look at later ones, which changes what was stored"
    if "length" in pattern.fields:
        return f"pattern {pattern.kind!r} depends on the length of the row, which grows with each token"
    return None
