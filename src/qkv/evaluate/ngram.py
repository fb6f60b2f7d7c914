"""An interpolated n-gram model: the baseline that any Transformer should beat.

    p_k(w | h) = (c(h w) + t(h) p_(k-1)(w | h')) / (c(h) + t(h)),        p_0(w) = 1 / V

with the history h of k - 1 tokens, h' the same without its first, c counts in the training text and t(h) the number of
distinct tokens seen after h (Witten and Bell 1991; Chen and Goodman 1998, section 2.5). A history never seen leaves
p_(k-1) as it is. The probabilities of the V tokens sum to one after every history.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """The grams of one length and their histories, each as one sorted number with a trailing sentinel."""

    grams: Ints
    gram_counts: Ints
    histories: Ints
    totals: Ints
    """c(h) of each history."""
    followers: Ints
    """t(h) of each history."""


class NGram:
    """An n-gram model of order `order`: each token is predicted from the order - 1 before it."""

    def __init__(self, tokens: npt.ArrayLike, order: int, vocab_size: int) -> None:
        assert vocab_size**order < 2**63, "a gram must fit one 64-bit number"
        self.order, self.vocab_size = order, vocab_size
        given = np.asarray(tokens, dtype=np.int64)
        self._counts = [self._count(given, length) for length in range(1, order + 1)]

    def probabilities(self, tokens: npt.ArrayLike) -> Floats:
        """(N,): the probability of each token after those before it; the first ones have shorter histories."""
        given = np.asarray(tokens, dtype=np.int64)
        p = np.full(len(given), 1 / self.vocab_size)
        for length in range(1, min(self.order, len(given)) + 1):
            p[length - 1 :] = self._refined(p[length - 1 :], self._codes(given, length), self._counts[length - 1])
        return p

    def distribution(self, history: npt.ArrayLike) -> Floats:
        """(V,): the probability of every token after `history`."""
        given = np.asarray(history, dtype=np.int64)
        return np.array([self.probabilities(np.append(given, token))[-1] for token in range(self.vocab_size)])

    def _codes(self, tokens: Ints, length: int) -> Ints:
        """(N - length + 1,): every run of `length` tokens as one number in base V."""
        runs = np.lib.stride_tricks.sliding_window_view(tokens, length)
        return runs @ self.vocab_size ** np.arange(length - 1, -1, -1)

    def _count(self, tokens: Ints, length: int) -> Counts:
        grams, gram_counts = np.unique(self._codes(tokens, length), return_counts=True)
        histories, first, followers = np.unique(grams // self.vocab_size, return_index=True, return_counts=True)
        totals = np.add.reduceat(gram_counts, first)
        return Counts(grams, gram_counts, histories, totals, followers)

    def _refined(self, p: Floats, codes: Ints, counts: Counts) -> Floats:
        """p_k from p_(k-1) for the grams `codes`."""
        seen = _looked_up(codes, counts.grams, counts.gram_counts)
        total = _looked_up(codes // self.vocab_size, counts.histories, counts.totals)
        followers = _looked_up(codes // self.vocab_size, counts.histories, counts.followers)
        return np.where(total > 0, (seen + followers * p) / np.maximum(total + followers, 1), p)


def _looked_up(keys: Ints, table: Ints, values: Ints) -> Ints:
    """The value of each key in a sorted table; 0 for keys that it lacks."""
    place = np.searchsorted(table, keys).clip(max=len(table) - 1)
    return np.where(table[place] == keys, values[place], 0)
