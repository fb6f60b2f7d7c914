"""Masked models: figures against one forward per token, places as training draws them, special tokens left alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import qkv
from qkv.config import training
from qkv.errors import DataError
from qkv.evaluate.masked import candidates, chosen, fill_gaps, special_tokens
from qkv.train.batch import IGNORE, Example
from qkv.train.objectives import make
from qkv.train.vocabulary import Vocabulary

from .small import TEXT, framed, masked, of_bytes, of_pieces

LM = masked()
SPECIAL = special_tokens(framed().specials)


def row(text: str) -> list[int]:
    return framed().encode(text)


def cost(tokens: list[int], places: list[int]) -> tuple[float, int]:
    """-log p of the tokens at these places, hidden together, and how many are the likeliest."""
    hidden = torch.tensor([tokens])
    hidden[0, places] = framed().specials.mask
    with torch.no_grad():
        scores = LM.model(hidden).logits[0, places].log_softmax(-1)
    wanted = torch.tensor(tokens)[places]
    return -float(scores.gather(1, wanted[:, None]).sum()), int((scores.argmax(-1) == wanted).sum())


def test_it_equals_one_forward_per_row_and_per_token() -> None:
    texts = [TEXT[:30], TEXT[30:45]]
    found = fill_gaps(LM, texts, seed=5)
    rows = [row(text) for text in texts]
    together = [cost(tokens, chosen(tokens, SPECIAL, 0.15, [5, n]).tolist()) for n, tokens in enumerate(rows)]
    assert found.hidden.nats == pytest.approx(sum(nats for nats, _ in together), rel=1e-5)
    assert found.right == sum(right for _, right in together)
    singly = [cost(tokens, [place])[0] for tokens in rows for place in range(1, len(tokens) - 1)]
    assert found.pseudo is not None
    assert found.pseudo.tokens == len(singly)
    assert found.pseudo.nats == pytest.approx(sum(singly), rel=1e-5)
    assert found.pseudo.perplexity == pytest.approx(math.exp(sum(singly) / len(singly)), rel=1e-5)
    assert found.texts == 2
    assert found.protocol == "15% hidden together, seed 5; windows of 64 tokens"


def test_a_model_that_knows_the_answer_is_always_right() -> None:
    """The bias alone decides: the model always says token 70."""
    model = qkv.build(LM.config)
    with torch.no_grad():
        model.head.bias.zero_()[70] = 50.0
    lm, token = qkv.TextModel(model, framed()), framed().decode([70])
    found = fill_gaps(lm, [token * 20])
    assert row(token * 20).count(70) == 20
    assert (found.accuracy, found.right) == (1.0, 3)
    assert found.pseudo is not None
    assert found.pseudo.perplexity == pytest.approx(1, abs=1e-6)
    assert fill_gaps(lm, ["xyz"]).accuracy == 0


def test_places_are_those_of_the_training_objective() -> None:
    vocabulary = Vocabulary.of(framed())
    assert sorted(SPECIAL) == np.flatnonzero(vocabulary.special).tolist()
    maker = make(training.Masked(), vocabulary, LM.config)
    tokens = row(TEXT[:50])
    for seed in range(20):
        places = chosen(tokens, SPECIAL, 0.15, [seed])
        batch = maker.batch([Example(np.array(tokens))], np.random.default_rng([seed]))
        assert places.tolist() == np.flatnonzero(np.array(batch.targets)[0] != IGNORE).tolist()
        assert len(places) == max(1, round(0.15 * (len(tokens) - 2)))
        assert not {0, len(tokens) - 1} & set(places.tolist())


def test_special_tokens_are_never_hidden() -> None:
    mask, after = framed().specials.mask, row("ab")[-1]
    tokens = [*row("ab")[:-1], mask, after, *row("c")]
    kept = candidates(tokens, SPECIAL).tolist()
    assert [tokens[place] for place in kept] == [*framed().encode("ab", add_special=False), tokens[-2]]
    assert len(chosen([after, mask], SPECIAL, 0.5, [0])) == 0
    assert len(chosen(tokens, SPECIAL, 1.0, [0])) == len(kept)


def test_a_seed_decides_and_another_decides_otherwise() -> None:
    first, again, other = (fill_gaps(LM, [TEXT], seed=seed, singly=0) for seed in (1, 1, 2))
    assert first == again
    assert first.hidden.nats != other.hidden.nats
    assert first.pseudo is None
    assert first.to_dict()["pseudo_perplexity"] is None


def test_long_texts_are_cut_and_limits_are_kept() -> None:
    tokens = framed().encode(TEXT, add_special=False)
    found = fill_gaps(LM, [TEXT], context=12, singly=7, share=1.0)
    assert found.hidden.tokens == len(tokens)
    assert found.pseudo is not None
    assert found.pseudo.tokens == 7
    nats = [cost([*row("")[:1], *part, *row("")[1:]], list(range(1, len(part) + 1)))[0]
            for part in (tokens[at : at + 10] for at in range(0, len(tokens), 10))]  # fmt: skip
    assert found.hidden.nats == pytest.approx(sum(nats), rel=1e-5)
    limited = fill_gaps(LM, [TEXT, TEXT], share=1.0, limit=25, singly=1000)
    assert limited.pseudo is not None
    assert (limited.hidden.tokens, limited.pseudo.tokens, limited.texts) == (25, 25, 1)
    said: list[int] = []
    fill_gaps(LM, [TEXT[:40]], singly=10, progress=said.append)
    assert said == sorted(said)
    assert said[-1] == 10 + max(1, round(0.15 * (len(row(TEXT[:40])) - 2)))


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="head 'lm' fills no gaps"):
        fill_gaps(of_pieces(), [TEXT])
    with pytest.raises(DataError, match="has no mask token"):
        fill_gaps(qkv.TextModel(LM.model, of_bytes().tokenizer), [TEXT])
    with pytest.raises(DataError, match="no token that can be hidden"):
        fill_gaps(LM, [""])
    with pytest.raises(DataError, match="context: 2 tokens leave no room beside the 2"):
        fill_gaps(LM, [TEXT], context=2)
