"""Pairs of texts: no sentence of the test in the training text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import DataError
from qkv.train.data import Pair, Reading, pairs_apart, split_pairs
from qkv.train.data.pairs import Apart
from qkv.train.data.records import plain

SIDE = st.sampled_from(["a", "A ", "b", "c", "d", "e f", "E  f", "g", "h", "i", "j"])
PAIRS = st.lists(st.builds(lambda source, target: Pair("here", source, target), SIDE, SIDE), max_size=40)


def sides(pairs: Iterable[Pair]) -> tuple[set[str], set[str]]:
    pairs = list(pairs)
    return {plain(pair.source) for pair in pairs}, {plain(pair.target) for pair in pairs}


@given(PAIRS, PAIRS)
def test_nothing_held_out_is_trained_on(pairs: list[Pair], held_out: list[Pair]) -> None:
    kept = list(pairs_apart(pairs, held_out))
    for ours, theirs in zip(sides(kept), sides(held_out), strict=True):
        assert ours.isdisjoint(theirs)
    keys = [(plain(pair.source), plain(pair.target)) for pair in kept]
    assert len(keys) == len(set(keys))
    # And nothing else is missing.
    sources, targets = sides(held_out)
    free = {(plain(pair.source), plain(pair.target)) for pair in pairs}
    assert set(keys) == {(one, other) for one, other in free if one not in sources and other not in targets}


def test_what_did_not_pass_is_counted() -> None:
    passes = Apart([Pair("", "x", "y")])
    pairs = [("a", "b"), ("a", "c"), (" A", "B"), ("x", "b"), ("z", "Y"), ("x", "y")]
    assert [passes(Pair("", source, target)) for source, target in pairs] == [True, True, False, False, False, False]
    assert (passes.repeated, passes.leaking) == (1, 3)


@given(PAIRS, st.integers(0, 3))
def test_splits_share_no_sentence(pairs: list[Pair], seed: int) -> None:
    sets = split_pairs(pairs, (0.2, 0.2), seed)
    assert len(sets) == 3
    for number, one in enumerate(sets):
        for other in sets[number + 1 :]:
            for ours, theirs in zip(sides(one), sides(other), strict=True):
                assert ours.isdisjoint(theirs)
    assert sets == split_pairs(pairs, (0.2, 0.2), seed)


def test_splits_have_the_sizes_asked_for_and_depend_on_the_seed() -> None:
    pairs = [Pair("", f"source {number}", f"target {number}") for number in range(200)]
    sets = split_pairs(pairs, (0.1, 0.05), seed=1)
    assert [len(one) for one in sets] == [170, 20, 10]
    assert split_pairs(pairs, (0.1, 0.05), seed=2) != sets
    assert split_pairs(reversed(pairs), (0.1, 0.05), seed=1) == sets  # the order of the file does not matter


def test_translations_of_a_sentence_stay_together() -> None:
    pairs = [Pair("", f"source {number // 4}", f"target {number}") for number in range(80)]
    sets = split_pairs(pairs, (0.11, 0.06))
    assert [len(one) for one in sets] == [80 - 12 - 8, 12, 8]


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.0,), (-0.1, 0.5)])
def test_something_must_be_left(shares: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="must be positive and leave something"):
        split_pairs([], shares)


@pytest.mark.data
def test_the_collections_of_tatoeba(data: Path) -> None:
    german = data / "corpora" / "tatoeba_deu-eng_2018-05-13.zip"
    chinese = data / "corpora" / "tatoeba_cmn-eng_2022.tsv.gz"
    assert sum(1 for _ in Reading("parallel").records(str(chinese))) == CHINESE
    test = f"{data / 'corpora' / 'laser_tatoeba.deu-eng.eng'}::{data / 'corpora' / 'laser_tatoeba.deu-eng.deu'}"
    held_out = [pair for pair in Reading("parallel").records(test) if isinstance(pair, Pair)]
    assert len(held_out) == 1000
    passes = Apart(held_out)
    kept = sum(passes(pair) for pair in Reading("parallel").records(str(german)) if isinstance(pair, Pair))
    assert kept + passes.repeated + passes.leaking == 169_813
    assert (passes.repeated, passes.leaking) == (REPEATED, LEAKING)


CHINESE, REPEATED, LEAKING = 29_155, 36, 713
