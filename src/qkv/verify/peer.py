"""The peer library on the same folder, where it is installed: an independent reading of the same files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from qkv.nn import Transformer
from qkv.verify.certificate import Row, compare
from qkv.verify.sample import sample

PATH = "peer transformers = model, float32"
TOLERANCE = 1e-4  # two float32 implementations of a whole model, each with its own order of summation


def peer(folder: Path, model: Transformer) -> Iterator[Row]:
    """The whole model of a Hugging Face folder, as its own library runs it."""
    if importlib.util.find_spec("transformers") is None:
        yield Row(PATH, None, TOLERANCE, note="transformers is not installed")
        return
    import transformers

    named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    architecture = getattr(transformers, named[0], None)
    if architecture is None:
        yield Row(PATH, None, TOLERANCE, note=f"the installed transformers has no {named[0] or 'architecture'}")
        return
    theirs = architecture.from_pretrained(folder, dtype=torch.float32).eval()
    given = sample(model.config, batch=2, length=24, seed=0)
    arguments = {"input_ids": given.tokens}
    if "source" in given.more:
        arguments = {"input_ids": given.more["source"], "decoder_input_ids": given.tokens}
    if "segments" in given.more:
        arguments["token_type_ids"] = given.more["segments"]
    if "global_tokens" in given.more:
        arguments["global_attention_mask"] = given.more["global_tokens"].long()
    with torch.no_grad():
        out = theirs(**arguments)
    expected = out.logits if "logits" in out else out.last_hidden_state
    yield compare(PATH, expected, given.run(model.float()), TOLERANCE)
