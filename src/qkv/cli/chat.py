"""`qkv chat`: a conversation with a model that was trained to have one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.decoding import Choosing, MaxNewTokens, Running, Stop, expanded
from qkv.cli.history import Conversation
from qkv.cli.models import Model
from qkv.cli.stream import Screen, note_of_length, notes, tell, well_formed
from qkv.errors import CheckpointError, QkvError

if TYPE_CHECKING:
    from qkv.config.decoding import Beam, Greedy, Sampling
    from qkv.model import TextModel

_KEPT = 1 << 30  # bytes of what earlier turns have read


@expanded
def command(
    model: Model,
    choosing: Choosing,
    running: Running,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told first.")] = None,
    history: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the conversation in this file, and go on with it.")
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    stop: Stop = None,
) -> None:
    """Talk with MODEL.

    Each line is a message; /help lists the commands.
    Ctrl-C stops an answer and keeps what was said. Ctrl-C or Ctrl-D before a message ends the program.
    """
    conversation = Conversation(history, None if system is None else well_formed(system))
    decoding = choosing.decoding()
    with notes():
        lm = running.load(model, prefix_bytes=_KEPT)
        _check(model, lm)
        Session(lm, conversation, decoding, max_new_tokens, stop or []).run()


def _check(name: str, lm: TextModel) -> None:
    """Refuse a model that no template tells how to write a conversation."""
    from qkv.text.pieces import PieceTokenizer

    tokenizer = lm.tokenizer
    if not isinstance(tokenizer, PieceTokenizer) or tokenizer.specials.chat_template is None:
        raise CheckpointError(f"{name}: has no chat template, so it cannot chat; continue texts with `qkv generate`")


@dataclass(frozen=True)
class Session:
    """A model, a conversation, and how answers are made."""

    lm: TextModel
    conversation: Conversation
    decoding: Greedy | Sampling | Beam
    max_new_tokens: int
    stop: list[str]

    def run(self) -> None:
        """Line by line, until there is none."""
        interactive = sys.stdin.isatty()
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - from then on, `input` can be edited and has a memory
        elif isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # `well_formed` says what is wrong with it
        if self.conversation.said:
            tell(f"{len(self.conversation.said)} messages so far, from {self.conversation.file}")
        going = True
        while going and (line := _line("> " if interactive else "")) is not None:
            with _told(interactive):
                going = self._obey(well_formed(line).strip())

    def _obey(self, line: str) -> bool:
        """Answer a message or follow a command; False if the program is to end."""
        name, _, rest = line.partition(" ")
        if line.startswith("//"):
            self._answer(line[1:])
        elif name in _COMMANDS:
            return _COMMANDS[name][1](self, rest.strip())
        elif line.startswith("/"):
            tell(f"qkv: {name}: unknown command; /help lists them (a message that begins with / is written //)")
        elif line:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        screen = Screen()
        asked = self.conversation.asked(text)
        said = screen.show(
            lambda: self.lm.stream_chat(asked, self.max_new_tokens, decoding=self.decoding, stop=self.stop)
        )
        tally = screen.tally
        tally.add(self.lm.usage)
        note_of_length(self.lm, tally.prompt_tokens, tally.tokens)
        tell(tally.line())
        if said or not tally.interrupted:
            self.conversation.answered(asked, said)

    def help(self, rest: str) -> bool:
        """List the commands."""
        for name, (about, _) in _COMMANDS.items():
            print(f"{name:13} {about}")
        return True

    def reset(self, rest: str) -> bool:
        """Begin anew."""
        self.conversation.reset()
        return True

    def undo(self, rest: str) -> bool:
        """Take back the last turn."""
        if not self.conversation.undo():
            tell("qkv: /undo: nothing was said yet")
        return True

    def save(self, rest: str) -> bool:
        """Write the conversation."""
        if rest:
            self.conversation.save(Path(rest))
        else:
            tell("qkv: /save: name a new file: /save talk.json")
        return True

    def exit(self, rest: str) -> bool:
        """Leave."""
        return False


_COMMANDS: dict[str, tuple[str, Callable[[Session, str], bool]]] = {
    "/help": ("this list", Session.help),
    "/reset": ("forget what was said, but not the system text", Session.reset),
    "/undo": ("take back your last message and its answer", Session.undo),
    "/save": ("write the conversation into a new file: /save FILE", Session.save),
    "/exit": ("leave; so do Ctrl-C and Ctrl-D", Session.exit),
}


def _line(prompt: str) -> str | None:
    """The next line; None if there is none."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        if prompt:
            print()
        return None


@contextmanager
def _told(interactive: bool) -> Iterator[None]:
    """A mistake costs a person one message and not the conversation; a script ends with it."""
    try:
        yield
    except (QkvError, OSError) as error:
        if not interactive:
            raise
        tell(f"qkv: {error}")
