"""What one forward pass knows besides hidden states: where tokens stand, who may look at whom, what is watched.

A `Context` is built once per forward and stack. It holds the coordinates of queries and keys (B or 1, T), one
`AttentionPlan` per distinct pattern, one table per distinct position scheme (cosines, biases), and the trace.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from qkv.config import Coordinates, Pattern
from qkv.config.pattern import Cover

if TYPE_CHECKING:
    from qkv.nn.capture import Trace
    from qkv.nn.memory import Memory, Streams
    from qkv.nn.recall import Recall


_RECALLED = -1
"""Among the views of a context, which are otherwise those of a cache's groups."""


class Routing(NamedTuple):
    """How one mixture-of-experts layer sent its N tokens."""

    scores: Tensor
    """(N, E): the router's softmax or sigmoid scores."""
    experts: Tensor
    """(N, K): the chosen experts."""
    weights: Tensor
    """(N, K): the weights of their outputs."""


@dataclass
class AttentionPlan:
    """Who may look at whom in this forward, for one pattern.

    `cover` is "all" or "causal" where it is proved that no mask is needed; `contiguous` says that inside a row and
    document the distance of two tokens' indices is that of their positions, so that a window is a band.
    """

    pattern: Pattern
    query: Coordinates
    key: Coordinates
    cover: Cover
    contiguous: bool
    backend: str
    kept: dict[str, Any] = field(default_factory=dict)
    """What a backend worked out in one layer, for those to come."""
    _mask: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """(B or 1, Q, K), True where a query may look; made on first use."""
        if self._mask is None:
            self._mask = visible(self.pattern, self.query, self.key)
        return self._mask


def visible(pattern: Pattern, query: Coordinates, key: Coordinates) -> Tensor:
    """(B or 1, Q, K): the pattern's predicate, and that both tokens exist and lie in one document."""
    q, k = _expand(query, -1), _expand(key, -2)
    mask: Tensor = pattern.allowed(q, k) & (q.position >= 0) & (k.position >= 0)
    if query.document is not None and key.document is not None:
        mask = mask & (q.document == k.document)
    return mask


