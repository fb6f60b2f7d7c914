"""Beam search: of all continuations the best, by following the `width` most promising ones at once.

    score(y) = log p(y | prompt) / ((5 + n) / 6)^length_penalty        n: the tokens of y, its end token included

Wu 2016, arXiv 1609.08144, equation 14, without the coverage term. log p is the sum of log-softmaxes of the model's own
logits in float64; what is forbidden (a constraint, an early end) is left out, and nothing is renormalised.

In each step every followed text is extended by every token. Of these candidates, best first, a text that ends is kept
if it is among the first `width`; the first `width` that do not end are followed on. So a text that ends never takes the
place of one that goes on, and with a width of the number of all candidates the search is exhaustive.

Diverse beam search (Vijayakumar 2016, arXiv 1610.02424) gives each of `groups` groups its share of the width. They
choose one after another, and a candidate loses `diversity` for each time an earlier group chose its token in the same
step. This moves only the choice: scores are always the model's.

Among equals the lower beam comes first, then the lower token id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qkv.config.decoding import Beam
from qkv.errors import GenerationError
from qkv.generate.constrain import Constraint
from qkv.generate.runner import Runner, Tokens

Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Hypothesis:
    """A continuation that the search found."""

    tokens: tuple[int, ...]
    """The new tokens, with the end token if there is one."""
    score: float
    """`logprob` over the length penalty."""
    logprob: float
    """log p of the tokens under the model."""
    finished: bool
    """Whether it ended, rather than being cut at the largest length."""


class _Text(NamedTuple):
    """A continuation that is followed."""

    tokens: tuple[int, ...]
    logprob: float
    row: int
    """Where the state holds it; of a new one, where it holds the text that it extends."""
    constraint: Constraint | None


@dataclass
class _Group:
    """A beam: the texts that it follows, and the best that it has found, best first."""

    open: list[_Text]
    found: list[Hypothesis] = field(default_factory=list)


def beam_search(
    runner: Runner,
    prompt: Tokens,
    beam: Beam,
    *,
    max_new_tokens: int,
    ends: frozenset[int] = frozenset(),
    source: Tokens | None = None,
    min_new_tokens: int = 0,
    constraint: Constraint | None = None,
) -> list[Hypothesis]:
    """The best continuations of `prompt`, best first: `beam.width` of them, or as many as there are.

    ends: the tokens that end a text; forbidden before `min_new_tokens` tokens were generated.
    source: what an encoder-decoder reads.
    constraint: what the new text must satisfy; a fresh one, which stays as it is.
    """
    _check(runner, prompt, max_new_tokens, min_new_tokens)
    search = _Search(beam, max_new_tokens, ends, min_new_tokens)
    state = runner.start(1, len(prompt) + max_new_tokens, sources=None if source is None else [source])
    logits = state.extend([prompt])
    groups = [_Group([_Text((), 0.0, 0, constraint)]) for _ in range(beam.groups)]
    for length in range(1, max_new_tokens + 1):
        logprobs = log_softmax(logits)
        taken = np.zeros(logprobs.shape[1], np.int64)
        for group in groups:
            taken += search.step(group, logprobs, taken, length)
        texts = [text for group in groups for text in group.open]
        if not texts:
            break
        rows = [text.row for text in texts]
        # Nothing else may be skipped: as many rows as before can still be other rows, or rows in another order.
        if rows != list(range(len(logprobs))):
            state.select(rows)
        logits = state.extend([text.tokens[-1:] for text in texts])
        following = iter(range(len(texts)))
        for group in groups:
            group.open = [text._replace(row=next(following)) for text in group.open]
    return _merged(groups, beam.width)


def log_softmax(logits: npt.NDArray[np.floating]) -> Doubles:
    """The logarithm of softmax along the last axis, in float64."""
    wide = np.asarray(logits, np.float64)
    top = wide.max(-1, keepdims=True)
    if not np.isfinite(top).all():
        raise GenerationError("the model's logits are not finite numbers; nothing can be chosen from them")
    shifted = wide - top
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def penalty(length: int, exponent: float) -> float:
    """What the log-probability of `length` tokens is divided by."""
    return float(((5 + length) / 6) ** exponent)


def bound(logprob: float, length: int, longest: int, exponent: float) -> float:
    """The best score that a text of `length` tokens can still reach by going on.

    Every further token has log p <= 0, so that the whole text has at most `logprob`, itself <= 0. The larger the
    penalty, the nearer is its score to 0. The penalty is monotonic in the length (it rises if the exponent is above 0,
    and falls below 0), so that over the possible lengths, length + 1 to `longest`, it is largest at one of the two.
    """
    return logprob / max(penalty(length + 1, exponent), penalty(longest, exponent))


@dataclass(frozen=True)
class _Search:
    """What stays the same through a search."""

    beam: Beam
    longest: int
    ends: frozenset[int]
    min_new_tokens: int

    @property
    def width(self) -> int:
        """Of a group."""
        return self.beam.width // self.beam.groups

    def step(self, group: _Group, logprobs: Doubles, taken: Counts, length: int) -> Counts:
        """Replace the group's texts by their best extensions, of `length` tokens; how often it chose each token.

        logprobs (rows, V): of the next token, for every row of the state; taken (V,): what earlier groups chose.
        """
        chosen = np.zeros_like(taken)
        following: list[_Text] = []
        for rank, text in enumerate(self._candidates(group, logprobs, taken, length)):
            ended = self._ended(text)
            if ended and rank >= self.width:
                continue
            if ended:
                chosen[text.tokens[-1]] += 1
                self._keep(group, text, length, finished=True)
                continue
            following.append(text)
            if len(following) == self.width:
                break
        if length == self.longest:
            for text in following:
                self._keep(group, text, length, finished=False)
        elif self._over(group, following, length):
            following = []
        for text in following:
            chosen[text.tokens[-1]] += 1
        group.open = following if length < self.longest else []
        return chosen

    def _candidates(self, group: _Group, logprobs: Doubles, taken: Counts, length: int) -> Iterator[_Text]:
        """The extensions of the group's texts, best first."""
        if not group.open:
            return
        totals = logprobs[[text.row for text in group.open]] + np.array([[text.logprob] for text in group.open])
        for row, text in enumerate(group.open):
            if text.constraint is not None:
                totals[row, ~text.constraint.allowed()] = -np.inf
        if length <= self.min_new_tokens:
            totals[:, sorted(self.ends)] = -np.inf
        keys = (totals - self.beam.diversity * taken).ravel()
        # So many are enough, unless a constraint ends texts too.
        for at in in_order(keys, self.width + len(group.open) * len(self.ends)):
            row, token = divmod(at, totals.shape[1])
            text = group.open[row]
            yield _Text((*text.tokens, token), float(totals[row, token]), text.row, _after(text.constraint, token))

    def _ended(self, text: _Text) -> bool:
        """Whether a token ends the text, or its constraint lets nothing follow."""
        return text.tokens[-1] in self.ends or (text.constraint is not None and text.constraint.finished)

    def _keep(self, group: _Group, text: _Text, length: int, *, finished: bool) -> None:
        """Put a text among the best that were found; it comes after its equals."""
        score = text.logprob / penalty(length, self.beam.length_penalty)
        group.found.append(Hypothesis(text.tokens, score, text.logprob, finished))
        group.found.sort(key=lambda one: -one.score)
        del group.found[self.width :]

    def _over(self, group: _Group, following: list[_Text], length: int) -> bool:
        """Whether nothing that is still open is worth following."""
        if len(group.found) < self.width:
            return False
        if self.beam.early_stopping:
            return True
        worst = group.found[-1].score
        exponent = self.beam.length_penalty
        return all(bound(text.logprob, length, self.longest, exponent) <= worst for text in following)


