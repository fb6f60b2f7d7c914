"""A real model on real text: its loss is that of transformers in the same windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qkv
from qkv.checkpoint import pull
from qkv.errors import CheckpointError
from qkv.evaluate import Protocol, perplexity_of
from qkv.text import read_text

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.data]
CONTEXT, TOKENS = 128, 700


@pytest.fixture(scope="module")
def lm() -> qkv.TextModel:
    try:
        pull.pull("smollm2-135m", accept_terms=True)
    except CheckpointError as error:
        pytest.skip(str(error))
    return qkv.load("smollm2-135m", dtype=torch.float32)


@pytest.fixture(scope="module")
def peer(lm: qkv.TextModel, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """The same weights in the peer's own class."""
    folder = tmp_path_factory.mktemp("peer") / "m"
    lm.save(folder, "hf")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "rule", [Protocol("disjoint", CONTEXT), Protocol("sliding", CONTEXT, 48), Protocol("half", CONTEXT)], ids=str
)
def test_wikitext_2_in_the_windows_of_the_peer(
    lm: qkv.TextModel, peer: torch.nn.Module, data: Path, rule: Protocol
) -> None:
    """The peer's own loss, with the labels of what does not count set to -100, as its guide to perplexity does."""
    assert lm.tokenizer is not None
    text = read_text(data / "corpora" / "wikitext2_test.txt")[:6000]
    tokens = lm.tokenizer.encode(text)[:TOKENS]
    found = perplexity_of(lm, [text], rule, limit=TOKENS)
    nats, count, at = 0.0, 0, 1
    while at < len(tokens):
        if rule.kind == "half":
            start, begin, stop = at - 1, at - 1 + CONTEXT // 2 + 1, at - 1 + CONTEXT
            if stop > len(tokens):
                break
            at += CONTEXT
        else:
            stop = CONTEXT + 1 if at == 1 else at + rule.step
            start, begin = stop - CONTEXT - 1, at
            at = stop
        labels = torch.tensor([tokens[start:stop]])
        labels[0, : begin - start] = -100
        with torch.no_grad():
            loss = peer(torch.tensor([tokens[start:stop]]), labels=labels).loss
        wanted = int((labels != -100).sum())
        nats, count = nats + float(loss) * wanted, count + wanted
    assert found.tokens == count
    assert found.loss == pytest.approx(nats / count, rel=1e-4)
    assert 2 < found.loss < 4.5
    assert found.bits_per_byte < found.bits_per_token
