"""What one forward pass knows besides hidden states: where tokens stand, who may look at whom, what is watched.

A `Context` is built once per forward and stack. It holds the coordinates of queries and keys (B or 1, T), one
`AttentionPlan` per distinct pattern, one table per distinct position scheme (cosines, biases), and the trace.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from qkv.config import Bidirectional, Coordinates, Pattern
from qkv.config.pattern import Cover

if TYPE_CHECKING:
    from qkv.nn.capture import Trace


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
    routing: list[Routing] = field(default_factory=list)
    _plans: dict[int, AttentionPlan] = field(default_factory=dict)
    _tables: dict[int, Any] = field(default_factory=dict)

    def towards(self, source: Context) -> Context:
        """The context of cross-attention: these queries, the source's keys."""
        regular = self.regular and source.regular
        return Context(self.query, source.key, regular, False, self.dtype, self.backend, self.trace)

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

    @cached_property
    def global_rows(self) -> Tensor | None:
        """(B, n): indices of each row's global tokens, filled up with others to the largest number; None if none."""
        if self.query.is_global is None:
            return None
        n = int(self.query.is_global.sum(-1).max())
        order = self.query.is_global.int().argsort(dim=-1, descending=True, stable=True)
        return order[:, :n] if n else None

    def global_plan(self, rows: Tensor) -> AttentionPlan:
        """Every key of the row and document, for the queries at `rows` (B, n)."""

        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.expand(len(rows), -1).gather(1, rows)

        query = Coordinates(pick(self.query.position), pick(self.query.document))
        # These few rows see everything: a forced backend that is made for something else is no choice for them.
        backend = "sdpa" if self.backend in ("flash", "window") else self.backend
        return AttentionPlan(Bidirectional(), query, self.key, "partial", False, backend)

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
