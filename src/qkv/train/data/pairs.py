"""Pairs of texts kept apart: what a model is tested on never stands in what it was trained on, on either side.

Collections of sentences repeat themselves: one English sentence has ten German ones, and "Tom is here." comes in many
files. If only whole pairs were compared, the test's answers would stand in the training text. Two sentences count as
the same if they differ in case or spaces only (`records.plain`).

    train, valid, test = split_pairs(pairs, (0.01, 0.01), seed=0)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b

from qkv.errors import DataError
from qkv.train.data.records import Pair, plain

Digest = bytes


def digest(text: str, salt: str = "") -> Digest:
    """128 bits that stand for a text."""
    return blake2b(text.encode(), digest_size=16, key=salt.encode()[:64]).digest()


class Apart:
    """Lets a pair pass unless it came before, or one of its sides is held out."""

    def __init__(self, held_out: Iterable[Pair] = ()) -> None:
        self._sources: set[Digest] = set()
        self._targets: set[Digest] = set()
        self._seen: set[Digest] = set()
        self.repeated = self.leaking = 0
        """How many did not pass because they came before, and because of what is held out."""
        for pair in held_out:
            self._sources.add(digest(plain(pair.source)))
            self._targets.add(digest(plain(pair.target)))

    def __call__(self, pair: Pair) -> bool:
        """Whether the pair passes; it then has come before."""
        source, target = digest(plain(pair.source)), digest(plain(pair.target))
        if source in self._sources or target in self._targets:
            self.leaking += 1
            return False
        if source + target in self._seen:
            self.repeated += 1
            return False
        self._seen.add(source + target)
        return True


def pairs_apart(pairs: Iterable[Pair], held_out: Iterable[Pair] = ()) -> Iterator[Pair]:
    """Each pair once, without those of which either side is in the held-out ones."""
    passes = Apart(held_out)
    return (pair for pair in pairs if passes(pair))


def split_pairs(pairs: Iterable[Pair], shares: Sequence[float], seed: int = 0) -> list[list[Pair]]:
    """The pairs to train on, and a held-out set for each share, no sentence of which is in any other set.

    Pairs are drawn by their source, with all its translations. What has a side in a held-out set leaves the sets before
    it, so that the last one is complete.
    """
    kept = list(pairs_apart(pairs))
    if not 0 < sum(shares) < 1 or min(shares) < 0:
        raise DataError(f"shares: {list(shares)} must be positive and leave something to train on")
    key = {id(pair): digest(plain(pair.source), str(seed)) for pair in kept}
    order = sorted(kept, key=lambda pair: key[id(pair)])
    sets = _cut(order, [round(share * len(order)) for share in shares], lambda pair: key[id(pair)])
    done: list[list[Pair]] = []
    for later in reversed(sets):
        done.insert(0, list(pairs_apart(later, [pair for found in done for pair in found])))
    return done


def _cut(order: list[Pair], sizes: Collection[int], key: Callable[[Pair], Digest]) -> list[list[Pair]]:
    """The rest, and sets of at least these sizes from the beginning of the order, no key in two of them."""
    sets, start = list[list[Pair]](), 0
    for size in sizes:
        stop = min(start + size, len(order))
        while 0 < stop < len(order) and key(order[stop]) == key(order[stop - 1]):
            stop += 1
        sets.append(order[start:stop])
        start = stop
    return [order[start:], *sets]
