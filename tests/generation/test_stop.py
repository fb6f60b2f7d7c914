"""Stop strings and streamed text: the same whatever the pieces, as early as can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import GenerationError
from qkv.generate.stop import WINDOW, RowText, Spelling, StopText, stop_strings
from qkv.text import ByteTokenizer
from qkv.text.decoding import RESTART, Piece, Rule, byte_level, spaced, utf8, word_ends, words

from .toys import letters

# Few characters, so that stops overlap themselves and each other.
pieces = st.lists(st.text("ab\u00e9", max_size=4), max_size=12)
stops = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop that is complete first, looked for one character after another."""
    for end in range(1, len(text) + 1):
        complete = sorted((stop for stop in stops if text[:end].endswith(stop)), key=len)
        if complete:
            return text[: end if include else end - len(complete[-1])], complete[-1]
    return text, None


def run(watch: StopText, pieces: Iterable[str]) -> str:
    """All that is shown of a text that ends after these pieces."""
    return "".join(watch.feed(piece)[0] for piece in pieces) + watch.flush()


@given(pieces, stops, st.booleans())
def test_what_is_shown_is_the_text_up_to_the_first_stop(pieces: list[str], stops: list[str], include: bool) -> None:
    watch = StopText(stops, include)
    assert (run(watch, pieces), watch.stopped) == cut("".join(pieces), stops, include)


@given(pieces, stops)
def test_no_more_is_held_back_than_what_may_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    watch, text, shown = StopText(stops), "", ""
    for piece in pieces:
        new, stopped = watch.feed(piece)
        text, shown = text + piece, shown + new
        if stopped is not None:
            assert watch.held == ""
            return
        assert shown + watch.held == text
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
        assert watch.held == max((b for b in beginnings if text.endswith(b)), key=len)


@pytest.mark.parametrize(
    ("pieces", "stops", "include", "shown"),
    [
        (["ab", "c"], ["bc"], False, ["a", ""]),
        (["ab", "c"], ["bc"], True, ["a", "bc"]),
        (["ab", "d"], ["bc"], False, ["a", "bd"]),
        (["abcd"], ["bc"], True, ["abc"]),
        (["xabcd"], ["abcd", "bc"], False, ["xa"]),  # "bc" is complete first
        (["xab"], ["b", "ab"], False, ["x"]),  # complete together: the one that began first
        (["aaa", "b"], ["aab"], False, ["a", ""]),
        (["a", "b", "c"], [], False, ["a", "b", "c"]),
        (["", "\n", "\n", "x"], ["\n\n"], False, ["", "", "", ""]),
    ],
)
def test_examples(pieces: list[str], stops: list[str], include: bool, shown: list[str]) -> None:
    watch = StopText(stops, include)
    assert [watch.feed(piece)[0] for piece in pieces] == shown


def test_nothing_passes_after_a_stop() -> None:
    watch = StopText(["b"])
    assert watch.feed("abc") == ("a", "b")
    assert watch.feed("more") == ("", "b")
    assert watch.flush() == ""


def test_b110_a_stop_is_text_and_a_number_is_refused_in_one_line() -> None:
    assert stop_strings("42") == ("42",)
    assert stop_strings(["a", "b", "a"]) == ("a", "b")
    for wrong in (42, [42], ["a", 42]):
        with pytest.raises(GenerationError) as caught:
            stop_strings(wrong)
        assert "got 42" in str(caught.value)
        assert 'write "42" for the text, or put 42 into `ends`' in str(caught.value)
        assert "\n" not in str(caught.value)
    for wrong in ("", ["a", ""]):
        with pytest.raises(GenerationError, match="stop: a stop string is empty"):
            stop_strings(wrong)
    with pytest.raises(GenerationError, match="stop: expected a string or a list of strings, got None"):
        stop_strings(None)


# Tokens to text

