"""Answers that are no texts: files of classes, of words' classes and of spans, and the heads that learn them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import qkv
from qkv.config.recipe import Recipe
from qkv.errors import ConfigError, DataError
from qkv.text import ByteTokenizer
from qkv.text.folder import read_folder
from qkv.text.hf import LibraryTokenizer
from qkv.train import Trainer
from qkv.train.data.encoding import Encoder
from qkv.train.data.labels import class_names, labelled, names_beside, question, tagged
from qkv.train.heldout import hits

from . import runs
from .small import CASES

WORDS = ("cat", "dog", "sat", "ran", "mat", "barn", "old", "red", "wind", "rain")
Line = dict[str, Any]


def written(folder: Path, lines: Iterable[Line], name: str = "train.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def sentences(count: int) -> list[list[str]]:
    random = np.random.default_rng(count)
    return [[WORDS[at] for at in random.integers(0, len(WORDS), random.integers(3, 7))] for _ in range(count)]


def classes(count: int) -> list[Line]:
    return [
        {"text": " ".join(words), "label": "animal" if words[0] in ("cat", "dog") else "thing"}
        for words in sentences(count)
    ]


def pairs(count: int) -> list[Line]:
    found = sentences(count)
    other = [*found[1:], found[0]]
    return [
        {"text": " ".join(one), "text_pair": " ".join(two), "label": sum(words[0] in WORDS[:5] for words in (one, two))}
        for one, two in zip(found, other, strict=True)
    ]


def names(count: int) -> list[Line]:
    kind = dict.fromkeys(("cat", "dog"), "B-ANIMAL") | dict.fromkeys(("barn", "mat"), "I-PLACE")
    return [{"words": words, "labels": [kind.get(word, "O") for word in words]} for words in sentences(count)]


def questions(count: int) -> list[Line]:
    """The answer is the word behind the one that is asked for; in the last line there is none."""
    lines: list[Line] = []
    for words in sentences(count):
        words = list(dict.fromkeys([*words, "who", "what"]))
        context, answer = " ".join(words), words[1]
        lines.append(
            {
                "question": words[0],
                "context": context,
                "answer": answer,
                "answer_start": context.index(f" {answer}") + 1,
            }
        )
    return [*lines, {"question": "who", "context": "nobody knows", "answer": None}]


# Files


def rows(form: Any, line: Line, tokenizer: Any, names: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    read: Callable[..., Any] = {"labelled": labelled, "tagged": tagged, "questions": question}[form]
    (row,) = Encoder(tokenizer, form, names).rows(read("f: line 1", line))
    return row


@pytest.fixture
def tokenizer(tmp_path: Path) -> LibraryTokenizer:
    found = read_folder(Path(runs.tokenizer(tmp_path)))
    assert isinstance(found, LibraryTokenizer)
    return found


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_words_and_answers_are_found_among_the_tokens(kind: str, tokenizer: LibraryTokenizer) -> None:
    used = ByteTokenizer() if kind == "bytes" else tokenizer
    found = rows("tagged", {"words": ["the", "crème", "mat."], "labels": ["O", "B", "O"]}, used, ("B", "O"))
    for number, word in enumerate(("the", "crème", "mat.")):
        pieces = [token for token, owner in zip(found["tokens"], found["words"], strict=True) if owner == number]
        assert used.decode(pieces).strip() == word
    assert found["labels"] == [1, 0, 1]
    context = "dès the cat sat on the mat."
    for answer in ("cat sat", "mat.", "dès", "the"):
        line = {"question": "who?", "context": context, "answer": answer, "answer_start": context.index(answer)}
        found = rows("questions", line, used)
        first, last = found["labels"]
        assert used.decode(found["tokens"][first : last + 1]).strip() == answer
        assert answer not in used.decode(found["tokens"][first + 1 : last + 1])
    assert rows("questions", {"question": "who?", "context": context, "answer": None}, used)["labels"] == [-1, -1]


def test_numbers_mean_themselves_and_names_are_sorted_unless_there_is_a_list() -> None:
    def lines(*labels: str | int) -> list[Any]:
        return [labelled("f: line 1", {"text": "a", "label": label}) for label in labels]

    assert class_names(lines("spam", "ham", "spam")) == ("ham", "spam")
    assert class_names(lines("spam", "ham"), ("spam", "ham", "eggs")) == ("spam", "ham", "eggs")
    assert class_names(lines("spam", "beans"), ("spam", "ham")) == ("beans", "spam")
    assert class_names(lines(0, 3)) == ("0", "1", "2", "3")
    assert class_names(lines(0, 1), ("bad", "good")) == ("bad", "good")
    with pytest.raises(DataError, match="f: line 1: labels are names in some lines and numbers in others"):
        class_names(lines(0, "spam"))


def asks(answer: str, start: int | None) -> Line:
    return {"question": "q", "context": "the cat", "answer": answer, "answer_start": start}


WRONG: dict[str, tuple[str, list[Line], str]] = {
    "no label": ("classify", [{"text": "a"}], r"line 2: label 'None' is no class"),
    "true": ("classify", [{"text": "a", "label": True}], r"line 2: label 'True' is no class"),
    "no text": ("classify", [{"label": 1}], r"line 2: no 'text' \(its fields: label\)"),
    "empty": ("classify", [{"text": " ", "label": 1}], r"line 2: 'text' is ' ', no text"),
    "half pairs": ("classify", [{"text": "a", "text_pair": "b", "label": "thing"}], r"line 2: has a text_pair, unlike"),
    "numbers": ("classify", [{"text": "a", "label": 3}], r"line 2: labels are names in some lines and numbers"),
    "too many": ("classify", [{"text": "a", "label": "x"}], r"has 2 .*, the texts 3 \(animal, thing, x\)"),
    "lengths": ("tag", [{"words": ["a", "b"], "labels": ["O"]}], r"line 2: 1 labels for 2 words"),
    "no words": ("tag", [{"words": "a b", "labels": ["O"]}], r"""line 2: "words" is 'a b', no list"""),
    "two words": ("tag", [{"words": ["a b"], "labels": ["O"]}], r"line 2: words\[0\] is 'a b', no single word"),
    "moved": ("span", [asks("cat", 3)], r"line 2: the answer 'cat' is not at answer_start 3; it is at 4"),
    "absent": ("span", [asks("dog", 0)], r"line 2: .* it is nowhere in the context"),
    "no start": ("span", [asks("dog", None)], r'line 2: "answer" must be a text and "answer_start" a whole number'),
}  # fmt: skip
TASKS: dict[str, tuple[str, str, Callable[[int], list[Line]], Line]] = {
    "classify": ("BertForSequenceClassification", "labelled", classes, {"kind": "classifier", "n_classes": 2}),
    "pairs": ("BertForSequenceClassification", "labelled", pairs, {"kind": "classifier", "n_classes": 3}),
    "tag": ("BertForTokenClassification", "tagged", names, {"kind": "token-classifier", "n_classes": 3}),
    "span": ("BertForQuestionAnswering", "questions", questions, {"kind": "span"}),
}


def recipe(folder: Path, task: str, lines: list[Line], **changes: Any) -> Recipe:
    _, form, _, head = TASKS[task]
    path = written(folder, lines)
    base: dict[str, Any] = {
        "model": runs.tiny("bert-base-uncased", 300, dropout=0.0, head=head),
        "tokenizer": runs.tokenizer(folder),
        "data": {"train": [path], "valid": [path], "format": form, "context": 40},
        "objective": {"kind": {"pairs": "classify"}.get(task, task)},
    }
    return runs.recipe(folder, **(base | changes))


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_line_is_named_with_its_file(what: str, tmp_path: Path) -> None:
    task, lines, message = WRONG[what]
    good = TASKS[task][2](12)
    made = recipe(tmp_path, task, [good[0], *lines, *good[1:]])
    with pytest.raises(ConfigError if what == "too many" else DataError, match=message) as found:
        Trainer.start(made)
    if what != "too many":
        assert str(found.value).startswith(str(tmp_path / "train.jsonl"))


def test_a_class_of_the_held_out_lines_that_no_training_line_has(tmp_path: Path) -> None:
    made = recipe(tmp_path, "classify", classes(12))
    path = written(tmp_path, [{"text": "the cat", "label": "plant"}], "valid.jsonl")
    with pytest.raises(
        DataError, match=r"valid\.jsonl: line 1: label 'plant' is none of the classes .*\(animal, thing\)"
    ):
        Trainer.start(made.override({"data.valid": [path]}))


def test_texts_that_are_too_long_are_cut_to_the_row_and_their_labels_with_them(tmp_path: Path) -> None:
    words = ["cat", "dog"] * 40
    tags = [{"words": words, "labels": ["O", "B-X"] * 40}]
    made = recipe(tmp_path, "tag", tags, run__batch=1, data__context=20)
    made = made.override({"model.overrides.head.n_classes": 2})
    trainer = Trainer.start(made)
    batch = trainer._batch()
    assert batch.inputs["tokens"].shape == (1, 20)
    asked = batch.targets[0][batch.targets[0] >= 0].tolist()
    assert asked == ([1, 0] * 20)[: len(asked)]
    assert len(asked) > 3


def test_nothing_is_asked_about_an_answer_that_was_cut_off(tmp_path: Path) -> None:
    far = {"question": "q", "context": "a " * 60 + "cat", "answer": "cat", "answer_start": 120}
    trainer = Trainer.start(recipe(tmp_path, "span", [far, *questions(5)], data__context=20, run__batch=7))
    targets = trainer._batch().targets.tolist()
    assert [-100, -100] in targets
    assert [0, 0] in targets  # no answer
    assert sum(first > 0 for first, _ in targets) == 5


# Heads


def peer(task: str, folder: Path, vocab_size: int = 300) -> Path:
    """A random model of the peer, in its own files, with the tokenizer of the tests beside it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=48,
        num_labels=TASKS[task][3].get("n_classes", 2),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    getattr(transformers, TASKS[task][0])(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_each_head_starts_from_the_peer_learns_a_toy_set_and_goes_back(task: str, tmp_path: Path) -> None:
    theirs = peer(task, tmp_path / "theirs")
    made = recipe(
        tmp_path,
        task,
        TASKS[task][2](24),
        model={"checkpoint": str(theirs)},
        schedule__peak=1e-2,
        run__steps=80,
        run__batch=24,
        run__eval_every=40,
    )
    reports = runs.finished(made)
    assert reports[-1].valid_accuracy is not None
    assert reports[-1].valid_accuracy >= 0.95
    assert runs.log(made.run.folder)[-1]["valid_accuracy"] == reports[-1].valid_accuracy
    assert list(Trainer.resume(made).run()) == []  # and saves its model again
    lm = qkv.load(Path(made.run.folder) / "model")
    lm.save(tmp_path / "ours", "hf")
    again = getattr(transformers, TASKS[task][0]).from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(20, 44).reshape(2, 12)
    segments = (torch.arange(12) > 6).long().expand(2, 12)
    with torch.no_grad():
        expected = again(input_ids=tokens, token_type_ids=segments)
        wanted = torch.stack((expected.start_logits, expected.end_logits), -1) if task == "span" else expected.logits
        found = lm.model(tokens, segments=segments).logits
    assert found is not None
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    if task in ("classify", "tag"):
        named = ["animal", "thing"] if task == "classify" else ["B-ANIMAL", "I-PLACE", "O"]
        assert json.loads((Path(made.run.folder) / "model" / "classes.json").read_text()) == named
        assert names_beside(Path(made.run.folder) / "model") == tuple(named)


def test_a_checkpoint_with_another_head_gets_a_new_one(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=48,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "theirs")
    before = qkv.load(tmp_path / "theirs")
    _, _, lines, head = TASKS["classify"]
    made = recipe(tmp_path, "classify", lines(12), model={"checkpoint": str(tmp_path / "theirs")}, run__steps=2)
    with pytest.raises(ConfigError, match=r"^model\.overrides\.head: objective 'classify' is answered by 'classifier'"):
        Trainer.start(made)
    made = made.override({"model.overrides.head": head})
    trainer = Trainer.start(made)
    found, kept = trainer.model.state_dict(), before.model.state_dict()
    assert {name for name in found if name not in kept} == {"head.classifier.weight", "head.classifier.bias"}
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    list(trainer.run())
    lm = qkv.load(Path(made.run.folder) / "model")
    lm.save(tmp_path / "ours", "hf")
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(20, 44).reshape(2, 12)
    with torch.no_grad():
        assert torch.allclose(
            again(input_ids=tokens).logits, lm.model(tokens, segments=torch.zeros_like(tokens)).logits, atol=1e-6
        )
    with pytest.raises(ConfigError, match=r"model\.overrides\.d_model: a checkpoint has the architecture"):
        made.override({"model.overrides.d_model": 32})


def test_classes_keep_the_order_of_the_checkpoint(tmp_path: Path) -> None:
    theirs = peer("classify", tmp_path / "theirs")
    config = json.loads((theirs / "config.json").read_text())
    config |= {"id2label": {"0": "thing", "1": "animal"}, "label2id": {"thing": 0, "animal": 1}}
    (theirs / "config.json").write_text(json.dumps(config))
    made = recipe(tmp_path, "classify", classes(12), model={"checkpoint": str(theirs)})
    assert Trainer.start(made).parts.classes == ("thing", "animal")
    assert Trainer.resume(made).parts.classes == ("thing", "animal")


def test_accuracy_counts_the_right_answers() -> None:
    for name, expected in (("classify", 5), ("tag", None), ("span", 5)):
        case = CASES[name]
        batch, model = case.batch(), case.build()
        tensors = batch.to("cpu")
        output = model(**tensors.arguments)
        assert output.logits is not None
        right = torch.full_like(output.logits, -1.0)
        targets = tensors.targets.clamp(min=0)
        if name == "span":
            right.scatter_(1, targets[:, None], 1.0)
        else:
            right.scatter_(-1, targets[..., None], 1.0)
        output.logits = right
        count = batch.count if expected is None else expected
        assert hits(case.model.head, output, tensors) == (count, count)
        output.logits = -right
        assert hits(case.model.head, output, tensors)[0] == 0
