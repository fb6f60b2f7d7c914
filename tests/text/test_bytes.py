"""The byte tokenizer: every text survives, and a character arrives whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import CheckpointError
from qkv.text import ByteTokenizer, tokenizer_from

TOKENIZER = ByteTokenizer()
TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


@given(TEXTS)
def test_every_text_comes_back(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert tokens == list(text.encode())
    assert all(0 <= token < TOKENIZER.vocab_size for token in tokens)
    assert TOKENIZER.decode(tokens) == text


@given(st.lists(st.integers(-5, 300)))
def test_pieces_join_to_the_whole_text(tokens: list[int]) -> None:
    pieces = list(TOKENIZER.stream(tokens))
    assert all(pieces)
    assert "".join(pieces) == TOKENIZER.decode(tokens)


def test_a_character_is_held_back_until_it_is_whole() -> None:
    assert list(TOKENIZER.stream("a€b".encode())) == ["a", "€", "b"]


@pytest.mark.parametrize("tokens", [[0xE2, 0x82], [0x80], [256], [-1]])
def test_what_is_no_text_is_replaced(tokens: list[int]) -> None:
    assert set(TOKENIZER.decode(tokens)) == {"\ufffd"}


def test_a_saved_tokenizer_is_made_again() -> None:
    assert isinstance(tokenizer_from(TOKENIZER.to_dict()), ByteTokenizer)
    for wrong in ({"kind": "words"}, {"kind": "bytes", "vocab_size": 100}, {}):
        with pytest.raises(CheckpointError, match="tokenizer: expected"):
            tokenizer_from(wrong)
