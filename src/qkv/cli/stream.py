"""Text on the screen while it is written: pieces as they come, Ctrl-C, notes, and the summary line."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from qkv.errors import DataError

if TYPE_CHECKING:
    from qkv.generate import Usage
    from qkv.model import TextModel

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended: 128 + SIGINT


@dataclass
class Tally:
    """What was written, over one text or several."""

    tokens: int = 0
    seconds: float = 0.0
    first: float | None = None
    """Seconds until the first text could be shown."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    cache_bytes: int = 0
    interrupted: bool = False

    def add(self, usage: Usage) -> None:
        """Count a generation."""
        self.tokens += usage.new_tokens
        self.prompt_tokens += usage.prompt_tokens
        self.reused_tokens += usage.reused_tokens
        self.cache_bytes = max(self.cache_bytes, usage.cache_bytes)

    @property
    def rate(self) -> float:
        """Tokens a second, the reading of the prompt included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def line(self) -> str:
        """The summary."""
        parts = [f"{_counted(self.tokens)} in {self.seconds:.2f} s ({self.rate:.1f} tokens/s)"]
        if self.first is not None:
            parts[0] += f", the first after {self.first:.2f} s"
        if self.cache_bytes:
            parts.append(f"cache {self.cache_bytes:,} bytes")
        if self.reused_tokens:
            parts.append(f"{self.reused_tokens} of {_counted(self.prompt_tokens)} before it reused")
        return ("interrupted: " if self.interrupted else "") + "; ".join(parts)


@dataclass
class Screen:
    """Shows texts, and measures them."""

    tally: Tally = field(default_factory=Tally)

    def show(self, pieces: Callable[[], Iterator[str]], before: str = "") -> str:
        """Show `before` and the pieces as they come; the pieces' text. Ctrl-C ends it there, and the tally says so.

        A request that cannot be served is refused before anything is shown.
        """
        start, said = perf_counter(), list[str]()
        first = None
        try:
            for piece in pieces():
                if first is None:
                    first = perf_counter() - start
                    self.tally.first = first if self.tally.first is None else self.tally.first
                    write(before)
                said.append(piece)
                write(piece)
        except KeyboardInterrupt:
            self.tally.interrupted = True
        self.tally.seconds += perf_counter() - start
        write("\n" if first is not None else f"{before}\n")
        return "".join(said)


def write(text: str) -> None:
    """Put text on stdout at once; a terminal is sent no control characters that a model may have written."""
    if sys.stdout.isatty():
        text = "".join(char if char.isprintable() or char in "\n\t" else "\N{MIDDLE DOT}" for char in text)
    print(text, end="", flush=True)


def tell(text: object) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def notes() -> Iterator[None]:
    """Within the block, a warning is one line on stderr, without the place in the code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *place, **more: tell(f"qkv: {message}")
        yield


def well_formed(text: str) -> str:
    """The text, if it can be written in UTF-8: what was none when it came in cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the text is no UTF-8 at character {error.start + 1}; convert it") from None
    return text


def note_of_length(lm: TextModel, given: int, new: int) -> None:
    """Say if a text may become longer than any in training. Where a model ends there, generation itself says so."""
    trained = lm.config.max_seq_len
    longest = given + new if lm.model.encoder is None else max(given, new)
    if lm.runner.max_length is None and longest > trained:
        tell(f"qkv: the model was trained on {trained} tokens at a time; what lies beyond may be poor")


def _counted(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def indented(text: str) -> str:
    """The lines behind a bar, without control characters, which an untrained model writes."""
    shown = "".join(char if char.isprintable() or char == "\n" else "\N{MIDDLE DOT}" for char in text)
    return "\n".join(f"  | {line}" for line in shown.split("\n"))


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Within the block, Ctrl-C only puts an entry into the list; a second one ends the program as usual."""
    asked: list[int] = []

    def handler(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)
