"""What each objective shows a model, and what it asks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import MaskedLanguageModel, training
from qkv.errors import DataError
from qkv.text.pieces import Specials
from qkv.train.batch import IGNORE, Batch, Example
from qkv.train.decisions import Tag
from qkv.train.maker import shifted
from qkv.train.objectives import Answers, Masked, NextToken, Prefix, Seq2Seq, SpanCorruption, make
from qkv.train.vocabulary import Vocabulary

from .small import (
    BARE,
    BOS,
    CASES,
    CLS,
    EOS,
    FRAMED,
    MASK,
    OWN,
    SEP,
    SIZE,
    SPECIALS,
    TEXT,
    TIED,
    config,
    texts,
)

ENCODER, DECODER, BOTH = config(MaskedLanguageModel(), "encoder"), config(TIED), config(OWN, "both")


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def only(batch: Batch) -> tuple[dict[str, list[int]], list[int]]:
    """The single row of a batch."""
    assert batch.rows == 1
    return {name: value[0].tolist() for name, value in batch.inputs.items()}, batch.targets[0].tolist()


# Shifting


def test_each_input_has_the_token_after_it() -> None:
    tokens, targets = shifted(numbers(20, 21, 22, 23))
    assert tokens.tolist() == [20, 21, 22]
    assert targets.tolist() == [21, 22, 23]


def test_targets_are_those_that_may_be() -> None:
    _, targets = shifted(numbers(20, 21, 22, 23), np.array([True, True, False, True]))
    assert targets.tolist() == [21, IGNORE, 23]


def test_a_document_says_nothing_about_the_next() -> None:
    batch = NextToken(BARE, DECODER).batch(
        [Example(numbers(20, 21, 22, 23, 24), documents=numbers(0, 0, 1, 1, 1))], seeded()
    )
    assert only(batch) == ({"tokens": [20, 21, 22, 23], "documents": [0, 0, 1, 1]}, [21, IGNORE, 23, 24])


def test_one_token_predicts_nothing() -> None:
    batch = NextToken(BARE, DECODER).batch([Example(numbers(20), documents=numbers(0))], seeded())
    assert only(batch) == ({"tokens": [20], "documents": [0]}, [IGNORE])


def test_answers_are_asked_and_must_be_marked() -> None:
    chat = Example(numbers(20, 21, 22, 23), answers=np.array([False, False, True, True]))
    assert only(Answers(BARE, DECODER).batch([chat], seeded())) == ({"tokens": [20, 21, 22]}, [IGNORE, 22, 23])
    with pytest.raises(DataError, match="format 'chat'"):
        Answers(BARE, DECODER).batch([Example(numbers(20, 21))], seeded())


# Source and target


def test_a_decoder_reads_the_start_and_gives_the_end() -> None:
    batch = Seq2Seq(BARE, BOTH).batch([Example(numbers(20, 21), numbers(30, 31, 32))], seeded())
    assert only(batch) == ({"tokens": [BOS, 20, 21], "source": [30, 31, 32]}, [20, 21, EOS])


@pytest.mark.parametrize(
    ("starts", "target", "tokens", "targets"),
    [
        ((0,), [20, EOS], [0, 20], [20, EOS]),  # T5
        ((EOS, BOS), [BOS, 20, EOS], [EOS, BOS, 20], [IGNORE, 20, EOS]),  # BART
        ((EOS, BOS), [20], [EOS, BOS, 20], [IGNORE, 20, EOS]),
        ((), [BOS, 20], [BOS, 20], [20, EOS]),
    ],
)
def test_starts_stand_once_and_are_not_asked(
    starts: tuple[int, ...], target: list[int], tokens: list[int], targets: list[int]
) -> None:
    vocabulary = replace(BARE, specials=replace(SPECIALS, starts=starts))
    inputs, found = only(Seq2Seq(vocabulary, BOTH).batch([Example(numbers(*target), numbers(30))], seeded()))
    assert (inputs["tokens"], found) == (tokens, targets)


def test_one_stack_reads_source_and_target_in_a_row() -> None:
    example = Example(numbers(20, 21), numbers(30, 31, 32))
    inputs, targets = only(Seq2Seq(BARE, DECODER).batch([example], seeded()))
    assert inputs == {"tokens": [30, 31, 32, 20, 21]}
    assert targets == [IGNORE, IGNORE, 20, 21, EOS]
    inputs, targets = only(Prefix(BARE, CASES["prefix"].model).batch([example], seeded()))
    assert inputs == {"tokens": [30, 31, 32, 20], "prefix_length": 3}
    assert targets == [IGNORE, IGNORE, 20, 21]


def test_a_decoder_needs_a_start() -> None:
    with pytest.raises(DataError, match="begins with"):
        Seq2Seq(Vocabulary(SIZE), BOTH).batch([Example(numbers(20), numbers(30))], seeded())
    with pytest.raises(DataError, match="'parallel'"):
        Seq2Seq(BARE, BOTH).batch([Example(numbers(20))], seeded())


@given(st.integers(2, 12), st.floats(0.05, 1), st.integers(0, 9))
def test_a_prefix_is_seen_and_the_rest_is_asked(size: int, share: float, seed: int) -> None:
    text = np.arange(size) + TEXT
    inputs, targets = only(Prefix(BARE, CASES["prefix"].model, share).batch([Example(text)], seeded(seed)))
    cut = int(np.asarray(inputs["prefix_length"]))
    assert 1 <= cut <= max(1, share * size)
    assert targets == [IGNORE] * (cut - 1) + text[cut:].tolist()
    assert inputs["tokens"] == text[:-1].tolist()
    assert any(target != IGNORE for target in targets)


def test_prefixes_of_all_lengths_are_drawn() -> None:
    maker, example = Prefix(BARE, CASES["prefix"].model), Example(np.arange(6) + TEXT)
    drawn = maker.batch([example] * 300, seeded()).inputs["prefix_length"]
    assert set(drawn.tolist()) == {1, 2, 3, 4, 5}
    assert min(np.bincount(drawn)[1:]) > 40


# Span corruption


@given(st.integers(2, 60), st.floats(0.05, 0.9), st.floats(1, 6), st.integers(0, 9))
def test_spans_put_back_give_the_text(size: int, density: float, mean: float, seed: int) -> None:
    text = np.arange(size) % (SIZE - TEXT) + TEXT
    maker = SpanCorruption(BARE, BOTH, density, mean)
    inputs, targets = only(maker.batch([Example(text)], seeded(seed)))
    sentinels = BARE.sentinels.tolist()
    assert sentinels == [11, 10, 9, 8, 7]
    assert targets[-1] == inputs["source"][-1] == EOS
    assert inputs["tokens"] == [BOS, *targets[:-1]]
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token in sentinels:
            assert token == sentinels[len(spans)]
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    whole = [token for one in inputs["source"][:-1] for token in (spans[one] if one in sentinels else [one])]
    assert whole == text.tolist()
    assert all(spans.values())
    hidden = sum(len(span) for span in spans.values())
    assert hidden == min(max(round(size * density), 1), size - 1)
    assert len(spans) == min(max(round(hidden / mean), 1), hidden, size - hidden, len(sentinels))


def test_the_published_lengths_of_t5() -> None:
    """512 tokens of input are made of 568, whose spans need 114 with EOS (the T5 repository's own helper)."""
    many = Specials({f"<extra_id_{n}>": n for n in range(100)}, eos=200)
    maker = SpanCorruption(Vocabulary(300, many), BOTH)
    assert maker.raw_length(512) == 568
    row = maker.row(Example(np.full(568, 250)), seeded())
    assert len(row.inputs["source"]) == 512
    assert len(row.targets) == 114


def test_spans_stand_anywhere() -> None:
    maker = SpanCorruption(BARE, BOTH, 0.25, 1.0)
    kept = np.stack([maker.spans(8, seeded(seed))[0] for seed in range(400)])
    assert {tuple(one) for one in kept.tolist()} == {(a, 6 - a) for a in range(1, 6)}


def test_spans_in_one_stack() -> None:
    maker = SpanCorruption(BARE, CASES["prefix"].model, 0.5, 2.0)
    inputs, targets = only(maker.batch([Example(numbers(20, 21, 22, 23))], seeded()))
    cut = int(np.asarray(inputs["prefix_length"]))
    assert inputs["tokens"][:cut] == [20, 21, 11, EOS]
    assert targets == [IGNORE] * (cut - 1) + [11, 22, 23, EOS]


def test_spans_need_sentinels_and_a_text() -> None:
    with pytest.raises(DataError, match="extra_id_0"):
        SpanCorruption(Vocabulary(SIZE), BOTH).batch([Example(numbers(20, 21))], seeded())
    inputs, targets = only(SpanCorruption(BARE, BOTH).batch([Example(numbers(20))], seeded()))
    assert (inputs["source"], inputs["tokens"], targets) == ([20, EOS], [BOS], [EOS])
    with pytest.raises(DataError, match="several documents"):
        SpanCorruption(BARE, BOTH).batch([Example(numbers(20, 21), documents=numbers(0, 1))], seeded())


# Masked


def test_b119_of_those_chosen_80_are_masked_10_random_10_kept() -> None:
    size, draws = 30_000, 1_000_000
    vocabulary = Vocabulary(size, SPECIALS)
    maker = Masked(vocabulary, ENCODER.override({"max_seq_len": 20_000}), share=1.0)
    random = seeded()
    masked = changed = kept = 0
    for _ in range(100):
        text = random.integers(TEXT, size, draws // 100)
        row = maker.row(Example(text), random)
        tokens = row.inputs["tokens"]
        assert (row.targets == text).all()
        masked += int((tokens == MASK).sum())
        kept += int((tokens == text).sum())
        changed += int(((tokens != text) & (tokens != MASK)).sum())
    assert masked + changed + kept == draws
    assert masked / draws == pytest.approx(0.8, abs=0.003)
    assert changed / draws == pytest.approx(0.1, abs=0.003)
    assert kept / draws == pytest.approx(0.1, abs=0.003)


@pytest.mark.parametrize("whole_word", [False, True])
def test_b118_special_tokens_and_padding_are_never_chosen(whole_word: bool) -> None:
    maker, random = Masked(FRAMED, ENCODER, share=0.5, whole_word=whole_word), seeded()
    chosen = 0
    for _ in range(100):
        examples = [Example(random.integers(0, SIZE, random.integers(1, 9))) for _ in range(4)]
        batch = maker.batch(examples, random)
        real = batch.targets != IGNORE
        assert "valid" not in batch.inputs or not (real & ~batch.inputs["valid"].astype(bool)).any()
        assert not FRAMED.special[batch.targets[real]].any()
        replaced = batch.inputs["tokens"][real]
        assert not FRAMED.special[replaced[replaced != MASK]].any()
        chosen += int(real.sum())
        for example, row in zip(examples, batch.targets, strict=True):
            ordinary = int((~FRAMED.special[example.tokens]).sum())
            if not whole_word:
                assert (row != IGNORE).sum() == (max(1, round(0.5 * ordinary)) if ordinary else 0)
    assert chosen > 500


def test_what_is_not_chosen_stays() -> None:
    text = texts(1, longest=20)[0]
    inputs, targets = only(Masked(FRAMED, ENCODER, share=0.3).batch([Example(text)], seeded()))
    framed = np.array([CLS, *text, SEP])
    asked = np.array(targets) != IGNORE
    assert (np.array(targets)[asked] == framed[asked]).all()
    assert (np.array(inputs["tokens"])[~asked] == framed[~asked]).all()
    assert asked.sum() == round(0.3 * len(text))


def test_every_batch_is_masked_anew_and_repeatably() -> None:
    case = CASES["masked"]
    assert (case.batch(1).targets == case.batch(1).targets).all()
    assert (case.batch(1).targets != case.batch(2).targets).any()


def test_whole_words_are_chosen_whole() -> None:
    maker, random = Masked(FRAMED, ENCODER, share=0.4, whole_word=True), seeded()
    sizes = set()
    for text in texts(60):
        row = maker.row(Example(text), random)
        asked = row.targets[1:-1] != IGNORE
        words = FRAMED.words(text)
        sizes |= set(np.bincount(words[asked]).tolist()) - {0}
        assert all(len(set(asked[words == word])) == 1 for word in words)
        assert asked.any()
        assert asked.sum() <= max(round(0.4 * len(text)), np.bincount(words).min())
    assert len(sizes) > 1  # words of several pieces are among them


def test_given_words_are_preferred() -> None:
    words = numbers(0, 0, 0, 1, 1, 1)
    maker = Masked(replace(FRAMED, continues=None), ENCODER, share=0.5, whole_word=True)
    found = {
        tuple(maker.row(Example(np.arange(6) + TEXT, words=words), seeded(s)).targets[1:-1] != IGNORE)
        for s in range(20)
    }
    assert found == {(True,) * 3 + (False,) * 3, (False,) * 3 + (True,) * 3}
    with pytest.raises(DataError, match=r"Example\.words"):
        maker.row(Example(np.arange(6) + TEXT), seeded())


def test_packed_documents_are_masked_as_they_are() -> None:
    example = Example(np.arange(6) + TEXT, documents=numbers(0, 0, 0, 1, 1, 1))
    row = Masked(FRAMED, ENCODER).row(example, seeded())
    assert row.inputs["documents"].tolist() == [0, 0, 0, 1, 1, 1]
    assert len(row.inputs["tokens"]) == 6


def test_masks_need_a_mask_token() -> None:
    with pytest.raises(DataError, match="no mask token"):
        Masked(Vocabulary(SIZE), ENCODER).row(Example(numbers(20, 21)), seeded())


def test_pairs_are_halves_that_follow_each_other_or_do_not() -> None:
    """Texts are numbered by their tokens, so that each half says where it is from."""
    maker = Masked(FRAMED, ENCODER, next_sentence=True)
    examples = [Example(np.arange(8) + TEXT + 8 * number) for number in range(6)]
    follows = 0
    for seed in range(60):
        batch = maker.batch(examples, seeded(seed))
        assert batch.pairs is not None
        for number in range(6):
            valid = (
                batch.inputs["valid"][number] if "valid" in batch.inputs else np.ones(len(batch.targets[number]), bool)
            )
            targets = batch.targets[number][valid]
            tokens = np.where(targets == IGNORE, batch.inputs["tokens"][number][valid], targets)
            segments = batch.inputs["segments"][number][valid]
            assert tokens[0] == CLS
            assert (tokens == SEP).sum() == 2
            assert segments[tokens == SEP].tolist() == [0, 1]
            first, second = tokens[1 : np.argmax(tokens == SEP)], tokens[np.argmax(tokens == SEP) + 1 : -1]
            assert first.tolist() == examples[number].tokens[: len(first)].tolist()
            same = (second - TEXT)[0] // 8 == number
            assert batch.pairs[number] == (0 if same else 1)
            if same:
                assert [*first, *second] == examples[number].tokens.tolist()
            follows += same
    assert follows / 360 == pytest.approx(0.5, abs=0.1)


def test_rows_are_as_long_as_the_model_takes() -> None:
    long = [Example(np.resize(np.arange(TEXT, SIZE), 50)), Example(np.resize(np.arange(TEXT, SIZE), 40))]
    for maker in (Masked(FRAMED, ENCODER), Masked(FRAMED, ENCODER, next_sentence=True)):
        batch = maker.batch(long, seeded())
        assert batch.inputs["tokens"].shape[1] <= 32
        fitting = [Example(one.tokens[: maker.raw_length(32)]) for one in long]
        for row, example in zip(maker.batch(fitting, seeded()).inputs["tokens"], fitting, strict=True):
            assert maker.next_sentence or ((row == SEP).sum(), len(row)) == (1, len(example.tokens) + 2)


def test_a_pair_needs_another_text() -> None:
    maker = Masked(FRAMED, ENCODER, next_sentence=True)
    with pytest.raises(DataError, match="at least 2 examples"):
        maker.batch([Example(numbers(20, 21))], seeded())
    with pytest.raises(DataError, match="fewer than 2 tokens"):
        maker.batch([Example(numbers(20, 21)), Example(numbers(20))], seeded())


# Labels


def test_a_class_of_a_text_and_of_a_pair() -> None:
    maker = make(training.Classify(), FRAMED, CASES["classify"].model)
    single = maker.batch([Example(numbers(20, 21), labels=numbers(2)[0])], seeded())
    assert single.inputs["tokens"].tolist() == [[CLS, 20, 21, SEP]]
    assert single.targets.tolist() == [2]
    framed = maker.batch([Example(numbers(CLS, 20, 21, SEP), labels=numbers(2)[0])], seeded())
    assert framed.inputs["tokens"].tolist() == single.inputs["tokens"].tolist()
    pair = maker.batch([Example(numbers(20, 21), numbers(30), labels=numbers(1)[0])], seeded())
    assert pair.inputs["tokens"].tolist() == [[CLS, 30, SEP, 20, 21, SEP]]
    assert pair.inputs["segments"].tolist() == [[0, 0, 0, 1, 1, 1]]
    with pytest.raises(DataError, match="needs a class"):
        maker.batch([Example(numbers(20))], seeded())


def test_the_longer_of_a_pair_is_cut() -> None:
    maker = make(training.Classify(), FRAMED, CASES["classify"].model)
    for sizes, kept in (((5, 60), (5, 24)), ((60, 5), (24, 5)), ((60, 60), (14, 15))):
        first, second = (np.full(size, 20 + at) for at, size in enumerate(sizes))
        row = maker.row(Example(second, first, labels=numbers(0)[0]), seeded()).inputs["tokens"]
        assert (int((row == 20).sum()), int((row == 21).sum())) == kept


def test_a_word_is_asked_at_its_first_piece() -> None:
    example = Example(numbers(20, 21, 22, 23, 24), words=numbers(0, 0, 1, 2, 2), labels=numbers(2, 0, 1))
    model = CASES["tag"].model
    assert Tag(FRAMED, model).row(example, seeded()).targets.tolist() == [IGNORE, 2, IGNORE, 0, 1, IGNORE, IGNORE]
    every = Tag(FRAMED, model, first_piece=False).row(example, seeded())
    assert every.targets.tolist() == [IGNORE, 2, 2, 0, 1, 1, IGNORE]
    assert every.inputs["tokens"].tolist() == [CLS, 20, 21, 22, 23, 24, SEP]
    framed = Example(numbers(CLS, 20, 21, SEP), words=numbers(-1, 0, 0, -1), labels=numbers(2))
    assert Tag(FRAMED, model).row(framed, seeded()).targets.tolist() == [IGNORE, 2, IGNORE, IGNORE]
    tokens = Example(numbers(20, 21), labels=numbers(1, IGNORE))
    assert Tag(FRAMED, model).row(tokens, seeded()).targets.tolist() == [IGNORE, 1, IGNORE, IGNORE]
    with pytest.raises(DataError, match="1 labels for 2 tokens"):
        Tag(FRAMED, model).row(Example(numbers(20, 21), labels=numbers(1)), seeded())


def test_a_span_is_found_in_the_row() -> None:
    maker = make(training.FindSpan(), FRAMED, CASES["span"].model)
    row = maker.row(Example(numbers(20, 21, 22), numbers(30, 31), labels=numbers(1, 2)), seeded())
    assert row.inputs["tokens"].tolist() == [CLS, 30, 31, SEP, 20, 21, 22, SEP]
    assert row.inputs["tokens"][row.targets].tolist() == [21, 22]
    framed = Example(numbers(CLS, 20, 21, 22, SEP), numbers(30, 31), labels=numbers(2, 3))
    assert maker.row(framed, seeded()).targets.tolist() == row.targets.tolist()
    none = maker.row(Example(numbers(20, 21, 22), numbers(30, 31), labels=numbers(-1, -1)), seeded())
    assert none.targets.tolist() == [0, 0]


def test_a_span_that_is_cut_off_is_not_asked() -> None:
    maker = make(training.FindSpan(), FRAMED, CASES["span"].model)
    passage, question = np.resize(np.arange(TEXT, SIZE), 50), numbers(30, 31)
    last = 32 - 3 - 2 - 1
    row = maker.row(Example(passage, question, labels=numbers(3, last)), seeded())
    assert row.inputs["tokens"][row.targets].tolist() == [passage[3], passage[last]]
    assert maker.row(Example(passage, question, labels=numbers(3, last + 1)), seeded()).targets.tolist() == [IGNORE] * 2


# From configs


def test_each_config_has_its_maker() -> None:
    # Rows of preferences are no targets of their own: test_dpo.
    assert {type(CASES[name].objective) for name in CASES} == set(training.Objective.members) - {training.Prefer}
    objective = training.Masked(share=0.2, mask=0.7, random=0.2, whole_word=True, next_sentence=True)
    assert make(objective, FRAMED, ENCODER) == Masked(FRAMED, ENCODER, 0.2, 0.7, 0.2, True, True)
    spans = training.SpanCorruption(density=0.3, mean_length=2.0)
    assert make(spans, BARE, BOTH) == SpanCorruption(BARE, BOTH, 0.3, 2.0)
    assert make(training.PrefixLM(share=0.5), BARE, DECODER) == Prefix(BARE, DECODER, 0.5)
    assert make(training.Answers(), BARE, DECODER) == Answers(BARE, DECODER)


def test_a_row_gives_as_many_targets_as_the_model_reads() -> None:
    for name, context in (("next-token", 9), ("span-corruption", 9), ("masked", 9)):
        maker = CASES[name].maker
        length = maker.raw_length(context) + maker.ahead
        row = maker.row(Example(np.arange(length) + TEXT), seeded())
        assert len(row.inputs["source" if "source" in row.inputs else "tokens"]) == context
