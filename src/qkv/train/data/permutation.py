"""Random numbers and permutations that are computed, not stored: each is a function of a seed, an epoch and an index.

    mixed(key, i)           64 random bits for each i (SplitMix64: Steele, Lea and Flood, OOPSLA 2014)
    permuted(i, n, key)     the i-th number of a permutation of 0 .. n-1

The permutation is a Feistel network on Z_a x Z_b with a b >= n: i = a R + L, and in turn

    L <- L + mixed(k_r, R) mod a        R <- R + mixed(k_r+1, L) mod b

Each round can be undone, so all of them together are a permutation of 0 .. a b - 1; what lands at n or beyond is sent
through again until it lands below ("cycle walking", Black and Rogaway 2002), which leaves a permutation of 0 .. n-1.
With a = ceil(sqrt n) and b = ceil(n / a) at most a - 1 numbers are beyond. So the order of a billion windows takes no
memory, any place of it can be asked for, and it is the same with every version of NumPy.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_ROUNDS = 12
_GOLDEN, _FIRST, _SECOND = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def key_of(*numbers: int) -> int:
    """One key of several numbers, none of which need be random."""
    key = 0
    for number in numbers:
        key = int(mixed(key, np.array([number]))[0])
    return key


def mixed(key: int, index: Ints) -> _Words:
    """64 random bits for each index."""
    start = np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    return _finish(_finish(index.astype(np.uint64) * _GOLDEN + _GOLDEN) ^ start)


def below(limit: int, key: int, index: Ints) -> Ints:
    """A random number from 0 to limit - 1 for each index; up to a limit of 2^48 all are equally likely to 2^-16."""
    return (mixed(key, index) % np.uint64(limit)).astype(np.int64)


def permuted(index: Ints, size: int, key: int) -> Ints:
    """Where a permutation of 0 .. size - 1 sends each index."""
    first = math.isqrt(size - 1) + 1 if size > 1 else 1
    second = -(-size // first)
    keys = _round_keys(key)
    found = np.array(index, dtype=np.int64)
    beyond = np.arange(found.size)
    while beyond.size:
        found[beyond] = _network(found[beyond], first, second, keys)
        beyond = beyond[found[beyond] >= size]
    return found


def _network(index: Ints, first: int, second: int, keys: tuple[int, ...]) -> Ints:
    right, left = np.divmod(index, first)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + below(first, even, right)) % first
        right = (right + below(second, odd, left)) % second
    return right * first + left


@lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(key_of(key, turn) for turn in range(_ROUNDS))


def _finish(words: _Words) -> _Words:
    """SplitMix64's mixing of one word."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
