"""BLEU and chrF: the library's own figures with their signatures, and translations that are the model's."""

from __future__ import annotations

import sys

import pytest
import sacrebleu

import qkv
from qkv.errors import DataError
from qkv.evaluate.translation import Sentence, bleu_and_chrf, grouped, translate, translation_quality
from qkv.text.pieces import PieceTokenizer
from qkv.text.training import train_bpe

from .small import TEXT, of_bytes, opinionated

SENTENCES = [
    Sentence("eins", ("the cat sat on the mat", "a cat was sitting on the mat")),
    Sentence("zwei", ("a well-known state-of-the-art model",)),
    Sentence("drei", ("good night and good luck to you",)),
]
WRITTEN = ["the cat sat on a mat", "a well-known state-of-the-world model", "good night and luck to you"]
SOURCES = ["the cat sat", "on the mat and the lazy dog", "said", "hello and good night"]


def translator() -> qkv.TextModel:
    """A small T5."""
    words = train_bpe([TEXT, *SOURCES] * 3, 290, controls=("</s>", "<pad>"))
    starts = PieceTokenizer.encode(words, "<pad>", parse_special=True)
    words.specials = type(words.specials)(**{**vars(words.specials), "starts": tuple(starts)})
    config = qkv.preset("t5-small").toy().override({"vocab_size": words.vocab_size})
    return qkv.TextModel(opinionated(config), words, runtime=qkv.Runtime(deterministic=False))


@pytest.fixture(scope="module")
def t5() -> qkv.TextModel:
    return translator()


def test_the_figures_are_the_librarys() -> None:
    bleu, chrf = bleu_and_chrf(WRITTEN, SENTENCES)
    streams = [[one.references[0] for one in SENTENCES], [SENTENCES[0].references[1], None, None]]
    assert bleu.score == sacrebleu.corpus_bleu(WRITTEN, streams).score
    assert chrf.score == sacrebleu.corpus_chrf(WRITTEN, streams).score
    assert 0 < bleu.score < 100
    one, _ = bleu_and_chrf(WRITTEN[1:], SENTENCES[1:])
    assert one.score == sacrebleu.corpus_bleu(WRITTEN[1:], [streams[0][1:]]).score


def test_another_reference_can_only_help() -> None:
    single = [Sentence(one.source, one.references[:1]) for one in SENTENCES]
    written = ["a cat was sitting on the mat", *WRITTEN[1:]]
    assert bleu_and_chrf(written, SENTENCES)[0].score > bleu_and_chrf(written, single)[0].score


def test_translations_of_one_source_are_its_references() -> None:
    pairs = [("a", "1"), ("b", "2"), ("a", "3"), ("a", "1"), ("A", "4")]
    assert grouped(pairs) == [Sentence("a", ("1", "3")), Sentence("b", ("2",)), Sentence("A", ("4",))]


def test_chinese_is_counted_by_characters() -> None:
    one = [Sentence("x", ("我喜欢读书和写字。",))]
    plain, zh = (bleu_and_chrf(["我喜欢读书和画画。"], one, tokenize)[0] for tokenize in ("13a", "zh"))
    assert plain.score < 1 < zh.score
    assert "tok:zh" in zh.signature


def test_b127_the_signature_tells_what_makes_figures_incomparable() -> None:
    as_written, _ = bleu_and_chrf(WRITTEN, SENTENCES)
    split, chrf = bleu_and_chrf(WRITTEN, SENTENCES, split_compounds=True)
    assert "tok:13a" in as_written.signature
    assert "nrefs:var" in as_written.signature
    assert f"version:{sacrebleu.__version__}" in as_written.signature
    assert split.signature == f"{as_written.signature}|compounds:split"
    assert split.score > as_written.score  # "state-of-the-world" is nearly "state-of-the-art"
    by_hand = ["a well - known state - of - the - world model"], [["a well - known state - of - the - art model"]]
    one, _ = bleu_and_chrf(WRITTEN[1:2], SENTENCES[1:2], split_compounds=True)
    assert one.score == sacrebleu.corpus_bleu(*by_hand).score
    assert chrf == bleu_and_chrf(WRITTEN, SENTENCES)[1]
    spaced = [Sentence("x", ("a - b is - as it was -",))]
    assert bleu_and_chrf(["a - b is - as it was -"], spaced, split_compounds=True)[0].score == pytest.approx(100)
    assert "tok:char" in bleu_and_chrf(WRITTEN, SENTENCES, "char")[0].signature


def test_each_translation_is_that_of_the_sentence_alone(t5: qkv.TextModel) -> None:
    said: list[int] = []
    texts = translate(t5, [*SOURCES * 4, SOURCES[0]], max_new_tokens=4, progress=said.append)
    alone = [t5.generate(source, 4, decoding=qkv.Greedy()).text.strip() for source in SOURCES]
    assert texts == [*alone * 4, alone[0]]
    assert len(set(alone)) > 1
    assert said == [16, 17]
    (beam,) = translate(t5, SOURCES[:1], qkv.Beam(width=3), max_new_tokens=4)
    assert beam == t5.generate(SOURCES[0], 4, decoding=qkv.Beam(width=3)).text.strip()


def test_a_model_that_writes_the_references_is_perfect(t5: qkv.TextModel) -> None:
    made = translate(t5, [f"to: {source}" for source in SOURCES], max_new_tokens=9)
    sentences = [Sentence(source, (text, "x")) for source, text in zip(SOURCES, made, strict=True)]
    found = translation_quality(t5, sentences, prefix="to: ", max_new_tokens=9, tokenize="char")
    assert found.bleu.score == pytest.approx(100)
    assert found.chrf.score == pytest.approx(100)
    assert (found.sentences, found.references, found.protocol) == (4, 8, "greedy, at most 9 tokens")
    assert found.translations == made
    assert found.to_dict()["bleu"]["signature"] == found.bleu.signature
    beam = translation_quality(t5, sentences[:1], qkv.Beam(width=2), max_new_tokens=3)
    assert beam.protocol == "beam of 2, at most 3 tokens"


def test_what_cannot_be_done_is_refused_by_name(t5: qkv.TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="translating needs an encoder-decoder"):
        translate(of_bytes(), ["a"])
    with pytest.raises(DataError, match="data: no sentences"):
        translation_quality(t5, [])
    with pytest.raises(DataError, match="tokenize: 'moses': choose one of 13a, intl, zh, char, none"):
        translation_quality(t5, SENTENCES, tokenize="moses")
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(DataError, match=r"need the library sacrebleu; install it with: pip install 'qkv\[eval\]'"):
        translation_quality(t5, SENTENCES)
