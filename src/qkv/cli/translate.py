"""`qkv translate`: texts through an encoder-decoder."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from io import TextIOWrapper
from typing import Annotated

import typer

from qkv.cli.decoding import MaxNewTokens, Running, Width, expanded
from qkv.cli.generate import Writer, finish
from qkv.cli.models import AsJson, Model
from qkv.cli.stream import Screen, note_of_length, notes, well_formed, write
from qkv.errors import GenerationError


@expanded
def command(
    model: Model,
    running: Running,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts; by default each line of standard input.")
    ] = None,
    prefix: Annotated[str, typer.Option(help='Put before each text; T5 wants "translate English to German: ".')] = "",
    beam: Width = None,
    max_new_tokens: MaxNewTokens = 256,
    as_json: AsJson = False,
) -> None:
    """Translate texts with an encoder-decoder.

    One line for each. The likeliest token is taken step by step, or the best text that a beam finds.
    """
    from qkv.config.decoding import Beam, Greedy

    with notes():
        lm = running.load(model)
        if lm.model.encoder is None or lm.model.decoder is None:
            raise GenerationError(
                f"{model}: translating needs an encoder-decoder, and this model has one stack; see `qkv generate`"
            )
        writer = Writer(lm, Greedy() if beam is None else Beam(width=beam), max_new_tokens, [])
        lines = (prefix + well_formed(text) if text.strip() else "" for text in texts or _lines())
        if as_json:
            writer.print_json([line for line in lines if line])
        else:
            _print(writer, lines)


def _print(writer: Writer, lines: Iterable[str]) -> None:
    """A line for each line; an empty one stays empty."""
    screen = Screen()
    for line in lines:
        if not line:
            write("\n")
            continue
        if writer.lm.tokenizer is not None:
            note_of_length(writer.lm, len(writer.lm.tokenizer.encode(line)), 0)
        writer.show(screen, line)
        if screen.tally.interrupted:
            break
    finish(screen.tally)


def _lines() -> Iterable[str]:
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `well_formed` says what is wrong with it
    return (line.rstrip("\r\n") for line in sys.stdin)
