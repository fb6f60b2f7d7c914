"""Pools of pages: counted, shared, copied before they are written, given back, grown or refused."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from cache.toys import FULL, MIXED, WINDOW, Twin, users
from qkv.cache.cache import Options
from qkv.cache.pages import Pages
from qkv.config import ModelConfig
from qkv.errors import CacheError


def pages(twin: Twin, number: int = 0) -> Pages:
    group = twin.cache.groups[number]
    assert isinstance(group, Pages)
    return group


def named(twin: Twin, number: int = 0) -> list[dict[int, int]]:
    return [dict(table) for table in pages(twin, number).tables]


def test_pages_by_hand() -> None:
    """5 and 3 tokens in pages of 2: three pages and two, claimed row by row."""
    twin = Twin(FULL, 2, Options(8, layout="paged", page=2))
    twin.append([5, 3])
    assert named(twin) == [{0: 0, 1: 1, 2: 2}, {0: 3, 1: 4}]
    assert pages(twin).pool.users.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    step = twin.cache.begin(1, np.array([[True], [False]]))
    assert step.groups[0].write.lines is not None
    assert (step.groups[0].write.lines.tolist(), step.groups[0].write.slots.tolist()) == ([2], [1])
    twin.cache.abort(step)
    twin.truncate([2, 3])
    assert named(twin) == [{0: 0}, {0: 3, 1: 4}]


def test_a_window_gives_its_pages_back() -> None:
    """A window of 4 in pages of 2 needs at most three; whoever reads on takes what the others gave back."""
    twin = Twin(WINDOW, 1, Options(None, layout="paged", page=2))
    for _ in range(40):
        twin.append([1])
        assert len(named(twin)[0]) <= 3
        users(twin.cache)
    assert pages(twin).pool.size == 3


def test_a_shared_page_is_copied_when_it_is_written_and_not_before() -> None:
    twin = Twin(FULL, 1, Options(12, layout="paged", page=4))
    twin.append([6])
    other = twin.fork()
    assert named(twin) == named(other) == [{0: 0, 1: 1}]
    assert pages(twin).pool.users.tolist() == [2, 2, 0]
    users(twin.cache, other.cache)
    other.append([1])  # in the middle of page 1
    assert named(other) == [{0: 0, 1: 2}]
    assert pages(twin).pool.users.tolist() == [2, 1, 1]
    twin.append([1])  # which is its own by now
    assert named(twin) == [{0: 0, 1: 1}]
    other.append([2])  # a page of its own: the pool grows
    users(twin.cache, other.cache)
    assert pages(twin).pool.size == 6


def test_whole_pages_stay_shared() -> None:
    twin = Twin(FULL, 1, Options(16, layout="paged", page=4))
    twin.append([8])
    twin.select([0, 0, 0])
    twin.append([1, 1, 0])
    assert [(table[0], table[1]) for table in named(twin)] == [(0, 1)] * 3
    assert pages(twin).pool.users[:2].tolist() == [3, 3]
    users(twin.cache)


def test_dropped_caches_and_rows_give_their_pages_back() -> None:
    twin = Twin(FULL, 3, Options(8, layout="paged", page=2))
    twin.append([6, 6, 6])
    pool = pages(twin).pool
    assert pool.free == 3
    other = twin.fork()
    other.append([2, 2, 2])
    assert pool.free == 0
    del other
    gc.collect()
    assert pool.free == 3
    users(twin.cache)
    twin.select([1])
    assert pool.free == 9
    users(twin.cache)


def test_a_pool_grows_and_every_sharer_sees_the_same() -> None:
    twin = Twin(FULL, 1, Options(20, layout="paged", page=4))
    twin.append([9])
    others = [twin.fork() for _ in range(4)]
    for n, other in enumerate(others):
        other.append([n + 1])
    twin.append([5])
    for other in others:
        other.append([3])
    users(twin.cache, *(other.cache for other in others))
    assert pages(twin).pool.size > 5
    assert twin.cache.nbytes == others[0].cache.nbytes > 5 * 4 * 2 * 2 * 8


@pytest.mark.parametrize(
    ("config", "size", "slack"),
    [(FULL, 9, 3), (FULL, 12, 0), (FULL, 2, 2), (WINDOW, 9, 3), (WINDOW, 9, 4), (MIXED, 12, 0), (MIXED, 2, 2)],
)
def test_a_full_pool_refuses_and_nothing_changes(config: ModelConfig, size: int, slack: int) -> None:
    """Whatever did not fit, the rows go on as before, and can be taken back as far as before."""
    twin = Twin(config, 2, Options(24, layout="paged", page=2, slack=slack, pages=9))
    twin.append([6, 6])
    twin.append([1, 0])
    sharer = twin.fork()
    sharer.append([1, 2])
    groups = range(len(twin.cache.groups))
    before = [(named(twin, n), pages(twin, n).lowest.tolist(), pages(twin, n).pool.users.tolist()) for n in groups]
    with pytest.raises(CacheError, match=r"cache: \d+ pages needed, \d of 9 free; make it with more pages"):
        twin.append([size, size])
    assert twin.cache.lengths == [7, 6]
    assert before == [
        (named(twin, n), pages(twin, n).lowest.tolist(), pages(twin, n).pool.users.tolist()) for n in groups
    ]
    users(twin.cache, sharer.cache)
    del sharer
    gc.collect()
    twin.truncate([7 - slack, 6 - slack])
    twin.append([slack + 1, slack])


def test_the_refusal_says_how_many() -> None:
    twin = Twin(FULL, 1, Options(20, layout="paged", page=2, pages=3))
    twin.append([6])
    with pytest.raises(CacheError, match="cache: 1 pages needed, 0 of 3 free; make it with more pages"):
        twin.append([1])
    twin.truncate([5])
    twin.append([1])
