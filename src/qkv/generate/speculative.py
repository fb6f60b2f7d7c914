"""Speculative decoding: a cheap drafter guesses the next tokens, the model checks them all in one call (Leviathan 2023,
arXiv 2211.17192, algorithm 1). What comes out is what the model alone would give; only the number of calls changes.

A draft x is a token drawn from the drafter's distribution q; p is the model's, shaped and filtered alike:

    x ~ q        keep x if u < p(x) / q(x)        else draw from max(0, p - q), renormalised, and drop the later drafts

A drafter that names tokens without probabilities has q = 1 for its token. Keeping x with probability p(x), else drawing
from p without x, is then the same as drawing from p and comparing: `judge` does that, with the very number that plain
decoding uses, so that n-gram lookup gives the same tokens as no speculation, sampled or greedy. So does any drafter for
greedy decoding. With a model that samples its drafts the tokens differ from the plain ones of that seed, but have the
same distribution, and are the same in every run.

Random numbers of a position: lane 0 the model's draw (or the residual's), lane 1 the acceptance, lane 2 the draft. A
position that is drafted again has only been drafted behind a rejected token, where nothing depended on its numbers.

Drafts are made row by row (each row of a batch has its own drafter), and verified for all rows in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from qkv.config.decoding import Sampling
from qkv.errors import GenerationError
from qkv.generate.runner import Logits, Runner, State, Tokens
from qkv.generate.sampling import Choice, Chooser, Doubles, Mask, chosen, log_probability

ACCEPTANCE, DRAFT = 1, 2  # lanes; 0 is the model's own draw


@dataclass(frozen=True)
class Draft:
    """Guesses at the next tokens."""

    tokens: Sequence[int] = ()
    distributions: Sequence[Doubles] | None = None
    """What each token was drawn from, (V,); None: the tokens were chosen, not drawn."""


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses how one text goes on."""

    def propose(self, tokens: Tokens, n: int) -> Draft:
        """At most `n` tokens that may follow `tokens`, the text so far: longer than at the last call, never changed."""


