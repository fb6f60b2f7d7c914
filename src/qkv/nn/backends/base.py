"""What a backend is, and what a call of it carries besides q, k, v and the plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from qkv.config import Coordinates
from qkv.nn.context import AttentionPlan


@dataclass(frozen=True)
class Relative:
    """What a position scheme adds to scores, for a backend that meets keys block by block."""

    at: Callable[[Tensor, Tensor, Coordinates, Coordinates], Tensor]
    """From queries, keys and where both stand, what joins their scaled scores."""
    parameters: tuple[Tensor, ...]
    """That it is made of."""


@dataclass(frozen=True)
class Scoring:
    """How scores become weights."""

    scale: float
    bias: Tensor | None = None
    """Joins the scaled scores; broadcastable to (B, H, Q, K)."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """(H,): one more score per head, whose weight goes to nothing."""
    dropout: float = 0.0
    values: Callable[[Tensor], Tensor | None] | None = None
    """From the weights (B, H, Q, K), what joins the output."""
    relative: Relative | None = None
    """What `bias` is towards these keys, towards any others."""

    @property
    def special(self) -> str | None:
        """The feature that only the eager formula has, in words; None if there is none."""
        if self.softcap is not None:
            return "it has no softcap"
        if self.sinks is not None:
            return "it has no attention sinks"
        return "it does not show the attention weights" if self.values is not None else None


class Backend(ABC):
    """One way to compute attention."""

    name: ClassVar[str]

    @abstractmethod
    def refuses(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> str | None:
        """Why it cannot serve the call; None if it can."""

    def worthwhile(self, q: Tensor, plan: AttentionPlan) -> bool:
        """Whether it is a good choice where it is a possible one."""
        return True

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        """The output (B, H, Q, Fv)."""
