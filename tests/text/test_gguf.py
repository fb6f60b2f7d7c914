"""Tokenizers from GGUF metadata: what the keys mean, and which files are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from qkv.errors import CheckpointError
from qkv.text import gguf
from qkv.text.decoding import byte_alphabet
from qkv.text.pieces import looks_like_control
from qkv.text.pretokenizers import PRE_TOKENIZERS

from .files import tiny_gguf

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))
BYTE = {byte: token for token, byte in enumerate(byte_alphabet().values())}


def spm(**changes: Any) -> dict[str, Any]:
    """The metadata of a SentencePiece vocabulary without bytes."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def word_pieces(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁he", "llo", "▁[", "▁Élan", "▁elan"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_cuts_without_loss(pre: str) -> None:
    text = "I'LL say \t\n\n 'Tis 1234567 für 的人, naïve¿? <|x|>\r\n  CamelCase ＡＢ１ ﬁ…  "
    tokenizer = gguf.from_metadata(tiny_gguf(pre=pre, add_bos_token=False, add_eos_token=False))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def cut(pre: str, text: str) -> list[str]:
    """The words of a text, written in bytes."""
    pieces = [(text, (0, len(text)))]
    for pattern in PRE_TOKENIZERS[pre].patterns:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        pieces = [one for piece, _ in pieces for one in split.pre_tokenize_str(piece)]
    return [piece for piece, _ in pieces]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("llama-bpe", "IT'S 1234\n\nx", ["IT", "'S", " ", "123", "4", "\n\n", "x"]),
        ("qwen2", "123 ab.cd", ["1", "2", "3", " ab", ".cd"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("falcon", "(1234)a", ["(", "123", "4", ")", "a"]),
        ("gpt-4o", "CamelCase don't", ["Camel", "Case", " don't"]),
        ("tekken", "CamelCase don't12", ["Camel", "Case", " don", "'t", "1", "2"]),
        ("deepseek-v3", "1234年", ["123", "4", "年"]),
        ("deepseek-llm", "ab人12\n", ["ab", "人", "12", "\n"]),
        ("deepseek-coder", "x = 1. 12", ["x", " = ", "1", ".", " ", "1", "2"]),
        ("bloom", "Hello, world", ["Hello", ",", " world"]),
        ("viking", "in 2024", ["in", " ", "2", "0", "2", "4"]),
    ],
)
def test_words_of_pre_tokenizers(pre: str, text: str, expected: list[str]) -> None:
    assert cut(pre, text) == expected