@dataclass
class Acceptance:
    """How well drafts did."""

    drafted: int = 0
    """Tokens that were drafted and reached their turn: those behind a rejected one do not count."""
    accepted: int = 0
    """Those of them that were kept."""
    calls: int = 0
    """Rows times calls of the model that checked a draft; each gave its accepted tokens and one more."""

    @property
    def rate(self) -> float:
        """The share of the drafts that was kept, Leviathan's alpha."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_call(self) -> float:
        """How many tokens a checking call gave on average; plain decoding gives 1."""
        return 1 + self.accepted / self.calls if self.calls else 1.0


class Speculation(Protocol):
    """A way to draft."""

    @property
    def n(self) -> int:
        """How many tokens are drafted at a time, at most."""

    @property
    def acceptance(self) -> Acceptance:
        """What became of the drafts so far."""

    def drafter(self, prompt: Tokens, chooser: Chooser, max_len: int, vocab_size: int) -> Drafter:
        """A drafter for one text: it grows to `max_len` tokens, and `chooser` chooses them from `vocab_size` ones."""


@dataclass
class Lookup:
    """Prompt lookup: what followed the last tokens when they stood in the text before (Saxena 2023).

    Good where the answer repeats its prompt: edits, summaries, code.
    """

    n: int = 8
    longest: int = 3
    """The last tokens are looked up together, this many first, then one fewer at a time."""
    shortest: int = 1
    acceptance: Acceptance = field(default_factory=Acceptance)

    def __post_init__(self) -> None:
        _check_n(self.n)
        if not 1 <= self.shortest <= self.longest:
            raise GenerationError(f"shortest: must be 1 to longest ({self.longest}), got {self.shortest}")

    def drafter(self, prompt: Tokens, chooser: Chooser, max_len: int, vocab_size: int) -> Drafter:
        """A drafter that remembers where each n-gram of the text stood last."""
        return _LookupDrafter(range(self.longest, self.shortest - 1, -1))


@dataclass
class DraftModel:
    """A smaller model with the same tokens; it drafts under the same decoding as the model that it serves."""

    runner: Runner
    n: int = 4
    acceptance: Acceptance = field(default_factory=Acceptance)

    def __post_init__(self) -> None:
        _check_n(self.n)

    def drafter(self, prompt: Tokens, chooser: Chooser, max_len: int, vocab_size: int) -> Drafter:
        """A drafter with a state of its own."""
        limit = self.runner.max_length
        longest = max_len if limit is None else min(max_len, limit)
        state = self.runner.start(1, longest, slack=self.n)
        return _ModelDrafter(state, chooser, len(prompt), longest, (self.runner.vocab_size, vocab_size))


Guess = tuple[int | None, Doubles | None]
"""A drafted token and what it was drawn from."""


def guesses(draft: Draft) -> list[Guess]:
    """What was drafted for each place, and nothing for the place after the draft."""
    drawn = draft.distributions
    distributions: Sequence[Doubles | None] = [None] * len(draft.tokens) if drawn is None else drawn
    return [*zip(draft.tokens, distributions, strict=True), (None, None)]


def judge(chooser: Chooser, logits: Logits, generated: Sequence[int], allowed: Mask | None, guess: Guess) -> Choice:
    """The next token, given what was drafted for its place. The draft is accepted if it is that token."""
    drafted, q = guess
    if drafted is None or q is None:
        return chooser.choose(logits, generated, allowed)
    p = chooser.distribution(logits, generated, allowed)
    token = drafted
    if chooser.uniform(len(generated), ACCEPTANCE) * q[token] >= p[token]:
        left = np.maximum(p - q, 0)
        # p = q but for rounding: what is left is nothing, and p itself is right to within that.
        token = chosen((left if left.any() else p).cumsum(), chooser.uniform(len(generated)))
    return Choice(token, log_probability(logits, token))


class _LookupDrafter:
    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._after: dict[tuple[int, ...], int] = {}
        """Where the text went on after the last of these n-grams that did not end it."""
        self._read = 1

    def propose(self, tokens: Tokens, n: int) -> Draft:
        for place in range(self._read, len(tokens)):
            for size in self._sizes:
                if size <= place:
                    self._after[tuple(tokens[place - size : place])] = place
        self._read = len(tokens)
        endings = (tuple(tokens[len(tokens) - size :]) for size in self._sizes if size <= len(tokens))
        start = next((self._after[ending] for ending in endings if ending in self._after), None)
        if start is None:
            return NO_DRAFT
        drafts: list[int] = []
        for place in range(start, start + n):
            beyond = place - len(tokens)  # there the draft reads itself: a repetition goes on
            drafts.append(tokens[place] if beyond < 0 else drafts[beyond])
        return Draft(drafts)


class _ModelDrafter:
    def __init__(
        self, state: State, chooser: Chooser, n_prompt: int, max_len: int, vocab_sizes: tuple[int, int]
    ) -> None:
        self._state, self._chooser = state, chooser
        self._n_prompt, self._max_len = n_prompt, max_len
        self._known, self._vocab_size = vocab_sizes
        self._held: list[int] = []
        self._sure = 0
        """How many of the held tokens belong to the text; the others were drafts."""

    def propose(self, tokens: Tokens, n: int) -> Draft:
        n = min(n, self._max_len - len(tokens) + 1)  # the last draft is not read by the drafter
        if n < 1 or max(tokens[self._sure :]) >= self._known:
            return NO_DRAFT
        logits = self._catch_up(tokens)
        drawn = isinstance(self._chooser.decoding, Sampling)
        drafts: list[int] = []
        distributions = []
        generated = list(tokens[self._n_prompt :])
        while True:
            if drawn:
                q = self._chooser.distribution(logits, generated)
                distributions.append(q)
                token = chosen(q.cumsum(), self._chooser.uniform(len(generated), DRAFT))
            else:
                token = self._chooser.choose(logits, generated).token
            drafts.append(token)
            generated.append(token)
            if len(drafts) == n:
                return Draft(drafts, distributions if drawn else None)
            logits = self._extend([token])

    def _catch_up(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Forget the drafts that were rejected, and read what is new; the logits after the text."""
        kept = self._sure
        # The text's last token is always read, for its logits.
        while kept < min(len(self._held), len(tokens) - 1) and self._held[kept] == tokens[kept]:
            kept += 1
        if kept < len(self._held):
            self._state.truncate([kept])
            del self._held[kept:]
        self._sure = len(tokens)
        return self._extend(list(tokens[kept:]))

    def _extend(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """The drafter's logits as wide as the model's: tables of one vocabulary are padded to different sizes."""
        logits = self._state.extend([tokens])[0]
        self._held += tokens
        fitted = np.full(self._vocab_size, -np.inf, np.float32)
        fitted[: len(logits)] = logits[: self._vocab_size]
        return fitted


def _check_n(n: int) -> None:
    if n < 1:
        raise GenerationError(f"n: must be 1 or more drafted tokens, got {n}")