Vocabulary = list[Piece]
RULES: dict[str, tuple[Rule, Vocabulary]] = {
    "bytes": (byte_level, ["Ġthe", "a", "Ã", "©", "ð", "Ł", "ĺ", "Ģ", b"literal", RESTART, "é\u4e2d"]),
    "spaces": (spaced(leading=True), ["▁the", "a", "▁", "<0xC3>", "<0xA9>", "<0xF0>", b" x", RESTART]),
    "restarts": (spaced(leading=True, restarts=True), ["▁the", "a", "▁", "<0xC3>", "<0xA9>", b" x", RESTART]),
    "words": (words("##", glue=True), ["the", "##ing", ".", "n't", b"x", RESTART]),
    "word ends": (word_ends("</w>"), ["the</w>", "a", "b", "ing</w>", b"x", RESTART]),
    "only word ends": (word_ends("</w>"), ["the</w>", "ing</w>", RESTART]),
}


def speller(name: str, read: list[int] | None = None):
    """The spelling of tokens that follow other text; `read` collects the tokens that it reads."""
    rule, vocabulary = RULES[name]

    def spelled(tokens: Iterable[int]) -> Iterator[Piece]:
        for token in tokens:
            if read is not None:
                read.append(token)
            yield vocabulary[token % len(vocabulary)]

    return lambda tokens: utf8(rule(spelled(tokens), True))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("window", [2, 8, WINDOW])
def test_text_token_by_token_is_the_text_of_the_whole(name: str, window: int) -> None:
    spell = speller(name)
    for seed in range(8):
        tokens = np.random.default_rng(seed).integers(0, 40, 150).tolist()
        spelling, shown = Spelling(spell, window), ""
        for n, token in enumerate(tokens, start=1):
            new = spelling.feed(token)
            shown += new
            whole = "".join(spell(tokens[:n]))
            waiting = whole[len(shown) :]
            assert whole.startswith(shown)
            assert waiting in ("", "\ufffd"), "only the bytes of a character that is not whole wait"
        assert shown + spelling.flush() == "".join(spell(tokens))


@pytest.mark.parametrize("name", [name for name in RULES if name != "only word ends"])
def test_a_long_text_costs_no_more_per_token_than_a_short_one(name: str) -> None:
    read: list[int] = []
    spelling = Spelling(speller(name, read))
    tokens = np.random.default_rng(3).integers(0, 40, 2000).tolist()
    for token in tokens:
        spelling.feed(token)
    # Two windows per token on average at most, where spelling the whole each time would be a thousand tokens.
    assert len(read) < 2 * WINDOW * len(tokens)


def test_a_character_is_shown_with_its_last_byte() -> None:
    spelling = Spelling(ByteTokenizer().stream)
    shown = [spelling.feed(byte) for byte in "aé😀".encode()]
    assert shown == ["a", "", "é", "", "", "", "😀"]
    assert spelling.flush() == ""


def test_half_a_character_at_the_end_is_a_replacement() -> None:
    spelling = Spelling(ByteTokenizer().stream)
    assert [spelling.feed(byte) for byte in b"a\xf0\x9f"] == ["a", "", ""]
    assert spelling.flush() == "\ufffd"


def test_a_row_sees_stops_across_tokens_and_bytes() -> None:
    row = RowText(ByteTokenizer().stream, ["é!"], False, 0)
    assert [row.feed(byte) for byte in "aé!".encode()] == [("a", None), ("", None), ("", None), ("", "é!")]


def test_stops_are_looked_for_from_the_least_number_of_tokens_on() -> None:
    row = RowText(letters, ["a"], False, 3)
    assert [row.feed(token) for token in (0, 1, 0)] == [("a", None), ("b", None), ("", "a")]


def test_a_stop_may_be_complete_when_the_text_ends() -> None:
    row = RowText(ByteTokenizer().stream, ["\ufffd"], False, 0)
    assert row.feed(0x61) == ("a", None)
    assert row.feed(0xC3) == ("", None)
    assert row.flush() == ("", "\ufffd")


def test_without_text_there_are_no_stops() -> None:
    row = RowText(None, [], False, 0)
    assert row.feed(0) == row.flush() == ("", None)
    with pytest.raises(GenerationError, match=r"stop: .* no tokenizer; use `ends`"):
        RowText(None, ["a"], False, 0)
