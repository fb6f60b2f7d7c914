"""`qkv generate`: continue a text with a saved model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A saved model of any format, or a pulled one's name.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the likeliest token; higher is more varied.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the text as it comes.")] = False,
) -> None:
    """Continue PROMPT with MODEL."""
    from qkv.model import load

    lm = load(model)
    limit, given = lm.config.max_seq_len, [] if lm.tokenizer is None else lm.tokenizer.encode(prompt)
    if len(given) + max_new_tokens > limit:
        print(f"qkv: the model was trained on {limit} tokens at a time; what lies beyond may be poor", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(lm.generate(prompt, max_new_tokens, temperature=temperature, seed=seed)), indent=2))
        return
    pieces = lm.stream(prompt, max_new_tokens, temperature=temperature, seed=seed)
    first = next(pieces, "")  # a request that cannot be served fails before the prompt is repeated
    print(prompt, first, sep="", end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
