"""The paths of generation: batches, reused prefixes, beams and drafts change how a text is computed, and not the text.

alone        = in a ragged batch: the same bits, in deterministic mode
prefix read  = prefix reused
beam search  = the same search by a model that reads every text anew; and scores are those of the texts
greedy       = with drafts, from the text itself, or such as are right and wrong by turns
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from qkv.cache.spec import why_not
from qkv.config.decoding import Beam
from qkv.errors import CacheError, GenerationError
from qkv.generate import (
    Acceptance,
    Chooser,
    Draft,
    Hypothesis,
    Lookup,
    PrefixCache,
    Request,
    Speculation,
    Tokens,
    beam_search,
    generate,
)
from qkv.generate.beam import log_softmax, penalty
from qkv.generate.prefix import Prefilled, Room, read
from qkv.generate.runners.torch import Runtime, TorchRunner
from qkv.verify.certificate import Row, compare, worst
from qkv.verify.forgetful import Forgetful
from qkv.verify.sample import sample
from qkv.verify.subject import FLOAT32, LENGTH, Subject

BATCHED, REUSED = "alone = in a ragged batch, bitwise", "prefix read = prefix reused, float64"
BEAM = "beam search = without a cache, float64"
LOOKED_UP, DRAFTED = "greedy = with lookup drafts", "greedy = with drafts right and wrong"
ALL = (BATCHED, REUSED, BEAM, LOOKED_UP, DRAFTED)

SINGLE = 2.0**-23  # logits leave a runner in float32: two that differ by rounding in float64 may fall apart there
PROMPTS = (1, 7, 12, 17)
STEPS = 5
HALF = LENGTH // 2


@dataclass
class _Given:
    """What the rows are made with."""

    subject: Subject
    runner: TorchRunner
    """float64, and fast."""
    steady: TorchRunner
    """In the model's own number format, deterministic."""
    unsteady: str | None
    """Why rows depend on each other all the same, if the processor's library does not keep the promise."""
    texts: list[list[int]]
    sources: list[list[int]] | None
    """Of different lengths."""

    def source(self, row: int) -> list[list[int]] | None:
        return None if self.sources is None else [self.sources[row]]

    @property
    def repetitive(self) -> list[int]:
        """A prompt in which there is something to look up."""
        return self.texts[0][: HALF // 2] * 2

    @cached_property
    def greedy(self) -> list[tuple[int, float]]:
        """What follows it, without drafts."""
        return self.continued(None)

    def continued(self, speculative: Speculation | None) -> list[tuple[int, float]]:
        """Tokens that follow it and their log-probabilities."""
        runner = self.steady if self.unsteady is None else self.runner
        request = Request(self.repetitive, HALF)
        made = generate(runner, [request], sources=self.source(0), speculative=speculative)[0]
        return list(zip(made.tokens, made.logprobs, strict=True))


def generation(subject: Subject) -> Iterator[Row]:
    """Every way to generate."""
    try:
        given = _given(subject)
    except GenerationError as error:
        reason = why_not(subject.config) or str(error).partition(": ")[2]
        yield from (Row(path, None, 0.0, note=reason) for path in ALL)
        return
    runs: dict[str, Callable[[], Row]] = {
        BATCHED: lambda: _batched(given),
        REUSED: lambda: _reused(given),
        BEAM: lambda: _beam(given),
        LOOKED_UP: lambda: _drafted(given, LOOKED_UP, Lookup()),
        DRAFTED: lambda: _drafted(given, DRAFTED, _Script(given)),
    }
    for path, run in runs.items():
        try:
            yield run()
        except (CacheError, GenerationError) as error:  # nothing is asked here that may be refused
            yield Row(path, float("inf"), 0.0, note=str(error))


def _given(subject: Subject) -> _Given:
    dtype = next(subject.model.parameters()).dtype
    own = subject.fast if dtype == torch.float16 else subject.model  # deterministic mode was not measured in float16
    vocab_size = subject.config.vocab_size
    runner = TorchRunner(subject.exact, vocab_size, Runtime(deterministic=False))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steady = TorchRunner(own, vocab_size, Runtime(deterministic=True))
    unsteady = next((str(one.message) for one in said if str(one.message).startswith("deterministic")), None)
    drawn = sample(subject.config, len(PROMPTS), LENGTH, seed=1)
    sources = None
    if "source" in drawn.more:
        sources = [row[: LENGTH - 5 * number] for number, row in enumerate(drawn.more["source"].tolist())]
    return _Given(subject, runner, steady, unsteady, drawn.tokens.tolist(), sources)


# --- batches


def _batched(given: _Given) -> Row:
    """Prompts of different lengths and some tokens more, together; and each alone, its prompt in two pieces."""
    tolerance = 0.0 if given.unsteady is None else given.subject.bound(next(given.steady.model.parameters()).dtype)
    together = _logits(given, range(len(PROMPTS)), in_pieces=False)
    rows = []
    for row, length in enumerate(PROMPTS):
        alone = _logits(given, [row], in_pieces=True)
        rows.append(compare(BATCHED, alone, together[row : row + 1], tolerance, origin=(row, length - 1)))
    return replace(worst(rows), note=given.unsteady or "")


def _logits(given: _Given, rows: Sequence[int], in_pieces: bool) -> Tensor:
    """(rows, STEPS + 1, V): after the prompt of each row, and after each of its next tokens."""
    runner = given.steady
    sources = None if given.sources is None else [given.sources[row] for row in rows]
    state = runner.start(len(rows), LENGTH, sources=sources)
    prompts = [given.texts[row][: PROMPTS[row]] for row in rows]
    first = min(map(len, prompts)) // 2 if in_pieces and not runner.one_reading else 0
    if first:
        state.extend([prompt[:first] for prompt in prompts])
    found = [state.extend([prompt[first:] for prompt in prompts])]
    for step in range(STEPS):
        found.append(state.extend([[given.texts[row][PROMPTS[row] + step]] for row in rows]))
    return torch.from_numpy(np.stack(found, 1))


# --- prefixes


def _reused(given: _Given) -> Row:
    """A prompt whose first half an earlier one had, and what follows it."""
    if given.runner.reads_prefix:
        return Row(REUSED, None, SINGLE, note="this model reads a prompt both ways: nothing of it is reused")
    first, other = given.texts[0], given.texts[1]
    prompt, following = [*first[:HALF], *other[HALF:-STEPS]], other[-STEPS:]
    room, source = Room(LENGTH, 0), given.source(0)
    prefixes = PrefixCache(given.runner, max_bytes=2**40)
    prefixes.prefill([first], room, source)
    hit = prefixes.prefill([prompt], room, source)
    miss = read(given.runner, [prompt], room, source)
    expected, found = (_continued(one, following) for one in (miss, hit))
    row = compare(REUSED, expected, found, SINGLE, origin=(0, len(prompt) - 1))
    if not hit.reused[0]:
        return replace(row, deviation=float("inf"), where="", note="nothing was reused")
    return replace(row, note=f"{hit.reused[0]} tokens reused")


def _continued(prefilled: Prefilled, tokens: Tokens) -> Tensor:
    """(1, n + 1, V): after the prompt, and after each of the tokens."""
    found = [prefilled.logits, *(prefilled.state.extend([[token]]) for token in tokens)]
    return torch.from_numpy(np.stack(found, 1))


# --- beams


def _beam(given: _Given) -> Row:
    """The hypotheses' scores, against those of a search without a cache, and those that their tokens have."""
    prompt, source = given.texts[0][:HALF], given.source(0)
    forgetful = Forgetful(given.subject.exact)
    beam = Beam(width=4)
    found, again = (
        beam_search(runner, prompt, beam, max_new_tokens=HALF, source=None if source is None else source[0])
        for runner in (given.runner, forgetful)
    )
    score = np.array([one.score for one in found])
    expected = np.array([one.score for one in again])
    if len(score) != len(expected):
        return Row(BEAM, float("inf"), FLOAT32, f"{len(score)} hypotheses in place of {len(expected)}")
    own = _scores(forgetful, prompt, source, found, beam)
    gap = np.maximum(abs(score - expected), abs(score - own)) / max(1.0, abs(expected).max())
    return Row(BEAM, float(gap.max()), FLOAT32, f"hypothesis {int(gap.argmax())}" if gap.any() else "")


def _scores(
    forgetful: Forgetful, prompt: Tokens, source: list[list[int]] | None, found: list[Hypothesis], beam: Beam
) -> np.ndarray:
    """What the model says of these texts, which are equally long."""
    state = forgetful.start(1, LENGTH, sources=source)
    logits = state.extend([prompt])
    state.select([0] * len(found))
    logits = logits[[0] * len(found)]
    total = np.zeros(len(found))
    for step, tokens in enumerate(zip(*(one.tokens for one in found), strict=True)):
        total += log_softmax(logits)[range(len(found)), tokens]
        if step + 1 < len(found[0].tokens):
            logits = state.extend([[token] for token in tokens])
    return np.asarray(total / penalty(len(found[0].tokens), beam.length_penalty))


# --- drafts


@dataclass
class _Script:
    """Drafts from the text that greedy decoding gives, of which every third token is falsified.

    Long and short by turns, so that a short one does not cover all that a rejected long one leaves.
    """

    given: _Given
    n: int = 6
    acceptance: Acceptance = field(default_factory=Acceptance)
    _text: list[int] = field(default_factory=list)

    def drafter(self, prompt: Tokens, chooser: Chooser, max_len: int, vocab_size: int) -> _Script:
        answer = [*prompt, *(token for token, _ in self.given.greedy)]
        self._text = [token if at % 3 else (token + 1) % vocab_size for at, token in enumerate(answer)]
        return self

    def propose(self, tokens: Tokens, n: int) -> Draft:
        return Draft(self._text[len(tokens) :][: 1 if len(tokens) % 2 else n])


def _drafted(given: _Given, path: str, speculation: Lookup | _Script) -> Row:
    """The same tokens with the same log-probabilities, however they were drafted."""
    found, done = given.continued(speculation), speculation.acceptance
    tolerance = 0.0 if given.unsteady is None else SINGLE
    row = _same_texts(path, given.greedy, found, tolerance, len(given.repetitive))
    return replace(row, note=f"{done.accepted} of {done.drafted} drafts accepted")


def _same_texts(
    path: str, expected: list[tuple[int, float]], found: list[tuple[int, float]], tolerance: float, start: int
) -> Row:
    """Log-probabilities that differ; or, if tokens do, the share of those."""
    tokens = [a[0] != b[0] for a, b in zip(expected, found, strict=True)]
    if any(tokens):
        where = f"first token at position {start + tokens.index(True)}"
        return Row(path, sum(tokens) / len(tokens), 0.0, where)
    logprobs = torch.tensor([[[one[1]] for one in text] for text in (expected, found)], dtype=torch.float64)
    return compare(path, logprobs[:1], logprobs[1:], tolerance, origin=(0, start))
