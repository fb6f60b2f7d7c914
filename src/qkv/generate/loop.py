"""The loop: several texts grow together as one ragged batch, each by its own rules.

    prefill   the distinct prompts are read once; samples of one prompt share it
    step      one token per row: chosen on the host, then read by the model in one call
    leave     a row that has ended is taken out of the batch: it computes nothing more

    with drafts (`qkv.generate.speculative`) a step reads last token and draft, and takes back what was rejected

A row's tokens depend on its request alone, not on the rows beside it, as far as the runner's logits do. After n tokens
of a text were generated, its state holds all but the last.

A text ends with the reason "stop" when one of its `ends` is drawn, when a stop string is complete, or when its
constraint is satisfied and nothing may follow; with "length" when it has `max_new_tokens`. The token that ended it is
the last of its tokens. An end's text is not shown; of a stop string what `include_stop` says.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qkv.config.decoding import Beam, Greedy, Sampling
from qkv.errors import GenerationError
from qkv.generate.constrain import Constraint
from qkv.generate.prefix import PrefixCache, Room, read, rows_of
from qkv.generate.runner import Logits, Runner, State, Tokens
from qkv.generate.sampling import Choice, Chooser
from qkv.generate.speculative import NO_DRAFT, Acceptance, Draft, Drafter, Speculation, guesses, judge
from qkv.generate.stop import RowText, Spell, stop_strings

FinishReason = Literal["length", "stop"]


@dataclass(frozen=True)
class Request:
    """One text to generate."""

    prompt: Tokens
    max_new_tokens: int = 64
    """The most tokens that are generated; fewer, with a warning, where the model has not the room for them."""
    decoding: Greedy | Sampling = field(default_factory=Greedy)
    ends: frozenset[int] = frozenset()
    """The tokens that end the text, unless the decoding says `ignore_eos`."""
    stop: tuple[str, ...] = ()
    """Strings that end the text, once there are `min_new_tokens`."""
    include_stop: bool = False
    """Whether the stop string that ended the text is part of it."""
    sample: int = 0
    """The number of this text among several of one prompt and seed."""
    constraint: Constraint | None = None
    """What the text must satisfy; a fresh one, which stays as it is."""


@dataclass(frozen=True)
class Event:
    """One token of one text."""

    row: int
    """The number of the request."""
    token: int
    logprob: float
    """The token's log-probability by the model itself, before the decoding changed anything."""
    finish_reason: FinishReason | None = None
    """Why the text ends with this token; None if it goes on."""
    text: str = ""
    """The text that can be shown now: whole characters, and nothing that may be the beginning of a stop string. The
    texts of a row's events are together its text."""
    stop: int | str | None = None
    """The token or the string that ended the text."""


@dataclass(frozen=True)
class Generation:
    """What was generated."""

    text: str
    """The new text, without the prompt."""
    tokens: list[int]
    """The new tokens; one that ended the text is the last."""
    finish_reason: FinishReason
    """Why it ended: `length`, all the tokens that were asked for; `stop`, one of what ends texts (`stop` says what)."""
    logprobs: list[float] = field(default_factory=list)
    """Each token's log-probability by the model itself."""
    stop: int | str | None = None
    """The token or the string that ended it; None for `length`, and for a constraint that was satisfied."""


@dataclass
class Usage:
    """What a batch took."""

    prompt_tokens: int = 0
    """Tokens of distinct prompts."""
    reused_tokens: int = 0
    """Those of them that a prefix cache held."""
    new_tokens: int = 0
    calls: int = 0
    """Calls of the model after the prompts."""
    cache_bytes: int = 0
    """The largest size of the state."""


def decode(
    runner: Runner,
    requests: Sequence[Request],
    *,
    sources: Sequence[Tokens] | None = None,
    spell: Spell | None = None,
    speculative: Speculation | None = None,
    prefix_cache: PrefixCache | None = None,
    usage: Usage | None = None,
) -> Iterator[Event]:
    """The tokens of all requests, step by step, each step's rows in order; refuses impossible requests at once.

    sources: what an encoder-decoder reads, one for each request.
    spell: the text of a row's new tokens; without it, events carry no text.
    speculative: how to draft tokens. prefix_cache: the states of earlier texts. usage: is counted up.

    Nothing is computed before the first event is asked for, nor after the last one was taken.
    """
    limits = [_limit(request, runner, _name(number, requests)) for number, request in enumerate(requests)]
    rows = [
        _Row(number, request, limit, spell)
        for number, (request, limit) in enumerate(zip(requests, limits, strict=True))
    ]
    if sources is not None and len(sources) != len(rows):
        raise GenerationError(f"sources: {len(sources)} for {len(rows)} requests; give one for each")
    if prefix_cache is not None and prefix_cache.runner is not runner:
        raise GenerationError("prefix_cache: it holds states of another runner; give each runner its own")
    if not rows:
        return iter(())
    batch = _Batch(runner, rows, sources, speculative, prefix_cache, Usage() if usage is None else usage)
    return batch.events()


