"""SentencePiece's own algorithm: equal to SentencePiece, and to the rule written naively."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import CheckpointError, DataError
from qkv.text import tokenizer_from
from qkv.text.decoding import SPACE
from qkv.text.pieces import Specials
from qkv.text.sentencepiece import Kind, Pieces, SentencePieceTokenizer

from .files import SENTENCEPIECE, sentencepiece

GOLDEN: dict[str, Any] = json.loads((SENTENCEPIECE / "golden.json").read_text(encoding="utf-8"))
BPE, UNIGRAM = sentencepiece("bpe"), sentencepiece("unigram")
# A ▁ in a text is a space to SentencePiece.
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters=SPACE))


@pytest.mark.parametrize(("name", "tokenizer"), [("bpe", BPE), ("unigram", UNIGRAM)])
def test_ids_are_those_of_sentencepiece(name: str, tokenizer: SentencePieceTokenizer) -> None:
    pairs = list(zip(GOLDEN["texts"], GOLDEN[name]["ids"], strict=True))
    assert len(pairs) > 250
    assert {text: tokenizer.encode(text, add_special=False) for text, _ in pairs} == dict(pairs)


def test_decoded_texts_are_those_of_sentencepiece() -> None:
    for tokens, text in zip(GOLDEN["bpe"]["ids"], GOLDEN["bpe"]["decoded"], strict=True):
        assert BPE.decode(tokens) == text


@given(TEXTS)
def test_every_text_comes_back_from_a_vocabulary_with_bytes(text: str) -> None:
    tokens = BPE.encode(text)
    assert tokens[0] == BPE.specials.bos
    assert BPE.decode(tokens) == text
    assert set(BPE.specials.controls.values()).isdisjoint(tokens[1:])


@given(st.lists(st.integers(-3, BPE.vocab_size + 3)))
def test_pieces_of_a_stream_join_to_the_whole_text(tokens: list[int]) -> None:
    for tokenizer in (BPE, UNIGRAM):
        assert "".join(tokenizer.stream(tokens)) == tokenizer.decode(tokens)


def naive(word: str, scores: dict[str, float]) -> list[str]:
    """Join the best-scored pair of neighbours, the leftmost of equals, until none is left."""
    symbols = list(word)
    while True:
        pairs = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def made(scores: dict[str, float], **settings: Any) -> SentencePieceTokenizer:
    texts = ["<unk>", "<s>", *scores]
    kinds = [Kind.UNKNOWN, Kind.CONTROL, *[Kind.NORMAL] * len(scores)]
    pieces = Pieces(texts, [0.0, 0.0, *scores.values()], kinds, **{"add_space": False, **settings})
    return SentencePieceTokenizer(pieces, Specials({"<unk>": 0, "<s>": 1}, unk=0, bos=1), ([], []))


LETTERS = dict.fromkeys(f"ab{SPACE}", -9.0)


@given(
    st.dictionaries(st.text(f"ab{SPACE}", min_size=2, max_size=4), st.integers(-4, 0).map(float), max_size=12),
    st.text("ab ", max_size=40),
)
def test_joining_from_a_heap_is_the_naive_rule(scores: dict[str, float], text: str) -> None:
    """Also where scores are equal, pieces overlap, and pieces go over from one word into the next."""
    tokenizer = made({**LETTERS, **scores})
    expected = naive(text.replace(" ", SPACE), scores)
    assert [tokenizer.piece(token) for token in tokenizer.encode(text)] == expected


def best(word: str, scores: dict[str, float]) -> float:
    """The largest sum of scores of any segmentation."""
    sums = [0.0]
    for end in range(1, len(word) + 1):
        sums.append(max(sums[start] + scores[word[start:end]] for start in range(end) if word[start:end] in scores))
    return sums[-1]


@given(
    st.dictionaries(st.text(f"ab{SPACE}", min_size=2, max_size=4), st.integers(-20, 0).map(float), max_size=12),
    st.text("ab ", max_size=30),
)
def test_unigram_finds_a_segmentation_with_the_largest_sum(scores: dict[str, float], text: str) -> None:
    scores = {**LETTERS, **scores}
    tokenizer = made(scores, unigram=True)
    found = [tokenizer.piece(token) for token in tokenizer.encode(text)]
    assert "".join(map(str, found)) == text.replace(" ", SPACE)
    assert sum(scores[str(piece)] for piece in found) == pytest.approx(best(text.replace(" ", SPACE), scores))


def test_the_leftmost_of_equals_is_joined_first() -> None:
    # "aba" is reached from "ab" + "a" and from "a" + "ba"; a ranking of pairs can prefer one of the two only.
    scores = {**LETTERS, "ab": -1.0, "ba": -1.0, "aba": -2.0}
    assert [made(scores).piece(token) for token in made(scores).encode("ababa")] == ["ab", "aba"]
    assert naive("ababa", scores) == ["ab", "aba"]


def test_an_unused_piece_helps_to_join_and_is_taken_apart() -> None:
    texts = ["<unk>", "a", "b", "ab", "aba"]
    kinds = [Kind.UNKNOWN, Kind.NORMAL, Kind.NORMAL, Kind.UNUSED, Kind.NORMAL]
    pieces = Pieces(texts, [0.0, -9.0, -9.0, -1.0, -2.0], kinds, add_space=False)
    tokenizer = SentencePieceTokenizer(pieces, Specials({"<unk>": 0}, unk=0), ([], []))
    assert tokenizer.encode("aba") == [4]
    assert tokenizer.encode("abb") == [1, 2, 2]


def test_nothing_is_joined_across_a_user_defined_piece() -> None:
    # "aba" is user-defined in this vocabulary, and so is "<tool>".
    pieces = [BPE.piece(token) for token in BPE.encode("the aba<tool>the", add_special=False)]
    assert pieces.count("aba") == pieces.count("<tool>") == 1
    assert BPE.decode(BPE.encode("the aba<tool>the")) == "the aba<tool>the"


def test_a_text_begins_anew_after_a_control_token() -> None:
    parts = [("<s>", True), ("the", False), ("</s>", True), ("the", False)]
    tokens = BPE.encode_parts(parts)
    the = BPE.encode("the", add_special=False)
    assert tokens == [1, *the, 2, *the]
    assert BPE.decode(tokens) == "thethe"
    assert BPE.decode(tokens, keep_special=True) == "<s>the</s>the"
    assert BPE.encode("<s>the</s>the", parse_special=True) == tokens
    with pytest.raises(DataError, match="'<nobody>' is no control token"):
        BPE.encode_parts([("<nobody>", True)])


def test_neighbouring_unknown_characters_are_one_unknown_token() -> None:
    assert made(LETTERS).encode("axxa x") == [2, 0, 2, 4, 0]
    unk = UNIGRAM.specials.unk
    assert UNIGRAM.encode("🦙🦙", add_special=False)[1:] == [unk]
    assert UNIGRAM.decode(UNIGRAM.encode("a🦙")) == "a<unk>"


def test_the_file_says_how_a_text_is_normalized() -> None:
    assert UNIGRAM.encode("  the   ﬁ\u00a0 ") == UNIGRAM.encode("the fi")
    assert UNIGRAM.encode("the")[-1] == UNIGRAM.specials.eos


@pytest.mark.parametrize("tokenizer", [BPE, UNIGRAM])
def test_a_saved_tokenizer_is_made_again(tokenizer: SentencePieceTokenizer) -> None:
    saved = json.loads(json.dumps(tokenizer.to_dict()))
    for again in (tokenizer_from(saved), pickle.loads(pickle.dumps(tokenizer))):
        assert [again.encode(text) for text in GOLDEN["texts"]] == [tokenizer.encode(t) for t in GOLDEN["texts"]]
        assert again.to_dict() == tokenizer.to_dict()
    del saved["pieces"]["scores"]
    with pytest.raises(CheckpointError, match="sentencepiece description is damaged"):
        tokenizer_from(saved)


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        (Pieces(["a", "b"], [0.0], [1, 1]), "2 pieces, 1 scores, 2 types"),
        (Pieces(["a", "<0xZZ>"], [0.0, 0.0], [1, 6]), "'<0xZZ>' is called a byte"),
        (Pieces(["a", "<0x41>"], [0.0, 0.0], [1, 6]), "1 of 256 byte pieces"),
        (Pieces(["a"], [0.0], [1]), "neither byte pieces nor an unknown token"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(pieces: Pieces, problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"^file: {problem}"):
        SentencePieceTokenizer(pieces, Specials(), ([], []), "file")
