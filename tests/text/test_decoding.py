"""Bytes become text as soon as they can, and not before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.text.decoding import RESTART, Piece, byte_alphabet, byte_level, spaced, utf8, word_ends, words

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


def text_of(pieces: list[Piece], rule: object, continues: bool = False) -> str:
    assert callable(rule)
    return "".join(utf8(rule(pieces, continues)))


def whole_characters(data: bytes) -> str:
    """The text of the longest beginning that is UTF-8."""
    for end in range(len(data), -1, -1):
        try:
            return data[:end].decode()
        except UnicodeDecodeError:
            continue
    raise AssertionError("the empty beginning is UTF-8")


@given(TEXTS, st.data())
def test_every_whole_character_is_out_and_no_more(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    given_out, taken = "", b""

    def source():
        nonlocal taken
        for chunk in chunks:
            # Before the next chunk is asked for, all that the earlier ones complete has been handed out.
            assert given_out == whole_characters(taken)
            taken += chunk
            yield chunk

    for piece in utf8(source()):
        given_out += piece
    assert given_out == text


def test_the_byte_alphabet_is_that_of_gpt_2() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["Ġ"] == ord(" ")
    assert alphabet["Ċ"] == ord("\n")
    assert alphabet["a"] == ord("a")
    assert all(len(character) == 1 and character.isprintable() and not character.isspace() for character in alphabet)


@pytest.mark.parametrize(
    ("pieces", "rule", "expected"),
    [
        (["Hello", "Ġworld", RESTART, b"<x>", "âĤ", "¬"], byte_level, "Hello world<x>€"),
        (["日本"], byte_level, "日本"),
        (["▁Hello", "▁world", "<0x0A>", "▁x"], spaced(leading=True), "Hello world\n x"),
        (["▁Hello"], spaced(leading=False), " Hello"),
        (["▁▁a"], spaced(leading=True), " a"),
        (["▁a", RESTART, "▁b"], spaced(leading=True), "a b"),
        (["▁a", RESTART, "▁b"], spaced(leading=True, restarts=True), "ab"),
        (["<0x40>"], spaced(leading=True, bytes_too=False), "<0x40>"),
        ([b" ", "▁a"], spaced(leading=True), "  a"),
        (["hello", ",", "it", "##s", "fine", "."], words("##", glue=True), "hello, its fine."),
        (["hello", ",", "fine"], words("##", glue=False), "hello , fine"),
        (["##s", "##t"], words("##", glue=True), "##st"),
        (["a", b"[MASK]", "b"], words("##", glue=True), "a [MASK] b"),
        (["hel", "lo</w>", "you</w>"], word_ends("</w>"), "hello you"),
        (["\u2581a", b"\xff", "b"], spaced(leading=True), "a\ufffdb"),
    ],
)
def test_rules(pieces: list[Piece], rule: object, expected: str) -> None:
    assert text_of(pieces, rule) == expected


def test_what_continues_a_text_keeps_its_space() -> None:
    assert text_of(["▁Paris"], spaced(leading=True), continues=True) == " Paris"
    assert text_of(["paris"], words("##", glue=True), continues=True) == " paris"
    assert text_of(["##is"], words("##", glue=True), continues=True) == "is"
