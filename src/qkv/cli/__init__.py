"""The command line: `qkv demo`, `qkv show`, and so on. One file per command; each imports what it needs when it runs.

`qkv --help` therefore loads neither torch, NumPy nor pydantic. An error that a user can mend is one line on stderr that
says what, where and the remedy, with exit code 2 and no traceback.
"""

from __future__ import annotations

import os
import sys

import typer

from qkv.cli import (
    bench,
    chat,
    demo,
    eval,
    generate,
    models,
    plot,
    presets,
    schema,
    show,
    tokenizer,
    train,
    translate,
    verify,
)
from qkv.cli.ranks import complain
from qkv.errors import QkvError

app = typer.Typer(
    name="qkv",
    help="One Transformer from which every Transformer is made.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.command)
app.command("show")(show.command)
app.command("presets")(presets.command)
app.command("schema")(schema.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("translate")(translate.command)
app.command("verify")(verify.command)
app.command("train")(train.command)
app.command("eval")(eval.command)
app.command("plot")(plot.command)
app.add_typer(bench.app, name="bench")
app.add_typer(tokenizer.app, name="tokenizer")
app.command("pull")(models.pull)
app.command("convert")(models.convert)
app.command("embed")(models.embed)
app.command("fill")(models.fill)


def main() -> None:
    """The entry point of the `qkv` program."""
    # Threads of torch's OpenMP that wait for each other spin for a while before they sleep. Where another program wants
    # the cores too they spin it all away: on two cores beside one busy process, training ran at 1,100 bytes a second,
    # and runs at 8,000 with short spins; alone it runs at 19,500 either way. Read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        app(prog_name="qkv")
    except QkvError as error:
        complain(str(error))
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written
        where = f"{error.filename}: " if error.filename else ""
        complain(f"{where}{error.strerror or error}")
        sys.exit(2)
