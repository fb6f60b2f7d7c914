"""The whole way: a recipe's data, prepared, packed, and read by a model that keeps documents apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from qkv.config.recipe import DataSource
from qkv.model import build
from qkv.nn import Transformer
from qkv.text import ByteTokenizer
from qkv.train.batch import Example
from qkv.train.data import Stream, prepare
from qkv.train.demo import demo_config

from .toys import written

CONFIG = demo_config().override({"d_model": 16, "decoder.n_layers": 2})


def logits(model: Transformer, row: Example) -> torch.Tensor:
    assert row.documents is not None
    tokens, documents = (torch.from_numpy(values)[None] for values in (row.tokens, row.documents))
    found: torch.Tensor = model(tokens, documents=documents).logits[0]
    return found


def test_a_changed_document_changes_nothing_of_its_neighbours(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in ("one document", "another", "the third of them", "last")]
    source = DataSource(
        train=(written(tmp_path, "a.jsonl", "\n".join(lines)),),
        format="jsonl",
        context=24,
        documents=True,
        valid_share=0.0,
    )
    shards = prepare(source, ByteTokenizer(), tmp_path / "out")
    stream = Stream(shards, source.context, 2, seed=0, documents=source.documents)
    model = build(CONFIG, seed=0)
    for row in stream.draw(len(stream.rows)):
        assert row.documents is not None
        for document in np.unique(row.documents):
            own = row.documents == document
            changed = replace(row, tokens=np.where(own, (row.tokens + 1) % 256, row.tokens))
            before, after = logits(model, row), logits(model, changed)
            others = torch.from_numpy(~own)
            assert torch.equal(before[others], after[others])
            assert not torch.equal(before[~others], after[~others])
            alone = model(torch.from_numpy(row.tokens[own])[None]).logits[0]
            deviation = (alone - before[~others]).abs().max() / alone.abs().max()
            assert deviation < 1e-5