@pytest.mark.parametrize("pre", ["gpt-5-preview", ""])
def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones(pre: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^a\.gguf: unknown pre-tokenizer '{pre}'; .*llama-bpe.*qwen2"):
        gguf.from_metadata(tiny_gguf(pre=pre), "a.gguf")


@given(TEXTS)
def test_every_text_comes_back_from_bytes(text: str) -> None:
    assert TINY.decode(TINY.encode(text)) == text
    assert len(TINY.encode(text)) <= len(text.encode())


TINY = gguf.from_metadata(tiny_gguf())


def test_merges_are_applied_in_their_order() -> None:
    assert [TINY.piece(token) for token in TINY.encode("hello")] == ["hell", "o"]
    assert TINY.encode("é") == [BYTE[0xC3], BYTE[0xA9]]


def test_a_word_may_be_a_token_although_no_merge_makes_it() -> None:
    texts = [*byte_alphabet(), "he", "ll", "hell", "<s>", "<|im_end|>", "world"]
    changes = {"tokens": texts, "token_type": [1] * 259 + [3, 3, 1], "add_bos_token": False}
    assert gguf.from_metadata(tiny_gguf(**changes, pre="llama-bpe")).encode("world") == [261]
    assert len(gguf.from_metadata(tiny_gguf(**changes, pre="gpt-2")).encode("world")) == 5


def test_a_user_defined_token_with_the_name_of_a_control_token_is_one() -> None:
    assert TINY.specials.controls == {"<s>": 259, "<|im_end|>": 260}
    assert TINY.specials.ends == {260}
    assert 260 not in TINY.encode("a<|im_end|>")
    assert TINY.encode("a<|im_end|>", parse_special=True)[-1] == 260
    assert [looks_like_control(text) for text in ("<|a|>", "<｜a｜>", "<a>", "|a|", "<|a", "<|a|> ")] == [
        True,
        True,
    ] + [False] * 4


def test_another_user_defined_token_is_text() -> None:
    tokenizer = gguf.from_metadata(
        tiny_gguf(tokens=[*byte_alphabet(), "he", "ll", "hell", "<s>", "\n\n"], eos_token_id=None)
    )
    assert tokenizer.encode("a\n\n\n")[1:] == [260, BYTE[ord("\n")]]
    assert tokenizer.decode(tokenizer.encode("a\n\n\n")) == "a\n\n\n"


@pytest.mark.parametrize(
    ("changes", "around"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([259], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([259], [260])),
        ({"pre": "llama-bpe"}, ([259], [])),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
        ({"pre": "roberta-bpe"}, ([259], [260])),
    ],
)
def test_what_stands_around_a_text(changes: dict[str, Any], around: tuple[list[int], list[int]]) -> None:
    tokenizer = gguf.from_metadata(tiny_gguf(**changes))
    assert tokenizer.around == around
    assert tokenizer.encode("he") == [*around[0], 256, *around[1]]
    assert tokenizer.encode("he", add_special=False) == [256]
    # What a text brings along is not put there again.
    assert tokenizer.encode("<s>he<|im_end|>", parse_special=True) == [259, 256, 260]


def test_sentencepiece_by_scores() -> None:
    tokenizer = gguf.from_metadata(spm())
    assert tokenizer.encode("ab a") == [1, 7, 3, 4]
    assert tokenizer.encode("ax") == [1, 3, 4, 0]
    assert gguf.from_metadata(spm(add_space_prefix=False)).encode("ab") == [1, 6]
    assert gguf.from_metadata(spm(remove_extra_whitespaces=True)).encode(" ab  ab ") == [1, 7, 7]


def test_unigram_adds_eos_and_no_bos() -> None:
    tokenizer = gguf.from_metadata(spm(model="t5"))
    assert tokenizer.encode("ab") == [7, 2]
    assert tokenizer.decode(tokenizer.encode("ab a")) == "ab a"


def test_word_pieces_are_written_as_bert_writes_them() -> None:
    tokenizer = gguf.from_metadata(word_pieces())
    assert tokenizer.encode("Hello [ Élan") == [2, 4, 5, 6, 8, 3]
    assert [tokenizer.piece(token) for token in (4, 5, 6, 7)] == ["he", "##llo", "[", "Élan"]
    assert tokenizer.decode([2, 4, 5, 6, 3]) == "hello ["
    cased = gguf.from_metadata(word_pieces(**{"normalizer.lowercase": False, "normalizer.strip_accents": False}))
    assert cased.encode("Élan", add_special=False) == [7]


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({}, "tokenizer.ggml.tokens is missing"),
        (tiny_gguf(model="rwkv"), "unknown tokenizer model 'rwkv'; this qkv knows bert, gpt2, llama, t5"),
        (tiny_gguf(model=None), "tokenizer.ggml.model is missing"),
        (tiny_gguf(merges=None), "tokenizer.ggml.merges is missing"),
        (tiny_gguf(pre=None), "tokenizer.ggml.pre is missing"),
        (tiny_gguf(merges=["h nobody"]), "the tokenizer is not understood .*h?nobody"),
        (tiny_gguf(token_type=[1]), "261 tokens, but 1 token types"),
        (tiny_gguf(token_type=[9] * 261), "unknown token type 9"),
        (tiny_gguf(eos_token_id=261), "tokenizer.ggml.eos_token_id is 261 of 261 tokens"),
        (tiny_gguf(bos_token_id=-1), "tokenizer.ggml.bos_token_id is -1 of 261 tokens"),
        (tiny_gguf(add_bos_token=True, bos_token_id=None), "adds bos to a text, but names no bos_token_id"),
        (tiny_gguf(tokens=["a", "b", "a"], token_type=[1] * 3), "tokens 0 and 2 are both 'a'"),
        (spm(scores=None), "tokenizer.ggml.scores is missing"),
        (spm(scores=[0.0]), "8 pieces, 1 scores, 8 types"),
        (word_pieces(tokens=["[PAD]", "[UNK]", "[CLS]", "x", "▁he", "llo", "▁[", "▁É", "▁e"]), r"needs \[SEP\]"),
    ],
)
def test_what_is_damaged_is_refused_in_one_line(metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^m\.gguf: .*{problem}") as caught:
        gguf.from_metadata(metadata, "m.gguf")
    assert "\n" not in str(caught.value)
