"""The states of earlier texts, so that what a new prompt shares with one of them is not computed again.

    earlier text   a b c d e f g           a copy of its state, cut back to the 4 tokens that both have,
    new prompt     a b c d x y             reads "x y": 2 tokens in place of 6

The logits after a text depend on its tokens, not on how they were read, so a hit and a miss give the same. What is kept
is only ever copied, never changed. The last token of a prompt is always read, for its logits, unless the whole prompt
was kept together with them.

A state may be unable to go back (a windowed layer no longer holds what the earlier tokens see; it raises CacheError
then): the next best one is taken, or none. States are made with room for more: a power of two of tokens, and `slack`
tokens that can be taken back in any case.

For models in which a token sees only what stands before it. Where a prompt is read both ways (a prefix pattern), its
first tokens depend on the last, and nothing may be reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qkv.errors import CacheError, GenerationError
from qkv.generate.runner import Logits, Runner, State, Tokens

SMALLEST = 256
"""The room of the smallest kept state, in tokens. Growing by doubling, a conversation is read anew a few times only."""


class Room(NamedTuple):
    """What a state was started with."""

    max_len: int
    slack: int


@dataclass(frozen=True)
class Prefilled:
    """Prompts that were read."""

    state: State
    logits: Logits
    """(B, V), after the last token of each prompt."""
    reused: tuple[int, ...]
    """How many tokens of each prompt were not computed."""
    room: Room


def read(runner: Runner, prompts: Sequence[Tokens], room: Room, sources: Sequence[Tokens] | None) -> Prefilled:
    """Read prompts from their beginning, as the rows of a new state."""
    state = runner.start(len(prompts), room.max_len, sources=sources, slack=room.slack)
    return Prefilled(state, state.extend(prompts), (0,) * len(prompts), room)


Text = tuple[int, ...]


class Rows(NamedTuple):
    """What the rows of a state hold, and the key of a kept one."""

    texts: tuple[Text, ...]
    sources: tuple[Text, ...] | None


def rows_of(texts: Sequence[Tokens], sources: Sequence[Tokens] | None) -> Rows:
    """Texts, and what an encoder-decoder read for each, as a key."""
    return Rows(tuple(map(tuple, texts)), None if sources is None else tuple(map(tuple, sources)))


@dataclass(frozen=True)
class _Entry:
    rows: Rows
    state: State
    logits: Logits | None
    """After each text, if they are known."""
    room: Room

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + (0 if self.logits is None else self.logits.nbytes)


class _Match(NamedTuple):
    """A row of a kept state, and how many tokens of each prompt it saves."""

    entry: _Entry
    row: int
    saved: tuple[int, ...]


class PrefixCache:
    """Earlier states of one runner, at most `max_bytes` of them; the least recently used leave first.

    Whoever changes the weights of the model calls `clear`.
    """

    def __init__(self, runner: Runner, max_bytes: int, slack: int = 32) -> None:
        if max_bytes < 1:
            raise GenerationError(f"max_bytes: must be 1 or more, got {max_bytes}")
        if slack < 0:
            raise GenerationError(f"slack: must be 0 or more tokens, got {slack}")
        self.runner, self.max_bytes, self.slack = runner, max_bytes, slack
        self._entries: dict[Rows, _Entry] = {}  # the least recently used first
        self.hits = 0
        """Prompts of which some tokens were reused."""
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """The size of what is kept."""
        return sum(entry.nbytes for entry in self._entries.values())

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def prefill(self, prompts: Sequence[Tokens], room: Room, sources: Sequence[Tokens] | None = None) -> Prefilled:
        """Read prompts, going on from the kept text that saves most if there is one; they are kept in turn."""
        rows = rows_of(prompts, sources)
        room = Room(self._roomy(room.max_len), max(room.slack, self.slack))
        resumed = (self._resumed(match, rows) for match in self._matches(rows, room))
        done = next((one for one in resumed if one is not None), None) or read(self.runner, prompts, room, sources)
        hits = sum(n > 0 for n in done.reused)
        self.hits, self.misses = self.hits + hits, self.misses + len(prompts) - hits
        if done.reused != tuple(map(len, prompts)):
            self.keep(rows, done.state, done.room, logits=done.logits)
        return done

    def keep(
        self,
        rows: Rows,
        state: State,
        room: Room,
        *,
        logits: Logits | None = None,
        places: Sequence[int] | None = None,
        copy: bool = True,
    ) -> None:
        """Keep a state that holds `rows`, at `places` if it holds others too; `copy=False`: the caller is done with it.

        A state larger than `max_bytes` is not even copied.
        """
        if rows in self._entries:
            self._touch(rows)
            return
        if state.nbytes > self.max_bytes:
            return
        kept = state.fork() if copy else state
        if places is not None:
            kept.select(places)
        entry = _Entry(rows, kept, None if logits is None else logits.copy(), room)
        if entry.nbytes <= self.max_bytes:
            self._entries[rows] = entry
        while self.nbytes > self.max_bytes:
            del self._entries[next(iter(self._entries))]

    def _matches(self, rows: Rows, room: Room) -> list[_Match]:
        """What can be used for these prompts, the most saving first."""
        found = []
        for entry in self._entries.values():
            if entry.room.max_len < room.max_len or entry.room.slack < room.slack:
                continue
            for row, text in enumerate(entry.rows.texts):
                source = None if entry.rows.sources is None else entry.rows.sources[row]
                if any(other != source for other in rows.sources or [None]):
                    continue
                # One prompt, kept with its logits: nothing is left to compute.
                whole = entry.logits is not None and rows.texts == (text,)
                saved = tuple(min(_shared(text, prompt), len(prompt) - (not whole)) for prompt in rows.texts)
                if any(saved):
                    found.append(_Match(entry, row, saved))
        return sorted(found, key=lambda match: -sum(match.saved))

    def _resumed(self, match: _Match, rows: Rows) -> Prefilled | None:
        """The prompts read from a kept row on; None if its state cannot go back that far."""
        entry, row, saved = match
        state = entry.state.fork()
        if (row,) * len(saved) != tuple(range(len(entry.rows.texts))):
            state.select([row] * len(saved))
        try:
            if state.lengths != list(saved):
                state.truncate(saved)
        except CacheError:
            return None
        self._touch(entry.rows)
        if saved == tuple(map(len, rows.texts)):
            assert entry.logits is not None
            return Prefilled(state, entry.logits[[row]], saved, entry.room)
        rest = [prompt[n:] for prompt, n in zip(rows.texts, saved, strict=True)]
        return Prefilled(state, state.extend(rest), saved, entry.room)

    def _touch(self, rows: Rows) -> None:
        self._entries[rows] = self._entries.pop(rows)

    def _roomy(self, max_len: int) -> int:
        """Room for what may follow in later calls."""
        roomy, limit = max(SMALLEST, 1 << (max_len - 1).bit_length()), self.runner.max_length
        return roomy if limit is None else max(min(roomy, limit), max_len)


def _shared(one: Text, other: Text) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
