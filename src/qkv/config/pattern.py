"""Patterns: who may look at whom, as a predicate of absolute positions.

`allowed(query, key)` is written with operators only (`<= & | % //`), so that one definition serves NumPy arrays, torch
tensors and FlexAttention's index functions. Both arguments are `Coordinates` whose fields broadcast against each other,
queries as (..., Q, 1) and keys as (..., 1, K). Padding and packed documents are not the pattern's business: whoever
evaluates it also requires that the key exists and that both lie in the same document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from qkv.config.base import NonNegative, Positive, Problem, Tuple, Variant

Cover = Literal["all", "causal", "partial"]
Array = Any  # a NumPy array, a torch tensor, or a FlexAttention index: whatever has the operators


@dataclass(frozen=True)
class Coordinates:
    """Where tokens stand. Every field is an integer or boolean array; a pattern names those that it reads."""

    position: Array
    """Absolute position of the token in its row (or document); -1 marks a token that does not exist."""
    document: Array = None
    """Which of the packed documents the token belongs to."""
    is_global: Array = None
    """Longformer: whether the token sees, and is seen by, everybody."""
    prefix_length: Array = None
    """Prefix LM: how many tokens of the row may be seen by everybody."""
    length: Array = None
    """How many positions the row has (BigBird draws its random blocks among them)."""


@dataclass(frozen=True)
class Reach:
    """How far from its own position a query looks (None: no limit); beyond it are only sinks and global tokens."""

    behind: int | None
    ahead: int | None
    sinks: int = 0


class Pattern(Variant):
    """The union of attention patterns."""

    reads: ClassVar[tuple[str, ...]] = ("position",)
    """The fields of `Coordinates` that the predicate uses."""

    past_only: ClassVar[bool] = False
    """Whether a query never sees a later token, except inside a given prefix."""

    @property
    def causal(self) -> bool:
        """Whether this pattern, with its fields, is `past_only`."""
        return self.past_only

    @property
    def fields(self) -> frozenset[str]:
        """The coordinates that the predicate reads, those of nested patterns included."""
        return frozenset(self.reads)

    def reach(self) -> Reach:
        """A bound on how far queries look; the default says nothing."""
        return Reach(None, None)

    @property
    def tile(self) -> int | None:
        """The side of square tiles of positions, from 0 on, if the predicate has one value on every tile.

        It may read nothing else then but the length.
        """
        return None

    def covers(self, length: int) -> Cover:
        """What the pattern amounts to on positions 0 to length - 1: a proof that no mask is needed, or `partial`."""
        return "partial"

    def note(self, length: int) -> str | None:
        """What a user should know about rows of this length, if anything."""
        return None

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        """Boolean array, True where `query` may attend to `key`."""
        raise NotImplementedError(f"{type(self).__name__} must define allowed(query, key)")


class Bidirectional(Pattern):
    """Everybody sees everybody (BERT; the 2017 encoder; cross-attention)."""

    kind: Literal["bidirectional"] = "bidirectional"

    def covers(self, length: int) -> Cover:
        return "all"

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        return (query.position >= 0) & (key.position >= 0)


class Causal(Pattern):
    """Position i sees positions 0 to i (Vaswani 2017, section 3.2.3)."""

    kind: Literal["causal"] = "causal"
    past_only = True

    def reach(self) -> Reach:
        return Reach(None, 0)

    def covers(self, length: int) -> Cover:
        return "causal"

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        return key.position <= query.position


class Prefix(Pattern):
    """The first `prefix_length` tokens are seen by all, the rest is causal (Liu 2018; T5 section 3.2.1; PrefixLM)."""

    kind: Literal["prefix"] = "prefix"
    reads = ("position", "prefix_length")
    past_only = True

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        return (key.position <= query.position) | (key.position < query.prefix_length)


class SlidingWindow(Pattern):
    """The last `window` positions, the own one counted (Mistral 2023), and the first `sinks` (StreamingLLM 2023)."""

    kind: Literal["sliding-window"] = "sliding-window"
    window: Positive
    sinks: NonNegative = 0
    past_only = True

    def reach(self) -> Reach:
        return Reach(self.window - 1, 0, self.sinks)

    def covers(self, length: int) -> Cover:
        return "causal" if length <= self.window + self.sinks else "partial"

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        near = (query.position - key.position < self.window) | (key.position < self.sinks)
        return (key.position <= query.position) & near


class Chunked(Pattern):
    """Causal inside chunks of `chunk` positions; chunks do not see each other (Llama 4's local layers, 2025)."""

    kind: Literal["chunked"] = "chunked"
    chunk: Positive
    past_only = True

    def reach(self) -> Reach:
        return Reach(self.chunk - 1, 0)

    def covers(self, length: int) -> Cover:
        return "causal" if length <= self.chunk else "partial"

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        return (key.position <= query.position) & (query.position // self.chunk == key.position // self.chunk)


class Dilated(Pattern):
    """`window` past keys `dilation` apart, the query's own counted (Beltagy 2020, section 3.1; causal form)."""

    kind: Literal["dilated"] = "dilated"
    window: Positive
    dilation: Positive
    past_only = True

    def reach(self) -> Reach:
        return Reach((self.window - 1) * self.dilation, 0)

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        distance = query.position - key.position
        return (distance >= 0) & (distance < self.window * self.dilation) & (distance % self.dilation == 0)


class Longformer(Pattern):
    """`window`/2 positions on each side and the own one; global tokens see all and are seen by all (Beltagy 2020)."""

    kind: Literal["longformer"] = "longformer"
    window: Positive
    reads = ("position", "is_global")

    def problems(self) -> Iterator[Problem]:
        if self.window % 2:
            yield "window", f"must be even, half on each side, got {self.window}"

    def reach(self) -> Reach:
        return Reach(self.window // 2, self.window // 2)

    def covers(self, length: int) -> Cover:
        return "all" if length <= self.window // 2 + 1 else "partial"

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        distance = query.position - key.position
        near = (distance <= self.window // 2) & (distance >= -(self.window // 2))
        return near | query.is_global | key.is_global


class BigBird(Pattern):
    """Blocks of `block` tokens: three neighbours, the first and last block global, `random_blocks` more (Zaheer 2020).

    The random blocks of query block b are distinct, neither global nor neighbours, and a fixed function of `seed`, b
    and the row's number of blocks; all heads share them. A row too short to have that many is attended densely.
    """

    kind: Literal["bigbird"] = "bigbird"
    block: Positive = 64
    random_blocks: NonNegative = 3
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    reads = ("position", "length")

    @property
    def tile(self) -> int:
        return self.block

    @property
    def dense_below(self) -> int:
        """Rows shorter than this are attended densely: 2 global, 3 near, and the random blocks twice over."""
        return (5 + 2 * self.random_blocks) * self.block + 1

    def note(self, length: int) -> str | None:
        if length >= self.dense_below:
            return None
        return f"bigbird: rows of {length} tokens are shorter than {self.dense_below}, and are attended densely"

    def covers(self, length: int) -> Cover:
        return "all" if length < self.dense_below else "partial"

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        q, k = query.position // self.block, key.position // self.block
        last = (query.length - 1) // self.block  # index of the last block
        edge = (q == 0) | (q == last) | (k == 0) | (k == last)
        near = (k - q <= 1) & (q - k <= 1)
        return edge | near | self._random(q, k, last) | (query.length < self.dense_below)

    def _random(self, q: Array, k: Array, last: Array) -> Array:
        """Whether key block k is one of query block q's random blocks.

        The candidates of q, all inner blocks (1 to last-1) but q-1, q, q+1, are numbered in order. Random block i has
        number (start + i * step) mod n with a step of at most n / random_blocks, which keeps the numbers distinct.
        """
        excluded_below = sum(((q + d < k) & (q + d >= 1) & (q + d < last)) * 1 for d in (-1, 0, 1))
        excluded = sum(((q + d >= 1) & (q + d < last)) * 1 for d in (-1, 0, 1))
        number = k - 1 - excluded_below
        n = last - 1 - excluded
        n = n * (n > 0) + (n <= 0)  # rows without candidates are dense; this keeps the remainder defined
        start = _scatter(q * 2 + 1, self.seed) % n
        room = n // max(self.random_blocks, 1)
        step = 1 + _scatter(q * 2 + 2, self.seed) % (room * (room > 0) + (room <= 0))
        candidate = (k >= 1) & (k < last) & ((k - q > 1) | (q - k > 1))
        hit = (q < 0) & (k < 0)  # nowhere
        for i in range(self.random_blocks):
            hit = hit | (number == (start + i * step) % n)
        return candidate & hit


class AllOf(Pattern):
    """A key is seen if every one of `patterns` allows it."""

    kind: Literal["all-of"] = "all-of"
    patterns: Tuple[Pattern]

    def problems(self) -> Iterator[Problem]:
        if not self.patterns:
            yield "patterns", "needs at least one pattern"

    @property
    def causal(self) -> bool:
        return any(pattern.causal for pattern in self.patterns)

    @property
    def fields(self) -> frozenset[str]:
        return frozenset().union(*(pattern.fields for pattern in self.patterns))

    def reach(self) -> Reach:
        reaches = [pattern.reach() for pattern in self.patterns]
        behind = [reach.behind for reach in reaches if reach.behind is not None]
        ahead = [reach.ahead for reach in reaches if reach.ahead is not None]
        sinks = max([reach.sinks for reach in reaches])
        return Reach(min(behind) if behind else None, min(ahead) if ahead else None, sinks)

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        result = self.patterns[0].allowed(query, key)
        for pattern in self.patterns[1:]:
            result = result & pattern.allowed(query, key)
        return result


class AnyOf(Pattern):
    """A key is seen if at least one of `patterns` allows it."""

    kind: Literal["any-of"] = "any-of"
    patterns: Tuple[Pattern]

    def problems(self) -> Iterator[Problem]:
        if not self.patterns:
            yield "patterns", "needs at least one pattern"

    @property
    def causal(self) -> bool:
        return all(pattern.causal for pattern in self.patterns)

    @property
    def fields(self) -> frozenset[str]:
        return frozenset().union(*(pattern.fields for pattern in self.patterns))

    def reach(self) -> Reach:
        reaches = [pattern.reach() for pattern in self.patterns]
        behind, ahead = [r.behind for r in reaches], [r.ahead for r in reaches]
        return Reach(
            None if None in behind else max(b for b in behind if b is not None),
            None if None in ahead else max(a for a in ahead if a is not None),
            max(reach.sinks for reach in reaches),
        )

    def allowed(self, query: Coordinates, key: Coordinates) -> Array:
        result = self.patterns[0].allowed(query, key)
        for pattern in self.patterns[1:]:
            result = result | pattern.allowed(query, key)
        return result


Pattern.members = (
    Bidirectional,
    Causal,
    Prefix,
    SlidingWindow,
    Chunked,
    Dilated,
    Longformer,
    BigBird,
    AllOf,
    AnyOf,
)


def _scatter(x: Array, seed: int) -> Array:
    """A pseudo-random non-negative integer below 2^31 for each x: three rounds of a linear congruential generator."""
    for _ in range(3):
        x = ((x + seed) * 1103515245 + 12345) % 2147483648
        x = x // 65536 + (x % 65536) * 32768  # the generator's low bits have short periods: move the high ones down
    return x
