"""Next sentence beside hidden tokens: the second head is trained, measured, saved, taken up, and is the peer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import qkv
from qkv.config.recipe import Recipe
from qkv.config.training import Masked
from qkv.errors import ConfigError, DataError
from qkv.train import Trainer
from qkv.train.batch import Example
from qkv.train.loss import pair_head
from qkv.train.objectives import make

from . import runs
from .small import BARE, CASES, FRAMED, texts

HEAD = {"kind": "masked-lm", "next_sentence": True}


def recipe(folder: Path, **changes: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": runs.tiny("bert-base-uncased", 300, head=HEAD),
        "tokenizer": runs.tokenizer(folder) if not (folder / "tokenizer").exists() else str(folder / "tokenizer"),
        "objective": {"kind": "masked", "next_sentence": True},
    }
    return runs.recipe(folder, **(base | changes))


def test_the_head_learns_which_sentence_is_next(tmp_path: Path) -> None:
    """Each window is of one letter, so that the second segment follows the first if it has the same one."""
    path = tmp_path / "letters.txt"
    letters = np.random.default_rng(0).permutation([*"abcdefgh"] * 6)
    path.write_text("".join(" ".join(letter * 29) + " " for letter in letters), encoding="utf-8")
    made = recipe(
        tmp_path,
        data={"train": [str(path)], "valid": [str(path)], "context": 32},
        schedule__peak=3e-3,
        run__steps=200,
        run__batch=32,
        run__eval_every=100,
    ).override({"model.overrides.d_model": 32, "model.overrides.encoder.layers.0.dropout": 0.0})
    reports = runs.finished(made)
    first, last = [report for report in reports if report.valid_loss is not None]
    assert reports[0].pair_loss == pytest.approx(np.log(2), rel=0.05)
    assert last.valid_pair_accuracy is not None
    assert last.valid_pair_loss is not None
    assert first.valid_pair_loss is not None
    assert last.valid_pair_accuracy > 0.65
    assert max(last.valid_pair_loss, first.valid_pair_loss) < 0.6  # ln 2 is 0.693
    assert last.valid_loss is not None
    assert first.valid_loss is not None
    assert last.valid_loss < first.valid_loss
    assert runs.log(made.run.folder)[-1]["valid_pair_accuracy"] == last.valid_pair_accuracy


def test_both_heads_are_taken_up_to_the_bit(tmp_path: Path) -> None:
    whole = recipe(tmp_path, run__save_every=3, run__steps=6, run__micro_batch=3)
    cut = runs.elsewhere(whole, "cut")
    runs.finished(whole)
    runs.killed(cut, 4)
    assert [report.step for report in Trainer.resume(cut).run()] == [4, 5, 6]
    expected, found = runs.left_by(whole.run.folder), runs.left_by(cut.run.folder)
    assert runs.differences(expected, found) == []
    assert "head.next_sentence.classifier.weight" in found["model"]


def test_held_out_rows_that_are_too_few_for_a_batch_join_the_last_one(tmp_path: Path) -> None:
    trainer = Trainer.start(recipe(tmp_path, run__batch=2))
    rows = len(list(trainer.held_out.examples()))
    assert rows > 2
    for size in range(1, rows + 1):
        trainer.held_out.recipe = trainer.recipe.override({"run.micro_batch": None, "run.batch": size})
        sizes = [batch.rows for batch in trainer.held_out.batches()]
        assert sum(sizes) == rows
        assert min(sizes) >= 2


# The peer


def test_bert_for_pre_training_is_read_and_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    theirs = transformers.BertForPreTraining(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    lm = qkv.load(tmp_path / "theirs")
    read = pair_head(lm.model)
    assert read is not None
    lm.save(tmp_path / "ours", "hf")
    again = transformers.BertForPreTraining.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(24).reshape(2, 12)
    segments = (torch.arange(12) > 6).long().expand(2, 12)
    with torch.no_grad():
        out = lm.model(tokens, segments=segments)
        follows, _ = read(out.hidden, lm.model.embed.tokens, torch.ones_like(tokens, dtype=torch.bool))
        for peer in (theirs, again):
            expected = peer(input_ids=tokens, token_type_ids=segments)
            assert torch.allclose(out.logits, expected.prediction_logits, atol=1e-5)
            assert torch.allclose(follows, expected.seq_relationship_logits, atol=1e-5)


def test_a_pre_training_file_without_the_second_head_is_a_masked_lm(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace("BertForMaskedLM", "BertForPreTraining")
    (tmp_path / "config.json").write_text(text)
    assert pair_head(qkv.load(tmp_path).model) is None


def test_a_masked_lm_gets_the_second_head_and_is_written_with_both(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "theirs")
    made = recipe(tmp_path, model={"checkpoint": str(tmp_path / "theirs"), "overrides": {"head.next_sentence": True}})
    trainer = Trainer.start(made)
    before, found = qkv.load(tmp_path / "theirs").model.state_dict(), trainer.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert pair_head(trainer.model) is not None
    trainer.parts.lm.save(tmp_path / "ours", "hf")
    transformers.BertForPreTraining.from_pretrained(tmp_path / "ours")
    assert pair_head(qkv.load(tmp_path / "ours").model) is not None


# What is refused


def test_a_model_without_the_head_is_refused_with_the_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.overrides\.head\.next_sentence: decides .*set it to true"):
        recipe(tmp_path, model=runs.tiny("bert-base-uncased", 300, head={"kind": "masked-lm"}))
    with pytest.raises(ConfigError, match=r"^data\.documents: objective\.next_sentence packs two texts"):
        recipe(tmp_path, data__documents=True)
    with pytest.raises(ConfigError, match=r"^model\.overrides\.embedding\.n_segments: next_sentence tells two"):
        recipe(tmp_path, model=runs.tiny("bert-base-uncased", 300, head=HEAD, embedding__n_segments=0))


def test_packed_documents_are_no_pair() -> None:
    case = CASES["masked, pairs"]
    packed = [Example(text, documents=np.zeros(len(text), np.int64)) for text in texts(3)]
    with pytest.raises(DataError, match="example: several documents in one row"):
        case.maker.batch(packed, np.random.default_rng(0))


# Only what may be asked


@pytest.mark.parametrize("vocabulary", [BARE, FRAMED])
@pytest.mark.parametrize("next_sentence", [False, True])
@pytest.mark.parametrize("whole_word", [False, True])
def test_tokens_that_may_not_be_asked_are_not_hidden(vocabulary: Any, next_sentence: bool, whole_word: bool) -> None:
    """The last window of a text repeats the end of the one before, of which nothing is asked again."""
    if whole_word and vocabulary.continues is None:
        vocabulary = FRAMED
    objective = Masked(share=1.0, mask=1.0, random=0.0, next_sentence=next_sentence, whole_word=whole_word)
    maker = make(objective, vocabulary, CASES["masked"].model)
    text = np.arange(20, 32)
    examples = [Example(text + 12 * number, answers=text >= 27) for number in range(3)]
    batch = maker.batch(examples, np.random.default_rng(0))
    asked = sorted(batch.targets[batch.targets >= 0].tolist())
    may = {int(token) for example in examples for token in example.tokens[example.answers]}
    assert asked
    assert set(asked) <= may
    if not next_sentence:  # an end may stand in two rows, or in none
        assert asked == sorted(may)
