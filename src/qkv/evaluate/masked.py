"""Models that fill gaps (BERT): how often they are right, and pseudo-perplexity.

    accuracy              a share of each row's tokens is hidden at once: for how many is the right token the likeliest
    pseudo-perplexity     exp of the mean of -log p(token | the whole text with this token hidden), each token in turn
                          (Salazar 2020, arXiv 1910.14659, equations 1 and 3): a text of T tokens is read T times

Every hidden token is replaced by the mask token, unlike in training, where a fifth of them is not; special tokens are
never hidden. A long text is cut into windows that each get the tokens around them which the tokenizer puts around a
text, and which fit the model together with these. Pseudo-perplexities compare masked models with each other only: these
tokens are seen from both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qkv.errors import DataError
from qkv.evaluate.bits import Score
from qkv.evaluate.scoring import Window, scored
from qkv.model import TextModel
from qkv.text.pieces import PieceTokenizer, Specials

Ints = npt.NDArray[np.int64]
SHARE = 0.15


@dataclass(frozen=True)
class Filled:
    """How well gaps are filled."""

    hidden: Score
    """Of the tokens that were hidden together."""
    right: int
    """How many of these were the model's likeliest token."""
    pseudo: Score | None
    """Of the tokens that were hidden one by one; None if none was to be."""
    texts: int
    protocol: str
    """In words, with its numbers."""

    @property
    def accuracy(self) -> float:
        """The share of the hidden tokens that was found."""
        return self.right / self.hidden.tokens

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        found = {"accuracy": self.accuracy, "right": self.right, "hidden": self.hidden.tokens, "loss": self.hidden.loss}
        pseudo = None if self.pseudo is None else self.pseudo.perplexity
        singly = 0 if self.pseudo is None else self.pseudo.tokens
        more = {"pseudo_perplexity": pseudo, "hidden_singly": singly, "texts": self.texts, "protocol": self.protocol}
        return found | more


def fill_gaps(
    lm: TextModel,
    texts: Iterable[str],
    *,
    share: float = SHARE,
    seed: int = 0,
    context: int | None = None,
    limit: int | None = None,
    singly: int = 1000,
    progress: Callable[[int], None] | None = None,
) -> Filled:
    """Accuracy and pseudo-perplexity of a masked model.

    limit: only the first so many tokens of the texts are read. singly: as many of them are hidden one by one.
    progress: is told of the hidden tokens so far.
    """
    framed = _Framed.of(lm, context)
    rows, texts_read = framed.rows(texts, limit)
    gaps = [framed.hide(row, chosen(row, framed.special, share, [seed, n])) for n, row in enumerate(rows)]
    gaps = [gap for gap in gaps if gap.targets]
    if not gaps:
        raise DataError("data: no token that can be hidden; give texts that are not empty")
    every = (framed.hide(row, [place]) for row in rows for place in candidates(row, framed.special))
    alone = [gap for gap, _ in zip(every, range(singly), strict=False)]
    hidden, right = _cost(lm, gaps, progress, 0)
    pseudo = _cost(lm, alone, progress, hidden.tokens)[0] if alone else None
    said = f"{share:.0%} hidden together, seed {seed}; windows of {framed.context} tokens"
    return Filled(hidden, right, pseudo, texts_read, said)


def _cost(
    lm: TextModel, gaps: Sequence[Window], progress: Callable[[int], None] | None, before: int
) -> tuple[Score, int]:
    nats, count, right = 0.0, 0, 0
    for found in scored(lm.model, gaps):
        nats, count, right = nats - found.logprob, count + len(found.logprobs), right + int(found.likeliest.sum())
        if progress is not None:
            progress(before + count)
    return Score(nats, count), right


def special_tokens(specials: Specials) -> frozenset[int]:
    """The tokens that are no text: they are never hidden."""
    roles = (specials.bos, specials.eos, specials.unk, specials.pad, specials.sep, specials.cls, specials.mask)
    return frozenset({*specials.controls.values(), *specials.ends, *(role for role in roles if role is not None)})


def candidates(row: Sequence[int], special: frozenset[int]) -> Ints:
    """The places of a row that may be hidden."""
    return np.flatnonzero([token not in special for token in row])


def chosen(row: Sequence[int], special: frozenset[int], share: float, seed: Sequence[int]) -> Ints:
    """`share` of the places that may be hidden, in order, at least one: as objective `masked` draws them."""
    places = candidates(row, special)
    if not len(places):
        return places
    count = max(1, round(share * len(places)))
    return np.sort(np.random.default_rng(seed).choice(places, count, replace=False))


@dataclass(frozen=True)
class _Framed:
    """How texts become rows of a masked model."""

    tokenizer: PieceTokenizer
    mask: int
    special: frozenset[int]
    context: int

    @classmethod
    def of(cls, lm: TextModel, context: int | None) -> _Framed:
        tokenizer, room = lm.tokenizer, lm.config.max_seq_len
        if lm.config.head.kind != "masked-lm":
            raise DataError(f"model: its head {lm.config.head.kind!r} fills no gaps; evaluate it by another task")
        mask = tokenizer.specials.mask if isinstance(tokenizer, PieceTokenizer) else None
        if mask is None or not isinstance(tokenizer, PieceTokenizer):
            raise DataError("tokenizer: has no mask token, with which a masked model is asked")
        width, around = min(context or room, room), sum(map(len, tokenizer.around))
        if width <= around:
            raise DataError(f"context: {width} tokens leave no room beside the {around} around every text; give more")
        return cls(tokenizer, mask, special_tokens(tokenizer.specials), width)

    def rows(self, texts: Iterable[str], limit: int | None) -> tuple[list[list[int]], int]:
        """Windows of the texts, framed, and from how many texts they come."""
        before, after = self.tokenizer.around
        size, rows, texts_read = self.context - len(before) - len(after), list[list[int]](), 0
        left = limit
        for text in texts:
            if left == 0:
                break
            tokens = self.tokenizer.encode(text, add_special=False)[:left]
            left = None if left is None else left - len(tokens)
            rows += [[*before, *tokens[at : at + size], *after] for at in range(0, len(tokens), size)]
            texts_read += 1
        return rows, texts_read

    def hide(self, row: Sequence[int], places: Iterable[int]) -> Window:
        """The row with some tokens hidden, which are the targets there."""
        at = [int(place) for place in places]
        read = list(row)
        for place in at:
            read[place] = self.mask
        return Window(read, [row[place] for place in at], at)