def in_order(keys: Doubles, at_once: int) -> Iterator[int]:
    """The places of the finite keys, largest first, the earlier first among equals; `at_once` are sorted at first."""
    done, count = 0, at_once
    while True:
        places = best(keys, count)
        yield from places[done:].tolist()
        if len(places) < count:
            return
        done, count = count, 2 * count


def best(keys: Doubles, count: int) -> npt.NDArray[np.intp]:
    """The first `count` of these places."""
    least = np.partition(keys, -count)[-count] if count < len(keys) else -np.inf
    places = np.flatnonzero((keys >= least) & np.isfinite(keys))
    order = np.argsort(-keys[places], kind="stable")
    return np.asarray(places[order][:count], np.intp)


def _after(constraint: Constraint | None, token: int) -> Constraint | None:
    if constraint is None:
        return None
    advanced = constraint.fork()
    advanced.advance(token)
    return advanced


def _merged(groups: list[_Group], width: int) -> list[Hypothesis]:
    """The best of all groups, each text once."""
    found = {one.tokens: one for group in groups for one in group.found}
    if not found:
        raise GenerationError("beam search: every token was forbidden in every text that it followed")
    return sorted(found.values(), key=lambda one: -one.score)[:width]


def _check(runner: Runner, prompt: Tokens, max_new_tokens: int, min_new_tokens: int) -> None:
    if not prompt:
        raise GenerationError("prompt: empty; give at least one token to continue")
    if max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens: must be 1 or more, got {max_new_tokens}")
    if not 0 <= min_new_tokens <= max_new_tokens:
        raise GenerationError(f"min_new_tokens: must be 0 to max_new_tokens ({max_new_tokens}), got {min_new_tokens}")
    whole = len(prompt) + max_new_tokens
    if runner.max_length is not None and whole > runner.max_length:
        raise GenerationError(
            f"{len(prompt)} tokens and {max_new_tokens} new ones are {whole}, the model takes {runner.max_length}; "
            "shorten the prompt or lower max_new_tokens"
        )