def _expand(at: Coordinates, dim: int) -> Coordinates:
    def place(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.unsqueeze(dim)

    return Coordinates(
        place(at.position), place(at.document), place(at.is_global), place(at.prefix_length), place(at.length)
    )


@dataclass
class Context:
    """One forward pass of one stack. `source` and `cross` are what its cross-attention looks at."""

    query: Coordinates
    key: Coordinates
    regular: bool
    """Whether all tokens exist and stand at positions 0, 1, 2 ... of one document."""
    contiguous: bool
    """Whether distances of indices are distances of positions, inside a row and document."""
    dtype: torch.dtype = torch.float32
    """That of the weights; tables are rounded to it once."""
    backend: str = "auto"
    trace: Trace | None = None
    source: Tensor | None = None
    cross: Context | None = None
    shared: dict[int, Any] = field(default_factory=dict)
    """The position schemes whose tensors the layers share, by number."""
    routing: deque[Routing] = field(default_factory=deque)
    """Not a list: where blocks are wrapped (FSDP), lists and what they hold are copied on the way in."""
    memory: Memory | None = None
    """The cache, in models that read on where they ended."""
    recall: Recall | None = None
    """What the layers read of the tokens before, in models that are trained with it."""
    inputs: list[Tensor] = field(default_factory=list)
    """What the layers read now, to be recalled later."""
    gathered: bool = False
    """Whether no key that a query sees is farther than there are keys: stored ones, without sinks."""
    _views: dict[int, Context] = field(default_factory=dict)
    _plans: dict[int, AttentionPlan] = field(default_factory=dict)
    _tables: dict[int, Any] = field(default_factory=dict)

    def towards(self, source: Coordinates, whole: bool) -> Context:
        """The context of cross-attention: these queries, the source's keys; `whole`: all of both exist."""
        return Context(self.query, source, whole, False, self.dtype, self.backend, self.trace, memory=self.memory)

    def seen_from(self, attention: str) -> Context:
        """This context with the keys that the cache shows to the attention of that name."""
        if self.memory is None or self.memory.cache.group_of.get(attention) is None:
            return self
        group = self.memory.group(attention)
        if group.keys is self.query:
            return self  # a first chunk sees itself
        number = self.memory.cache.group_of[attention]
        if number not in self._views:
            self._views[number] = replace(
                self,
                key=group.keys,
                regular=False,
                contiguous=False,
                gathered=self.memory.cache.groups[number].sinks == 0,
                _views={},
                _plans={},
                _tables={},
            )
        return self._views[number]

    @property
    def of_keys(self) -> Context:
        """This context for what stands where new keys do: before the queries, too, where something is recalled."""
        if self.recall is None or not self.recall.length:
            return self
        if _RECALLED not in self._views:
            self._views[_RECALLED] = replace(self, query=self.key, _views={}, _plans={}, _tables={})
        return self._views[_RECALLED]

    def remember(self, attention: str, new: Callable[[], Streams]) -> Streams:
        """The streams that the queries look at: those of `new`, and what the cache has. A stored source needs none."""
        if self.memory is None:
            return new()
        group = self.memory.group(attention)
        return group.stored(attention, self.dtype) if group.filled else group.append(attention, new())

    @cached_property
    def farthest(self) -> int:
        """One more than the largest distance of a query to a key before it."""
        if self.contiguous or self.gathered:
            return self.key.position.shape[-1]
        newest = self.query.position.max()
        return int((newest - self.key.position.masked_fill(self.key.position < 0, newest).min()).clamp(min=0)) + 1

    def plan(self, key: int, pattern: Pattern) -> AttentionPlan:
        """The plan of the stack's pattern number `key`."""
        if key not in self._plans:
            length = self.key.position.shape[-1]
            cover = pattern.covers(length) if self.regular else "partial"
            note = pattern.note(length)
            if note is not None and not torch.compiler.is_compiling():
                warnings.warn(note, stacklevel=2)
            self._plans[key] = AttentionPlan(pattern, self.query, self.key, cover, self.contiguous, self.backend)
        return self._plans[key]

    def between(self, query: Coordinates, key: Coordinates) -> Context:
        """This context for other tokens, of which nothing is known but where they stand."""
        return replace(
            self, query=query, key=key, regular=False, contiguous=False, gathered=False, _plans={}, _tables={}
        )

    @cached_property
    def global_rows(self) -> Tensor | None:
        """(B, n): indices of each row's global tokens, filled up with others to the largest number; None if none."""
        if self.query.is_global is None:
            return None
        n = int(self.query.is_global.sum(-1).max())
        order = self.query.is_global.int().argsort(dim=-1, descending=True, stable=True)
        return order[:, :n] if n else None

    def at_rows(self, rows: Tensor) -> Context:
        """This context for the queries at `rows` (B, n) alone."""

        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.expand(len(rows), -1).gather(1, rows)

        q = self.query
        query = Coordinates(pick(q.position), pick(q.document), pick(q.is_global), q.prefix_length, pick(q.length))
        # These few rows see everything: a forced backend that is made for something else is no choice for them.
        backend = "sdpa" if self.backend in ("flash", "window") else self.backend
        return replace(
            self, query=query, regular=False, contiguous=False, backend=backend, _views={}, _plans={}, _tables={}
        )

    def table(self, key: int, scheme: Any) -> Any:
        """What the stack's position scheme number `key` computes once per forward."""
        if key not in self._tables:
            self._tables[key] = scheme.table(self)
        return self._tables[key]

    def tap(self, module: nn.Module, point: str, value: Tensor) -> Tensor:
        """Show `value` to the trace, if there is one."""
        if self.trace is not None:
            self.trace.record(module, point, lambda: value)
        return value
