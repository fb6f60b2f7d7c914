"""`qkv eval`: figures are those of the library, with their protocols; files that hold nothing are one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import qkv
from evaluate.small import TEXT, masked
from evaluate.test_translation import SOURCES, translator
from qkv.evaluate import Protocol, perplexity_of
from qkv.evaluate.masked import fill_gaps
from qkv.evaluate.translation import grouped, translation_quality

from .helpers import Result

Command = Callable[..., Result]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT[:50] + "\n\n" + TEXT[50:] + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert") / "m"
    masked().save(folder)
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5") / "m"
    translator().save(folder)
    return folder


def lines(shown: Result) -> dict[str, str]:
    """What was shown, by name."""
    assert shown.code == 0, shown.err
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in shown.out.splitlines())


def test_perplexity_with_its_protocol(command: Command, saved: Path, text: Path) -> None:
    expected = perplexity_of(qkv.load(saved), [text.read_text()], Protocol("sliding", 16, 4))
    shown = command("eval", str(saved), "--data", str(text), "--context", "16", "--stride", "4")
    assert shown.out.splitlines()[0] == f"perplexity       {expected.perplexity:.4f}"
    found = lines(shown)
    assert found["bits per byte"] == f"{expected.bits_per_byte:.4f}"
    assert found["loss"] == f"{expected.loss:.6f} nats per token"
    assert found["protocol"] == "sliding windows of 16 tokens, stride 4"
    assert found["counted"] == f"{expected.tokens} tokens, {expected.bytes} bytes of 1 text"
    assert shown.err == ""


@pytest.mark.parametrize("kind", ["disjoint", "half", "memory"])
def test_every_protocol_as_json(command: Command, saved: Path, text: Path, kind: str) -> None:
    shown = command("eval", str(saved), "--data", str(text), "--protocol", kind, "--context", "16", "--json")
    found = json.loads(shown.out)
    expected = perplexity_of(qkv.load(saved), [text.read_text()], Protocol(kind, 16))
    assert found == {"model": str(saved), "data": [str(text)], "task": "perplexity", **expected.to_dict()}


def test_forms_of_data(command: Command, saved: Path, text: Path, tmp_path: Path) -> None:
    def texts(*arguments: str) -> dict[str, float]:
        shown = command("eval", str(saved), "--json", *arguments)
        assert shown.code == 0, shown.err
        return json.loads(shown.out)

    parts = [part for part in text.read_text().split("\n") if part]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "no", "body": part}) + "\n" for part in parts))
    expected = perplexity_of(qkv.load(saved), parts)
    for arguments in (
        ("--data", str(text), "--format", "lines"),
        ("--data", str(text), "--separator", ""),
        ("--data", str(rows), "--field", "body"),
    ):
        found = texts(*arguments)
        assert (found["texts"], found["nats"]) == (2, expected.nats), arguments
    assert texts("--data", str(text), "--data", str(text))["texts"] == 2
    assert texts("--data", str(text), "--limit", "10")["tokens"] == 9


def test_a_masked_model(command: Command, bert: Path, text: Path) -> None:
    arguments = ("eval", str(bert), "--data", str(text), "--seed", "3", "--singly", "5", "--context", "20")
    expected = fill_gaps(qkv.load(bert), [text.read_text()], seed=3, singly=5, context=20)
    assert json.loads(command(*arguments, "--json").out)["accuracy"] == expected.accuracy
    found = lines(command(*arguments))
    right = f"{expected.right} of {expected.hidden.tokens} hidden tokens"
    assert found["accuracy"] == f"{expected.accuracy:.4f} ({right})"
    assert expected.pseudo is not None
    assert found["pseudo-perplexity"] == f"{expected.pseudo.perplexity:.4f} (5 tokens, one by one)"
    assert found["protocol"] == "15% hidden together, seed 3; windows of 20 tokens"


def test_a_translator(command: Command, t5: Path, tmp_path: Path) -> None:
    pairs = [(source, target) for source in SOURCES[:3] for target in ("the cat", f"a {source}")]
    columns, sources, one, other = (tmp_path / name for name in ("p.tsv", "s", "one", "other"))
    columns.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    sources.write_text("".join(f"{source}\n" for source in SOURCES[:3]))
    one.write_text("the cat\n" * 3)
    other.write_text("".join(f"a {source}\n" for source in SOURCES[:3]))
    expected = translation_quality(qkv.load(t5), grouped(pairs), max_new_tokens=4, tokenize="char")
    arguments = ("eval", str(t5), "--max-new-tokens", "4", "--tokenize", "char", "--data")
    found = lines(command(*arguments, str(columns)))
    assert found["BLEU"] == f"{expected.bleu.score:.2f}  {expected.bleu.signature}"
    assert found["chrF"] == f"{expected.chrf.score:.2f}  {expected.chrf.signature}"
    assert "tok:char" in found["BLEU"]
    assert found["counted"] == "3 sentences, 6 references"
    assert found["protocol"] == "greedy, at most 4 tokens"
    files = json.loads(command(*arguments, f"{sources}::{one}::{other}", "--json").out)
    assert files["chrf"] == {"score": pytest.approx(expected.chrf.score), "signature": expected.chrf.signature}
    assert files["translations"] == expected.translations
    three = tmp_path / "three.tsv"
    three.write_text("".join(f"x\t{source}\tthe cat\ta {source}\n" for source in SOURCES[:3]))
    several = json.loads(command(*arguments, str(three), "--field", "2,3,4", "--json").out)
    assert several["references"] == 6
    assert several["bleu"] == files["bleu"]
    beam = lines(command(*arguments, str(columns), "--beam", "2", "--limit", "1", "--split-compounds"))
    assert beam["protocol"] == "beam of 2, at most 4 tokens"
    assert beam["BLEU"].endswith("|compounds:split")
    assert beam["counted"] == "1 sentence, 2 references"


def test_what_holds_no_data_is_one_line(command: Command, saved: Path, t5: Path, text: Path, tmp_path: Path) -> None:
    empty, binary, words = tmp_path / "empty.txt", tmp_path / "binary.txt", tmp_path / "words.jsonl"
    empty.touch()
    binary.write_bytes(b"ab\0c\n")
    words.write_text("words\n")
    for model, arguments, message in (
        (saved, (empty,), f"{empty}: empty; give a file with text"),
        (saved, (tmp_path / "no.txt",), "cannot be read (No such file or directory)"),
        (saved, (binary,), "line 1: binary, not text (byte 0x00)"),
        (saved, (words,), "line 1: no JSON"),
        (saved, (f"{text}::{text}",), "pairs of texts; this task reads single ones"),
        (saved, (text, "--task", "translation"), "but column 2 is asked for"),
        (saved, (text, "--task", "masked"), "head 'lm' fills no gaps"),
        (saved, (text, "--protocol", "half", "--stride", "2"), "stride: protocol 'half' has none"),
        (saved, (text, "--limit", "1"), "nothing to predict"),
        (t5, (text, "--task", "perplexity"), "an encoder-decoder predicts a text from another"),
        (t5, (text,), "but column 2 is asked for"),
        (t5, (text, "--format", "lines"), "translation reads pairs, not lines"),
        (t5, (f"{text}::{text}", "--stride", "3"), "--stride: sentences are translated whole"),
        (t5, (f"{text}::{text}", "--tokenize", "moses"), "tokenize: 'moses': choose one of"),
    ):
        shown = command("eval", str(model), "--data", *map(str, arguments))
        assert shown.code == 2, (arguments, shown.out)
        assert shown.out == ""
        assert shown.err.startswith("qkv: ")
        assert shown.err.count("\n") == 1
        assert message in shown.err, shown.err


def test_a_masked_model_has_no_windows_of_the_past(command: Command, bert: Path, text: Path) -> None:
    shown = command("eval", str(bert), "--data", str(text), "--protocol", "memory")
    assert (shown.code, shown.out) == (2, "")
    assert "a masked model sees both sides" in shown.err


def test_data_must_be_given(command: Command, saved: Path) -> None:
    shown = command("eval", str(saved))
    assert shown.code == 2
    assert "--data" in shown.err
