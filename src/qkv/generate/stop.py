"""The text of a row while its tokens arrive, and the strings that end it.

    tokens --Spelling--> text, whole characters --StopText--> text that may be shown, or the stop that ended it

A stop string ends a text wherever its characters came from: one token, several, or a part of one. Of several stops the
one that is complete first counts, and of those that are complete at the same character the one that began first. This
rule needs no look ahead, so that the result does not depend on how the text was cut into pieces:

    stops "abcd", "bc"      text "xabcd" -> "xa", stopped by "bc"      (with include_stop: "xabc")

What is held back is the longest end of the text that is a proper beginning of a stop, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from qkv.errors import GenerationError

Spell = Callable[[Iterable[int]], Iterator[str]]
"""The text of new tokens, piece by piece as they are read: a tokenizer's `stream`, best one that takes them for the
continuation of a text; with one that takes them for the beginning, `Spelling` can seldom let earlier tokens go."""

WINDOW = 16
"""How many tokens `Spelling` spells again for each new one, about; what came before is settled."""


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several, checked."""
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Sequence):
        raise GenerationError(f"stop: expected a string or a list of strings, got {stop!r}{_remedy(stop)}")
    for one in stop:
        if not isinstance(one, str):
            raise GenerationError(f"stop: expected strings, got {one!r}{_remedy(one)}")
        if not one:
            raise GenerationError("stop: a stop string is empty, which would end every text; leave it out")
    return tuple(dict.fromkeys(stop))


def _remedy(value: object) -> str:
    """A number may mean its digits or a token; whoever wrote it knows."""
    if isinstance(value, int):
        return f'; write "{value}" for the text, or put {value} into `ends` for the token'
    return ""


class StopText:
    """Lets text pass until one of the stops is complete."""

    def __init__(self, stops: str | Sequence[str], include_stop: bool = False) -> None:
        self._stops = stop_strings(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        self.held = ""
        """What may be the beginning of a stop."""
        self.stopped: str | None = None
        """The stop that ended the text."""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop that ended it, if one did. Nothing passes after that."""
        if self.stopped is not None:
            return "", self.stopped
        text = self.held + piece
        # Nothing held is a whole stop, so that the first place of each stop is its first completion.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.stopped = min(found)
            self.held = ""
            return text[: end if self._include_stop else start], self.stopped
        keep = next((n for n in range(min(self._longest - 1, len(text)), 0, -1) if self._begins(text[-n:])), 0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, now that the text has ended without a stop."""
        rest, self.held = self.held, ""
        return rest

    def _begins(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)


class Spelling:
    """The text of tokens that come one at a time, in whole characters.

    `spell` reads tokens when it wants them, a batch hands them out when it has them. So the last tokens are spelled
    anew with each one that comes, and what `spell` gave before it ran out of tokens is final. Earlier tokens are left
    out once spelling the later ones alone was seen to make no difference.
    """

    def __init__(self, spell: Spell, window: int = WINDOW) -> None:
        self._spell, self._window = spell, window
        self._limit = window
        self._tokens: list[int] = []
        self._shown = 0

    def feed(self, token: int) -> str:
        """The text that this token completes."""
        self._tokens.append(token)
        final, _ = self._spelled(self._tokens)
        new, self._shown = final[self._shown :], len(final)
        if len(self._tokens) >= self._limit:
            self._settle()
        return new

    def flush(self) -> str:
        """The text of the bytes that are still waiting for the rest of their character: U+FFFD."""
        text = "".join(self._spelled(self._tokens))
        new, self._shown = text[self._shown :], len(text)
        return new

    def _spelled(self, tokens: Sequence[int]) -> tuple[str, str]:
        """The text that stays whatever follows, and what is added if nothing does."""
        final: list[str] = []
        last: list[str] = []
        read = 0

        def reading() -> Iterator[int]:
            nonlocal read
            for token in tokens:
                yield token
                read += 1  # the next one is asked for

        for piece in self._spell(reading()):
            (final if read < len(tokens) else last).append(piece)
        return "".join(final), "".join(last)

    def _settle(self) -> None:
        """Drop the earlier half of the tokens if the others spell the same without them."""
        final, last = self._spelled(self._tokens)
        half = len(self._tokens) // 2
        for cut in range(half, min(half + 8, len(self._tokens))):
            before, _ = self._spelled(self._tokens[:cut])
            after = self._spelled(self._tokens[cut:])
            # Without any text after the cut there would be nothing that proves it.
            if after[0] and (before + after[0], after[1]) == (final, last):
                self._tokens, self._shown, self._limit = self._tokens[cut:], self._shown - len(before), self._window
                return
        self._limit = len(self._tokens) + self._window // 2


class RowText:
    """The text of one row: spelled, watched for stops, and shown as early as both allow."""

    def __init__(self, spell: Spell | None, stops: Sequence[str], include_stop: bool, least: int) -> None:
        """`least`: how many tokens the row has at least; stops are looked for in the text from the last of these on."""
        if spell is None and stops:
            raise GenerationError("stop: stop strings are text, and there is no tokenizer; use `ends` for tokens")
        self._spelling = None if spell is None else Spelling(spell)
        self._watch = StopText(stops, include_stop)
        self._early = max(least - 1, 0)

    def feed(self, token: int) -> tuple[str, str | None]:
        """The text that may be shown after this token, and the stop string that ended it."""
        if self._spelling is None:
            return "", None
        text = self._spelling.feed(token)
        if self._early:
            self._early -= 1
            return text, None
        return self._watch.feed(text)

    def flush(self) -> tuple[str, str | None]:
        """The rest of the text, now that no token follows."""
        if self._spelling is None:
            return "", None
        text, stopped = self._watch.feed(self._spelling.flush())
        return text + self._watch.flush(), stopped