def generate(
    runner: Runner,
    requests: Sequence[Request],
    *,
    sources: Sequence[Tokens] | None = None,
    spell: Spell | None = None,
    speculative: Speculation | None = None,
    prefix_cache: PrefixCache | None = None,
    usage: Usage | None = None,
) -> list[Generation]:
    """What `decode` gives, as one generation per request."""
    events = decode(
        runner,
        requests,
        sources=sources,
        spell=spell,
        speculative=speculative,
        prefix_cache=prefix_cache,
        usage=usage,
    )
    return collected(events, len(requests))


def collected(events: Iterable[Event], n_rows: int) -> list[Generation]:
    """The events of `n_rows` texts that have all ended, text by text."""
    by_row: list[list[Event]] = [[] for _ in range(n_rows)]
    for event in events:
        by_row[event.row].append(event)
    return [_generation(row) for row in by_row]


def _generation(events: Sequence[Event]) -> Generation:
    last = events[-1]
    assert last.finish_reason is not None
    text = "".join(event.text for event in events)
    return Generation(text, [e.token for e in events], last.finish_reason, [e.logprob for e in events], last.stop)


def _name(number: int, requests: Sequence[Request]) -> str:
    """How a message begins that is about one of several requests."""
    return f"request {number}: " if len(requests) > 1 else ""


def _limit(request: Request, runner: Runner, name: str) -> int:
    """How many tokens may be generated; refuses what cannot be served."""
    prompt, wanted, limit = request.prompt, request.max_new_tokens, runner.max_length
    if isinstance(request.decoding, Beam):
        raise GenerationError(f"{name}decoding: Beam follows several texts at once; call beam_search")
    if not len(prompt):
        raise GenerationError(f"{name}prompt: empty; give at least one token to continue")
    if wrong := [token for token in prompt if not 0 <= token < runner.vocab_size]:
        raise GenerationError(f"{name}prompt: token {wrong[0]} is not in the vocabulary, 0 to {runner.vocab_size - 1}")
    if wanted < 1:
        raise GenerationError(f"{name}max_new_tokens: must be 1 or more, got {wanted}")
    if request.decoding.min_new_tokens > wanted:
        raise GenerationError(
            f"{name}min_new_tokens: {request.decoding.min_new_tokens} is more than max_new_tokens = {wanted}"
        )
    if limit is None or len(prompt) + wanted <= limit:
        return wanted
    if len(prompt) >= limit:
        raise GenerationError(
            f"{name}prompt: {len(prompt)} tokens, but the model has {limit} positions for the prompt and what follows; "
            "shorten it"
        )
    room = limit - len(prompt)
    warnings.warn(
        f"{name}max_new_tokens: {room} in place of {wanted}, since the model has {limit} positions and the prompt "
        f"takes {len(prompt)}",
        stacklevel=2,
    )
    return room


class _Row:
    """One text on its way."""

    def __init__(self, number: int, request: Request, limit: int, spell: Spell | None) -> None:
        self.number, self.request, self.limit = number, request, limit
        decoding = request.decoding
        self.ends = frozenset() if decoding.ignore_eos else request.ends
        self.chooser = Chooser(decoding, request.prompt, ends=self.ends, sample=request.sample)
        self._constraint = None if request.constraint is None else request.constraint.fork()
        self._text = RowText(spell, stop_strings(request.stop), request.include_stop, decoding.min_new_tokens)
        self.tokens = list(request.prompt)
        self.generated: list[int] = []
        self.drafter: Drafter | None = None
        self.finished = False

    @property
    def max_len(self) -> int:
        """The longest that the whole text can become."""
        return len(self.request.prompt) + self.limit

    def draft(self, n: int) -> Draft:
        """Guesses at the next tokens; one token always remains to be the model's own."""
        n = min(n, self.limit - len(self.generated) - 1)
        return NO_DRAFT if self.drafter is None or n < 1 else self.drafter.propose(self.tokens, n)

    def grow(self, draft: Draft, logits: Logits, acceptance: Acceptance | None) -> Iterator[Event]:
        """One token from each row of `logits`, as long as the draft before it was right."""
        if acceptance is not None and draft.tokens:
            acceptance.calls += 1
        for guess, scores in zip(guesses(draft), logits, strict=True):
            allowed = None if self._constraint is None else self._constraint.allowed()
            choice = judge(self.chooser, scores, self.generated, allowed, guess)
            if acceptance is not None and guess[0] is not None:
                acceptance.drafted += 1
                acceptance.accepted += choice.token == guess[0]
            yield self._taken(choice)
            if self.finished or choice.token != guess[0]:
                return

    def _taken(self, choice: Choice) -> Event:
        token = choice.token
        self.tokens.append(token)
        self.generated.append(token)
        reason: FinishReason | None = None
        text = ""
        stop: int | str | None = None
        if token in self.ends:
            reason, stop = "stop", token
        else:
            text, stop, reason = self._followed(token)
        if reason is None and len(self.generated) == self.limit:
            reason = "length"
        if reason is not None:
            rest, late = self._text.flush()
            text += rest
            if late is not None:
                reason, stop = "stop", late
        self.finished = reason is not None
        return Event(self.number, token, choice.logprob, reason, text, stop)

    def _followed(self, token: int) -> tuple[str, str | None, FinishReason | None]:
        """What an ordinary token adds to the text, and whether it ends it."""
        text, stop = self._text.feed(token)
        complete = stop is not None
        if self._constraint is not None:
            self._constraint.advance(token)
            complete = complete or self._constraint.finished
        return text, stop, "stop" if complete else None


