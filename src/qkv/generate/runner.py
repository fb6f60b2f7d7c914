"""What generation asks of a model: to remember growing texts, and to say what may come next.

A `Runner` is a model ready to run (torch's, the native engine's); a `State` is its memory of B texts that grow
together, each at its own length. Everything else in this package knows models through these two only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Tokens = Sequence[int]


class State(Protocol):
    """B texts as a model remembers them."""

    @property
    def lengths(self) -> list[int]:
        """How many tokens of each row it holds."""

    @property
    def nbytes(self) -> int:
        """The size of the memory."""

    def extend(self, tokens: Sequence[Tokens]) -> Logits:
        """Append `tokens[b]` (one or more) to row b; the logits (B, V) after the last token of each row."""

    def extend_all(self, tokens: Sequence[Tokens]) -> list[Logits]:
        """As `extend`, with the logits after every new token: of row b (len(tokens[b]), V)."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget what comes after the first `lengths[b]` tokens of row b. Raises CacheError, changing nothing, where a
        windowed layer no longer holds what those tokens see."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be repeated or left out."""

    def fork(self) -> State:
        """An independent copy."""


class Runner(Protocol):
    """A model that can be run."""

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens that a row may have; None if there is no limit."""

    def start(self, batch: int, max_len: int, *, sources: Sequence[Tokens] | None = None, slack: int = 0) -> State:
        """An empty state for `batch` rows of at most `max_len` tokens; `sources`: what an encoder-decoder reads.
        `slack`: how many tokens a later `truncate` must be able to take back."""
