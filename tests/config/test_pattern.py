"""Patterns: every pair of positions against a definition in plain Python; `causal` and `reach` proved by trying all."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from qkv import config as c

from .strategies import configs

T = 40
GLOBAL = (3, 17)  # Longformer's global tokens
PREFIX = 5
Definition = Callable[[int, int], bool]


def coordinates(n: int = T) -> c.Coordinates:
    """One row of n positions (n,)."""
    return c.Coordinates(
        position=np.arange(n),
        is_global=np.isin(np.arange(n), GLOBAL),
        prefix_length=np.full(n, PREFIX),
        length=np.full(n, n),
    )


def seen(pattern: c.Pattern, n: int = T) -> np.ndarray:
    """(n, n): which query (row) sees which key (column)."""
    at = coordinates(n)
    axes = {field: getattr(at, field) for field in ("position", "is_global", "prefix_length", "length")}
    query = c.Coordinates(**{field: value[:, None] for field, value in axes.items()})
    key = c.Coordinates(**{field: value[None, :] for field, value in axes.items()})
    return np.broadcast_to(pattern.allowed(query, key), (n, n))


def window(size: int, sinks: int = 0) -> Definition:
    return lambda q, k: k in range(q - size + 1, q + 1) or k in range(min(sinks, q + 1))


CASES: dict[str, tuple[c.Pattern, Definition]] = {
    "bidirectional": (c.Bidirectional(), lambda q, k: True),
    "causal": (c.Causal(), lambda q, k: k in range(q + 1)),
    "prefix": (c.Prefix(), lambda q, k: k in range(q + 1) or k in range(PREFIX)),
    "window-1": (c.SlidingWindow(window=1), lambda q, k: k == q),
    "window": (c.SlidingWindow(window=7), window(7)),
    "window-sinks": (c.SlidingWindow(window=7, sinks=2), window(7, 2)),
    "chunked": (c.Chunked(chunk=6), lambda q, k: k in range(q - q % 6, q + 1)),
    "dilated": (c.Dilated(window=4, dilation=3), lambda q, k: k in (q, q - 3, q - 6, q - 9)),
    "dilated-1": (c.Dilated(window=4, dilation=1), window(4)),
    "longformer": (
        c.Longformer(window=6),
        lambda q, k: k in range(q - 3, q + 4) or k in GLOBAL or q in GLOBAL,
    ),
    "all-of": (
        c.AllOf(patterns=(c.Causal(), c.Longformer(window=6))),
        lambda q, k: k <= q and (k >= q - 3 or k in GLOBAL or q in GLOBAL),
    ),
    "all-of-windows": (
        c.AllOf(patterns=(c.SlidingWindow(window=9, sinks=1), c.SlidingWindow(window=5, sinks=3))),
        lambda q, k: window(9, 1)(q, k) and window(5, 3)(q, k),
    ),
    "any-of": (
        c.AnyOf(patterns=(c.SlidingWindow(window=3, sinks=1), c.Dilated(window=4, dilation=5))),
        lambda q, k: window(3, 1)(q, k) or k in (q - 5, q - 10, q - 15),
    ),
    "any-of-both-sides": (
        c.AnyOf(patterns=(c.Chunked(chunk=8), c.Longformer(window=2))),
        lambda q, k: k in range(q - q % 8, q + 1) or k in range(q - 1, q + 2) or k in GLOBAL or q in GLOBAL,
    ),
    "nested": (
        c.AllOf(patterns=(c.AnyOf(patterns=(c.Prefix(), c.Longformer(window=2))), c.Chunked(chunk=10))),
        lambda q, k: q // 10 == k // 10 and k <= q,
    ),
}
BIGBIRD = c.BigBird(block=2, random_blocks=3)


@pytest.mark.parametrize("name", CASES)
def test_every_pair_is_as_defined(name: str):
    pattern, definition = CASES[name]
    assert seen(pattern).tolist() == [[definition(q, k) for k in range(T)] for q in range(T)]


def test_every_member_has_a_case():
    covered = {type(pattern) for pattern, _ in CASES.values()} | {c.BigBird}
    assert covered == set(c.Pattern.members)


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in CASES.values()] + [BIGBIRD], ids=str)
def test_causal_says_whether_a_later_token_is_seen(pattern: c.Pattern):
    """Tokens of the prefix are given: seeing them predicts nothing."""
    later = [(q, k) for q, k in np.argwhere(seen(pattern)) if k > q]
    in_prefix = "prefix_length" in pattern.fields
    assert pattern.causal == all(in_prefix and k < PREFIX for _, k in later)


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in CASES.values()] + [BIGBIRD], ids=str)
def test_nothing_but_sinks_and_global_tokens_lies_beyond_the_reach(pattern: c.Pattern):
    reach = pattern.reach()
    reads_global = "is_global" in pattern.fields
    for q, k in np.argwhere(seen(pattern)):
        if k < reach.sinks or (reads_global and (q in GLOBAL or k in GLOBAL)):
            continue
        assert reach.behind is None or q - k <= reach.behind
        assert reach.ahead is None or k - q <= reach.ahead


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("all-of", "nested"))])
def test_the_reach_is_attained(name: str):
    """Somebody looks exactly so far; where there is no limit, as far as the row goes."""
    pattern, _ = CASES[name]
    reach = pattern.reach()
    reads_global = "is_global" in pattern.fields
    pairs = np.argwhere(seen(pattern))
    local = [(q, k) for q, k in pairs if not reads_global or not {q, k} & set(GLOBAL)]
    beyond_sinks = [(q, k) for q, k in local if k >= reach.sinks]
    assert max(q - k for q, k in beyond_sinks) == (T - 1 if reach.behind is None else reach.behind)
    if "prefix_length" in pattern.fields:
        assert max(k - q for q, k in local) == PREFIX - 1
    else:
        assert max(k - q for q, k in local) == (T - 1 if reach.ahead is None else reach.ahead)
    if reach.sinks:
        assert seen(pattern)[T - 1, : reach.sinks].all()


@given(configs(c.Pattern))
def test_causal_and_reach_are_promises_kept_by_every_pattern(pattern: c.Pattern):
    """Nested ones too. They may promise less than is so, as when one part of `all-of` hides another's future."""
    reach, fields = pattern.reach(), pattern.fields
    for q, k in np.argwhere(seen(pattern)):
        if pattern.causal and not ("prefix_length" in fields and k < PREFIX):
            assert k <= q
        if k >= reach.sinks and not ("is_global" in fields and {q, k} & set(GLOBAL)):
            assert reach.behind is None or q - k <= reach.behind
            assert reach.ahead is None or k - q <= reach.ahead


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in CASES.values()] + [BIGBIRD], ids=str)
def test_one_definition_serves_single_numbers_too(pattern: c.Pattern):
    """An index function receives one query and one key: plain integers here."""
    table = seen(pattern)

    def at(position: int) -> c.Coordinates:
        return c.Coordinates(position, is_global=position in GLOBAL, prefix_length=PREFIX, length=T)

    for q in range(0, T, 3):
        for k in range(T):
            assert bool(pattern.allowed(at(q), at(k))) == table[q, k]


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in CASES.values()] + [BIGBIRD], ids=str)
def test_the_predicate_reads_only_the_fields_that_it_names(pattern: c.Pattern):
    at = coordinates()

    def reduced(shape: tuple[int, int]) -> c.Coordinates:
        fields: dict[str, Any] = {field: getattr(at, field).reshape(shape) for field in pattern.fields}
        return c.Coordinates(**fields)

    mask = np.broadcast_to(pattern.allowed(reduced((T, 1)), reduced((1, T))), (T, T))
    assert np.array_equal(mask, seen(pattern))


