"""`qkv tokenizer train`: a vocabulary of one's own text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make and look at tokenizers.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Make and look at tokenizers."""


@app.command("train")
def train(
    text: Annotated[Path, typer.Argument(metavar="FILE", help="A UTF-8 text.")],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write tokenizer.json.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens, the 256 bytes and the end token included.")] = 4096,
) -> None:
    """Train a byte-level BPE vocabulary on FILE (Sennrich 2016)."""
    from qkv.errors import DataError
    from qkv.text.corpus import read_text
    from qkv.text.folder import write_folder
    from qkv.text.training import train_bpe

    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise DataError(f"{out}: exists already; choose another folder for the tokenizer")
    content = read_text(text)
    tokenizer = train_bpe(content.splitlines(keepends=True), vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    write_folder(out, tokenizer)
    tokens = len(tokenizer.encode(content))
    size = len(content.encode())
    print(f"{out}: {tokenizer.vocab_size} tokens; {text} has {tokens:,} tokens, {size / tokens:.2f} bytes each")
