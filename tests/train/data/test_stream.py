"""Rows and their order: everything once per epoch, and the same after any interruption."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import DataError
from qkv.train.data import Contiguous, Shards, Stream, every_row, in_memory
from qkv.train.data.rows import best_fit
from qkv.train.data.shards import Column

from .toys import numbered, plain

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=25)
CONTEXTS = st.integers(1, 12)
AHEAD = st.integers(0, 1)


def one_epoch(stream: Stream, batch: int = 3) -> list[Any]:
    """The rows of one epoch."""
    rows = len(stream.rows)
    drawn = [row for _ in range(-(-rows // batch)) for row in stream.draw(batch)]
    return drawn[:rows]


def targets(rows: list[Any], ahead: int) -> Counter[int]:
    """How often each token is what a row asks for; all but the first `ahead` of a document in a row can be."""
    found: Counter[int] = Counter()
    for row in rows:
        documents = np.zeros(len(row.tokens)) if row.documents is None else row.documents
        may = np.ones(len(row.tokens), dtype=bool) if row.answers is None else row.answers
        if ahead:
            may = may & np.append(False, documents[1:] == documents[:-1])
        found.update(row.tokens[may].tolist())
    return found


# Windows


@given(st.integers(2, 200), CONTEXTS, AHEAD, st.integers(0, 5))
def test_each_window_comes_exactly_once_per_epoch(length: int, context: int, ahead: int, seed: int) -> None:
    if length < context + ahead:
        return
    shards = numbered(length)
    stream = Stream(shards, context, 3, seed, ahead=ahead)
    in_order = list(every_row(shards, context, ahead=ahead))
    for _ in range(3):
        stream.position = -(-stream.position // len(stream.rows)) * len(stream.rows)
        assert sorted(plain(one_epoch(stream))) == sorted(plain(in_order))
    assert all(len(row) == context + ahead for row in plain(in_order))
    assert set().union(*plain(in_order)) == set(range(length))
    assert targets(in_order, ahead) == Counter(range(ahead, length))
    assert stream.coverage.tokens == sum(map(len, plain(in_order)))


def test_the_last_window_ends_with_the_text() -> None:
    rows = list(every_row(numbered(10), 4, ahead=1))
    assert plain(rows) == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [5, 6, 7, 8, 9]]
    assert [None if row.answers is None else row.answers.tolist() for row in rows] == [
        None,
        None,
        [False, False, False, False, True],
    ]


def test_windows_go_over_the_ends_of_documents() -> None:
    assert plain(list(every_row(numbered(3, 4, 1), 4))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def orders(seed: int) -> list[list[list[int]]]:
        stream = Stream(numbered(100), 5, 20, seed)
        return [plain(next(stream)) for _ in range(3)]

    seen = [json.dumps(order) for seed in (0, 1) for order in orders(seed)]
    assert len(set(seen)) == 6
    assert orders(1) == orders(1)


def test_a_batch_may_be_larger_than_an_epoch() -> None:
    stream = Stream(numbered(10), 5, 7, seed=0)
    first = Counter(map(tuple, plain([*next(stream), *next(stream)])))
    assert first == Counter({tuple(range(5)): 7, tuple(range(5, 10)): 7})
    assert stream.epoch == 7


# Random windows


def test_random_windows_begin_anywhere() -> None:
    stream = Stream(numbered(12), 9, 40, seed=0, random=True, ahead=1)
    rows = plain(next(stream))
    assert Counter(row[0] for row in rows).keys() == {0, 1, 2}
    assert all(row == list(range(row[0], row[0] + 10)) for row in rows)
    assert plain(next(stream)) != rows


# Packed documents


@given(LENGTHS, CONTEXTS, AHEAD)
def test_packing_loses_no_token_and_mixes_no_documents(lengths: list[int], context: int, ahead: int) -> None:
    shards = numbered(*lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    firsts = {int(edge) for edge in np.cumsum([0, *lengths[:-1]])}
    stream = Stream(shards, context, 2, seed=1, documents=True, ahead=ahead)
    rows = one_epoch(stream)
    assert set().union(*plain(rows)) == set(range(sum(lengths)))
    assert targets(rows, ahead) == Counter(set(range(sum(lengths))) - (firsts if ahead else set()))
    for row in rows:
        assert 1 <= len(row.tokens) <= context + ahead
        assert row.documents.tolist() == sorted(row.documents.tolist())
        for document in np.unique(row.documents):
            piece = row.tokens[row.documents == document]
            assert (np.diff(piece) == 1).all()
            assert len(set(owner[piece].tolist())) == 1
    cut = sum(length > context + ahead for length in lengths)
    assert stream.coverage.cut == cut
    assert stream.coverage.tokens == sum(len(row.tokens) for row in rows)
    assert stream.coverage.left_out == 0
    whole = sum(len(np.unique(row.documents)) for row in rows)
    assert cut or whole == len(lengths)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_each_piece_goes_where_it_fits_best(lengths: list[int]) -> None:
    rooms: list[int] = []  # the same by looking at every row
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else 20) - length)
    loads = np.bincount(best_fit(np.array(lengths), 20), weights=lengths)
    assert sorted(loads.tolist()) == sorted(20 - room for room in rooms)


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_packing_takes_one_step_per_document() -> None:
    random = np.random.default_rng(0)
    costs = [lines_run(lambda n=n: best_fit(random.integers(1, 100, n), 100)) for n in (500, 1000, 2000)]
    assert costs[2] < 2.1 * costs[1] < 2.1 * 2.1 * costs[0]
    assert costs[2] < 20 * 2000


def test_reading_takes_steps_per_row_and_not_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(context: int) -> int:
        stream = Stream(numbered(4096), context, 8, seed=0)
        next(stream)
        return lines_run(lambda: next(stream))

    assert cost(256) == cost(16)
    read: list[int] = []
    column_read = Column.read

    def counted(self: Column, start: int, stop: int) -> Any:
        read.append(stop - start)
        return column_read(self, start, stop)

    monkeypatch.setattr(Column, "read", counted)
    next(Stream(numbered(4096), 16, 8, seed=0))
    assert read == [16] * 8


# Pairs and chats


def pairs() -> Shards:
    return in_memory([[1, 2], [3] * 9, [4], [5, 5]], 10, sources=[[6], [7], [8] * 9, [9, 9, 9]])


def test_a_pair_is_a_row_and_too_long_ones_are_counted() -> None:
    stream = Stream(pairs(), 4, 2, seed=0)
    found = {(tuple(row.source.tolist()), tuple(row.tokens.tolist())) for row in next(stream) if row.source is not None}
    assert found == {((6,), (1, 2)), ((9, 9, 9), (5, 5))}
    assert (stream.coverage.rows, stream.coverage.left_out, stream.coverage.tokens) == (2, 2, 8)
    ahead = Stream(in_memory([[1, 2, 3], [1, 2, 3, 4]], 9, sources=[[5, 6], [7]]), 2, 1, seed=0, ahead=1)
    assert (plain(next(ahead)), ahead.coverage.left_out) == ([[1, 2, 3]], 1)
    with pytest.raises(DataError, match="no pair fits into 1 tokens, the shortest needs 2"):
        Stream(pairs(), 1, 2, seed=0)


def chats() -> Shards:
    marks = [[False, True, True], [False] * 4 + [True] * 3]
    return in_memory([[1, 2, 3], [4, 5, 6, 7, 8, 9, 9]], 10, answers=marks)


def test_a_chat_is_a_row_and_keeps_its_marks() -> None:
    rows = list(every_row(chats(), 8))
    assert plain(rows) == [[1, 2, 3], [4, 5, 6, 7, 8, 9, 9]]
    assert [row.answers.tolist() for row in rows if row.answers is not None] == [
        [False, True, True],
        [False, False, False, False, True, True, True],
    ]
    (packed,) = every_row(chats(), 10, documents=True)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert packed.documents is not None
    assert packed.answers is not None
    assert packed.documents.tolist() == [0] * 3 + [1] * 7
    assert packed.answers.tolist() == [False, True, True] + [False] * 4 + [True] * 3
    stream = Stream(chats(), 5, 1, seed=0)
    assert (stream.coverage.rows, stream.coverage.cut) == (3, 1)


# State


KINDS: dict[str, Callable[[int], Stream]] = {
    "windows": lambda batch: Stream(numbered(60), 7, batch, seed=3, ahead=1),
    "random": lambda batch: Stream(numbered(60), 7, batch, seed=3, random=True),
    "packed": lambda batch: Stream(numbered(*range(1, 15)), 7, batch, seed=3, documents=True),
    "pairs": lambda batch: Stream(pairs(), 4, batch, seed=3),
    "chats": lambda batch: Stream(chats(), 4, batch, seed=3),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_restored_stream_goes_on_as_if_nothing_had_happened(kind: str, data: st.DataObject) -> None:
    make = KINDS[kind]
    batches = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    uninterrupted = plain(make(1).draw(sum(batches)))
    state: dict[str, Any] | None = None
    found: list[list[int]] = []
    for batch in batches:  # killed after each batch, and started anew with another one
        stream = make(batch)
        if state is not None:
            stream.restore(json.loads(json.dumps(state)))
        found += plain(next(stream))
        state = stream.state()
    assert found == uninterrupted


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Stream(numbered(61), 7, 2, seed=3), "data: the texts or the tokenizer changed"),
        (Stream(numbered(60), 8, 2, seed=3), "context: 7 is not 8"),
        (Stream(numbered(60), 7, 2, seed=4), "seed: 3 is not 4"),
        (Stream(numbered(60), 7, 2, seed=3, documents=True), "documents: False is not True"),
        (Stream(numbered(60), 7, 2, seed=3, random=True), "random: False is not True"),
        (Contiguous(numbered(60), 7, 2), "not of a stream"),
    ],
)
def test_the_state_of_another_stream_is_refused(other: Stream | Contiguous, message: str) -> None:
    stream = Stream(numbered(60), 7, 2, seed=3)
    with pytest.raises(DataError, match=message):
        stream.restore(other.state())
    for damaged in ({}, {**stream.state(), "position": -1}, {**stream.state(), "position": "1"}):
        with pytest.raises(DataError, match="not of a stream"):
            stream.restore(damaged)


# Contiguous tracks


@given(st.integers(1, 120), st.integers(1, 6), CONTEXTS, AHEAD)
def test_tracks_cover_the_text_in_order(length: int, batch: int, context: int, ahead: int) -> None:
    if length < batch + ahead:
        return
    stream = Contiguous(numbered(length), context, batch, ahead=ahead)
    assert stream.begins
    steps = [plain(next(stream)) for _ in range(stream.steps)]
    assert stream.begins
    assert [len({len(row) for row in step}) for step in steps] == [1] * len(steps)
    tracks = [[token for step in steps for token in step[row][: context if ahead else None]] for row in range(batch)]
    ends = [step[-1] for step in steps[-1]]
    read = set(ends)
    for track in tracks:
        assert (np.diff(track) == 1).sum() >= len(track) - 1 - ahead  # only the very last row may repeat a token
        read |= set(track)
    assert read == set(range(length))
    asked = Counter(token for step in steps for row in step for token in row[ahead:])
    assert set(asked) == set(range(ahead, length))
    assert sum(asked.values()) <= length - ahead + batch - 1
    assert plain(next(stream)) == steps[0]


def test_tracks_go_on_where_they_were() -> None:
    whole = [plain(rows) for rows in islice(Contiguous(numbered(50), 4, 3, ahead=1), 12)]
    found: list[list[list[int]]] = []
    state: dict[str, Any] | None = None
    begins = []
    for _ in range(12):
        stream = Contiguous(numbered(50), 4, 3, ahead=1)
        if state is not None:
            stream.restore(json.loads(json.dumps(state)))
        begins.append(stream.begins)
        found.append(plain(next(stream)))
        state = stream.state()
    assert found == whole
    assert begins == [step % 5 == 0 for step in range(12)]
    with pytest.raises(DataError, match="batch: 2 is not 3"):
        Contiguous(numbered(50), 4, 2, ahead=1).restore(state or {})


def test_a_track_of_chats_keeps_its_marks() -> None:
    (row,) = next(Contiguous(chats(), 6, 1))
    assert row.answers is not None
    assert row.answers.tolist() == [False, True, True, False, False, False]


# Refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stream(numbered(7), 7, 1, 0, ahead=1), "a row needs 8 tokens, but the text has 7"),
        (lambda: Stream(numbered(7), 8, 1, 0, random=True), "a row needs 8 tokens, but the text has 7"),
        (lambda: Stream(numbered(7), 0, 1, 0), "context: must be at least 1, got 0"),
        (lambda: Stream(numbered(7), 2, 0, 0), "batch: must be at least 1, got 0"),
        (lambda: Stream(pairs(), 4, 1, 0, documents=True), "pairs stand in rows of their own"),
        (lambda: Stream(pairs(), 4, 1, 0, random=True), "pairs stand in rows of their own"),
        (lambda: Stream(numbered(9), 4, 1, 0, documents=True, random=True), "random windows would cut documents"),
        (lambda: Stream(chats(), 4, 1, 0, random=True), "random windows would cut documents"),
        (lambda: Contiguous(numbered(3), 4, 4), "4 tracks need 4 tokens, but the text has 3"),
        (lambda: Contiguous(pairs(), 4, 1), "pairs are no text"),
        (lambda: in_memory([[1], [2]], 3, sources=[[1]]), "source: 1 rows for 2 documents"),
        (lambda: in_memory([[1], [3]], 3), "tokens 1 to 3, but the vocabulary has 3"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()