class _Batch:
    """The rows that are still growing, and the model's memory of them."""

    def __init__(
        self,
        runner: Runner,
        rows: list[_Row],
        sources: Sequence[Tokens] | None,
        speculative: Speculation | None,
        prefix_cache: PrefixCache | None,
        usage: Usage,
    ) -> None:
        self._runner, self._rows, self._sources = runner, rows, sources
        self._speculative, self._prefix_cache, self._usage = speculative, prefix_cache, usage
        self._room = Room(max(row.max_len for row in rows), 0 if speculative is None else speculative.n)

    def events(self) -> Iterator[Event]:
        """Everything, from the first token of the first row on."""
        state, first = self._prefill()
        drafts: Sequence[Draft] = [NO_DRAFT] * len(self._rows)
        logits = [scores[None] for scores in first]
        acceptance = None if self._speculative is None else self._speculative.acceptance
        while True:
            for row, draft, scores in zip(self._rows, drafts, logits, strict=True):
                for event in row.grow(draft, scores, acceptance):
                    self._usage.new_tokens += 1
                    yield event
            self._settle(state)
            if not self._rows:
                return
            drafts = self._drafts()
            logits = self._step(state, drafts)

    def _prefill(self) -> tuple[State, Logits]:
        """Each distinct prompt is read once; then every row gets a copy of its own."""
        sources: Sequence[Tokens] = [()] * len(self._rows) if self._sources is None else self._sources
        keys = [(tuple(row.request.prompt), tuple(source)) for row, source in zip(self._rows, sources, strict=True)]
        distinct = list(dict.fromkeys(keys))
        prompts = [prompt for prompt, _ in distinct]
        read_from = None if self._sources is None else [source for _, source in distinct]
        if self._prefix_cache is None:
            done = read(self._runner, prompts, self._room, read_from)
        else:
            done = self._prefix_cache.prefill(prompts, self._room, read_from)
        self._room = done.room
        order = [distinct.index(key) for key in keys]
        if order != list(range(len(distinct))):
            done.state.select(order)
        self._usage.prompt_tokens += sum(map(len, prompts))
        self._usage.reused_tokens += sum(done.reused)
        self._measure(done.state)
        if self._speculative is not None:
            for row in self._rows:
                row.drafter = self._speculative.drafter(
                    row.request.prompt, row.chooser, row.max_len, self._runner.vocab_size
                )
        return done.state, done.logits[order]

    def _drafts(self) -> list[Draft]:
        n = 0 if self._speculative is None else self._speculative.n
        return [row.draft(n) for row in self._rows]

    def _step(self, state: State, drafts: Sequence[Draft]) -> list[Logits]:
        """Read every row's last token and its draft; the logits after each of them."""
        tokens = [[row.tokens[-1], *draft.tokens] for row, draft in zip(self._rows, drafts, strict=True)]
        drafted = any(draft.tokens for draft in drafts)
        logits = state.extend_all(tokens) if drafted else [scores[None] for scores in state.extend(tokens)]
        self._usage.calls += 1
        self._measure(state)
        return logits

    def _settle(self, state: State) -> None:
        """Take back the drafts that were rejected, and let go of the rows that have ended."""
        lengths = [len(row.tokens) - 1 for row in self._rows]
        if state.lengths != lengths:
            state.truncate(lengths)
        going = [place for place, row in enumerate(self._rows) if not row.finished]
        if len(going) == len(self._rows):
            return
        if self._prefix_cache is not None:
            self._keep(self._prefix_cache, state, [place for place, row in enumerate(self._rows) if row.finished])
        self._rows = [self._rows[place] for place in going]
        if going:
            state.select(going)

    def _keep(self, cache: PrefixCache, state: State, places: Sequence[int]) -> None:
        """The texts that have ended are kept: the next prompt of a conversation begins with one of them."""
        ended = [self._rows[place] for place in places]
        sources = None if self._sources is None else [self._sources[row.number] for row in ended]
        rows = rows_of([row.tokens[:-1] for row in ended], sources)
        if len(ended) == len(self._rows):
            cache.keep(rows, state, self._room, copy=False)
        else:
            cache.keep(rows, state, self._room, places=places)

    def _measure(self, state: State) -> None:
        self._usage.cache_bytes = max(self._usage.cache_bytes, state.nbytes)