# BigBird


def blocks_seen(pattern: c.BigBird, n: int) -> list[set[int]]:
    """For each query block, the key blocks that it sees, which must be seen whole or not at all."""
    table, size = seen(pattern, n), pattern.block
    found: list[set[int]] = []
    for q in range(0, n, size):
        row = set()
        for k in range(0, n, size):
            tile = table[q : q + size, k : k + size]
            assert tile.all() or not tile.any()
            if tile.all():
                row.add(k // size)
        found.append(row)
    return found


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("random_blocks", [0, 1, 3])
@pytest.mark.parametrize("n", [66, 67, 68, 95])
def test_bigbird_sees_neighbours_edges_and_so_many_random_blocks(random_blocks: int, seed: int, n: int):
    pattern = c.BigBird(block=3, random_blocks=random_blocks, seed=seed)
    rows = blocks_seen(pattern, n)
    last = len(rows) - 1
    assert last == (n - 1) // 3
    for b, row in enumerate(rows):
        if b in (0, last):
            assert row == set(range(last + 1))
        else:
            given = {0, last, b - 1, b, b + 1}
            assert given <= row
            assert len(row - given) == random_blocks


def test_bigbird_is_the_same_for_the_same_seed_and_another_for_another():
    first = seen(c.BigBird(block=2, random_blocks=2, seed=5), 60)
    assert np.array_equal(first, seen(c.BigBird(block=2, random_blocks=2, seed=5), 60))
    tables = {seen(c.BigBird(block=2, random_blocks=2, seed=seed), 60).tobytes() for seed in range(20)}
    assert len(tables) == 20


def test_bigbird_spreads_its_random_blocks():
    """Over 400 seeds, query block 10 of 30 sees each of its 25 candidates 48 times on average."""
    counts = np.zeros(30, dtype=int)
    for seed in range(400):
        row = blocks_seen(c.BigBird(block=1, random_blocks=3, seed=seed), 30)[10]
        counts[sorted(row - {0, 29, 9, 10, 11})] += 1
    candidates = np.delete(counts, [0, 29, 9, 10, 11])
    assert counts.sum() == 1200
    assert candidates.min() > 24
    assert candidates.max() < 80


@pytest.mark.parametrize("random_blocks", [0, 1, 3])
def test_bigbird_is_dense_on_short_rows_and_says_from_where_it_is_not(random_blocks: int):
    pattern = c.BigBird(block=3, random_blocks=random_blocks)
    for n in range(1, pattern.dense_below):
        assert seen(pattern, n).all()
    assert not seen(pattern, pattern.dense_below).all()


def test_bigbird_depends_on_the_length_of_the_row_alone():
    """A token's neighbours in a batch, or padding before it, do not change its blocks: positions and length decide."""
    pattern = c.BigBird(block=1, random_blocks=2)
    short, long = seen(pattern, 20), seen(pattern, 30)
    assert not np.array_equal(short, long[:20, :20])
    query, key = (
        c.Coordinates(position=np.arange(20).reshape(shape), length=np.full(shape, 20)) for shape in ((20, 1), (1, 20))
    )
    assert np.array_equal(pattern.allowed(query, key), short)
