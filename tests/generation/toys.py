"""A model small enough to reason about: NumPy, exact, and every call is written down.

    h_0 = sin(sum of the source's embeddings)        h_{t+1} = sin(A h_t + E[token])        logits = U h

The logits depend on the whole text and its order, and are computed row by row, so that they do not depend on the batch
or on how a text was cut into calls. A `window` makes `truncate` refuse like a ring of window + slack slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from qkv.errors import CacheError
from qkv.generate.runner import Logits, Tokens

D = 12


@dataclass
class Toy:
    """A runner over a random recurrent function of the text."""

    vocab_size: int = 16
    max_length: int | None = None
    seed: int = 0
    scale: float = 1.0
    """How decided the model is."""
    window: int | None = None
    log: list[tuple[str, list[int]]] = field(default_factory=list)
    """What was called: ("start", [batch, max_len, slack]); ("extend" and "extend_all", tokens read by each row);
    ("truncate", lengths); ("select", rows); ("fork", [])."""

    def __post_init__(self) -> None:
        draws = np.random.default_rng(self.seed)
        # Strong enough that the past is not forgotten, and no token is favoured: greedy texts do not settle down.
        self.mix = draws.normal(0, 2.2 / np.sqrt(D), (D, D)).astype(np.float32)
        self.embed = draws.normal(0, 0.7, (self.vocab_size, D)).astype(np.float32)
        rows = draws.normal(0, 1, (self.vocab_size, D))
        self.unembed = (3 * self.scale * rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    def start(self, batch: int, max_len: int, *, sources: Sequence[Tokens] | None = None, slack: int = 0) -> ToyState:
        """Empty rows."""
        self.log.append(("start", [batch, max_len, slack]))
        first = [np.sin(sum((self.embed[t] for t in source), np.zeros(D, np.float32))) for source in sources or ()]
        rows = [_Text([state]) for state in first or [np.zeros(D, np.float32)] * batch]
        assert len(rows) == batch
        return ToyState(self, rows, max_len, slack)

    def logits_after(self, text: Tokens, source: Tokens = ()) -> Logits:
        """The logits after a text, without any log or state."""
        hidden = np.sin(sum((self.embed[t] for t in source), np.zeros(D, np.float32)))
        for token in text:
            hidden = self.step(hidden, token)
        return self.read(hidden)

    def step(self, hidden: np.ndarray, token: int) -> np.ndarray:
        """One token."""
        return np.sin((self.mix * hidden).sum(1) + self.embed[token])

    def read(self, hidden: np.ndarray) -> Logits:
        """The logits (V,)."""
        return (self.unembed * hidden).sum(1)

    def calls(self, *names: str) -> list[list[int]]:
        """What was passed to these methods, in order."""
        return [what for name, what in self.log if name in names]

    @property
    def tokens_read(self) -> int:
        """How many tokens were computed."""
        return sum(map(sum, self.calls("extend", "extend_all")))


@dataclass
class _Text:
    """One row."""

    hidden: list[np.ndarray]
    """Before any token, and after each."""
    lost: int = 0
    """How many tokens have left the ring."""

    @property
    def length(self) -> int:
        return len(self.hidden) - 1


class ToyState:
    """Texts of a toy."""

    def __init__(self, runner: Toy, rows: list[_Text], max_len: int, slack: int) -> None:
        self._runner, self._rows, self.max_len, self.slack = runner, rows, max_len, slack

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row has."""
        return [row.length for row in self._rows]

    @property
    def nbytes(self) -> int:
        """As a static buffer has: for all the tokens that may come."""
        return len(self._rows) * self.max_len * D * 4

    def extend(self, tokens: Sequence[Tokens]) -> Logits:
        """Read tokens; the logits after the last of each row."""
        return np.stack([rows[-1] for rows in self._extended("extend", tokens)])

    def extend_all(self, tokens: Sequence[Tokens]) -> list[Logits]:
        """Read tokens; the logits after each."""
        return [np.stack(rows) for rows in self._extended("extend_all", tokens)]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Go back, where the ring still has what the kept tokens see."""
        self._runner.log.append(("truncate", list(lengths)))
        assert len(lengths) == len(self._rows)
        for row, length in zip(self._rows, lengths, strict=True):
            assert 0 <= length <= row.length
            if row.lost and length < row.lost + self._window:
                raise CacheError(f"truncate: {length} of {row.length} tokens, but {row.lost} have left the window")
        for row, length in zip(self._rows, lengths, strict=True):
            del row.hidden[length + 1 :]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        self._runner.log.append(("select", list(rows)))
        self._rows = [_Text(list(self._rows[row].hidden), self._rows[row].lost) for row in rows]

    def fork(self) -> ToyState:
        """A copy."""
        self._runner.log.append(("fork", []))
        rows = [_Text(list(row.hidden), row.lost) for row in self._rows]
        return ToyState(self._runner, rows, self.max_len, self.slack)

    @property
    def _window(self) -> int:
        return self._runner.window or 0

    def _extended(self, name: str, tokens: Sequence[Tokens]) -> list[list[Logits]]:
        self._runner.log.append((name, [len(row) for row in tokens]))
        assert len(tokens) == len(self._rows)
        assert all(len(row) > 0 for row in tokens), "a row without a token to read"
        return [self._grown(row, new) for row, new in zip(self._rows, tokens, strict=True)]

    def _grown(self, row: _Text, new: Tokens) -> list[Logits]:
        for token in new:
            row.hidden.append(self._runner.step(row.hidden[-1], token))
        limits = [limit for limit in (self.max_len, self._runner.max_length) if limit is not None]
        if row.length > min(limits):
            raise CacheError(f"full: {row.length} tokens, room for {min(limits)}")
        if self._runner.window is not None:
            row.lost = max(row.lost, row.length - self._window - self.slack)
        return [self._runner.read(hidden) for hidden in row.hidden[-len(new) :]]


def letters(tokens: Iterable[int]) -> Iterator[str]:
    """Token i is the i-th letter."""
    return (chr(ord("a") + token) for token in tokens)
