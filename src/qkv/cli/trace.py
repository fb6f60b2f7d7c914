"""`qkv show --trace`: every matrix of one forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from qkv.config import ModelConfig
from qkv.model import build, load
from qkv.nn import Transformer, capture
from qkv.text import ByteTokenizer

_START = 0  # what stands before the first token of a shifted target


def print_trace(name: str, config: ModelConfig, text: str, as_json: bool) -> None:
    """Run one forward pass on `text` and print what was computed, in order."""
    model, tokens, about = _prepared(name, config, text)
    given = torch.tensor([tokens], dtype=torch.long)
    source = None
    if model.encoder is not None and model.decoder is not None:
        source, given = given, torch.tensor([[_START, *tokens[:-1]]])
    prefix = torch.tensor([len(tokens)]) if _reads_prefix(model.config) else None
    with torch.inference_mode(), capture(model) as trace:
        model(given, source=source, prefix_length=prefix)
    inputs = {"tokens": given} | ({"source": source} if source is not None else {})
    matrices = {key: value.numpy()[0] for key, value in (inputs | dict(trace)).items()}
    if as_json:
        print(json.dumps({"about": about, "trace": {key: value.tolist() for key, value in matrices.items()}}))
        return
    print(about)
    with np.printoptions(precision=3, suppress=True, threshold=200, edgeitems=3, linewidth=120):
        for key, value in matrices.items():
            print(f"\n{key} {value.shape}\n{value}")


def _prepared(name: str, config: ModelConfig, text: str) -> tuple[Transformer, list[int], str]:
    """The model, the tokens of `text`, and a line that says what they are."""
    if Path(name).is_dir():
        lm = load(name)
        if lm.tokenizer is not None:
            return lm.model, lm.tokenizer.encode(text), f"{name}: one forward pass of the saved model; no batch axis"
    toy = config.toy()
    tokens = [byte % toy.vocab_size for byte in ByteTokenizer().encode(text)]
    about = (
        f"{name}, shrunk to d_model {toy.d_model} and {toy.vocab_size} tokens, with random weights (seed 0): "
        f"one forward pass on the bytes of the text modulo {toy.vocab_size}; no batch axis"
    )
    return build(toy, seed=0), tokens, about


def _reads_prefix(config: ModelConfig) -> bool:
    blocks = [block for stack in config.stacks.values() for block in stack.blocks]
    return any("prefix_length" in block.attention.pattern.fields for block in blocks)
