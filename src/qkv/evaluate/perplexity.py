"""Perplexity: exp of the mean -log p(token | tokens before it) over the tokens of texts. How much a token may look back
at decides the figure as much as the model does, so that a figure is worth nothing without its protocol:

    disjoint   windows of `context` tokens, end to end; every token from those before it in its window
    sliding    windows of `context` tokens, each `stride` further; of each only the last `stride` tokens count, so that
               every token counts once and has at least context - stride before it, except at the beginning. A stride
               of the whole window is `disjoint`
    half       windows of `context` tokens, end to end; only those of the second half count, and an incomplete window at
               the end is left out: what llama.cpp's `perplexity` does
    memory     the whole text through a cache, piece by piece: every token from everything that the model can see

Texts are scored apart from each other. Tokens that the tokenizer puts in front of a text (BOS) stand in front of every
window, are part of its `context`, and are never predicted; without such tokens nothing predicts a text's first token.

Bits per byte (nats / bytes / ln 2) compare models with unlike vocabularies. Bytes are those of the UTF-8 text whose
tokens are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from qkv.config import Learned
from qkv.errors import DataError
from qkv.evaluate.bits import Score
from qkv.evaluate.scoring import Window, check_reader, evaluating, scored
from qkv.generate.runners.torch import Runtime, TorchRunner
from qkv.model import TextModel
from qkv.nn import Transformer
from qkv.text import ByteTokenizer, Tokenizer
from qkv.text.pieces import PieceTokenizer

Kind = Literal["disjoint", "sliding", "half", "memory"]
KINDS: tuple[Kind, ...] = ("disjoint", "sliding", "half", "memory")
_LONGEST = 1024
"""Tokens per window where nobody says how many: what a model was trained on, but no more than this."""
Codec = Literal["raw", "int8", "int4"]
_PIECE = 256  # tokens that `memory` reads at once

Progress = Callable[[int], None]
"""Is told how many tokens have been scored so far."""


@dataclass(frozen=True)
class Protocol:
    """How far back a token may look, and which tokens count."""

    kind: Kind = "disjoint"
    context: int = _LONGEST
    """Tokens per window; `memory` has none."""
    stride: int | None = None
    """Of `sliding`; by default half a window."""
    skip: int = 0
    """The first tokens of each text are read and not counted: with as many as the longest of several contexts, all
    contexts are asked for the same tokens."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"protocol: {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.context < 2:
            raise DataError(f"context: must be 2 or more, got {self.context}")
        if self.stride is not None and self.kind != "sliding":
            raise DataError(f"stride: protocol {self.kind!r} has none; leave it out, or choose sliding")
        if self.stride is not None and not 1 <= self.stride <= self.context:
            raise DataError(f"stride: must be 1 to context ({self.context}), got {self.stride}")
        if self.skip < 0 or (self.skip and self.kind == "half"):
            raise DataError(f"skip: must be 0 or more, and 0 for half windows, got {self.skip}")

    def __str__(self) -> str:
        said = {
            "disjoint": f"disjoint windows of {self.context} tokens",
            "sliding": f"sliding windows of {self.context} tokens, stride {self.step}",
            "half": f"second halves of windows of {self.context} tokens (llama.cpp)",
            "memory": "whole texts through a cache",
        }[self.kind]
        return said + (f", from token {self.skip} of each text on" if self.skip else "")

    @property
    def step(self) -> int:
        """The stride; disjoint windows are a whole one apart."""
        if self.kind == "sliding":
            return max(1, self.context // 2) if self.stride is None else self.stride
        return self.context

    def first(self, lead: Sequence[int]) -> int:
        """The first token of a text that counts, where `lead` stands before the text."""
        return max(self.skip, 0 if lead else 1)

    def windows(self, text: Sequence[int], lead: Sequence[int] = ()) -> Iterator[tuple[int, Window]]:
        """The windows of a text with `lead` in front of each, and where in the text their targets begin."""
        size = self.context - len(lead)
        if size < 1:
            raise DataError(f"context: {self.context} tokens leave no room beside the {len(lead)} before every text")
        if self.kind == "half":
            for start in range(0, len(text) + len(lead) - self.context + 1, self.context):
                stop = start + size
                begin = stop - (self.context - 1) // 2
                yield begin, Window([*lead, *text[start : stop - 1]], text[begin:stop])
            return
        begin, step = self.first(lead), min(self.step, size)
        stop = max(size + 1, begin + step)
        while begin < len(text):
            start = max(0, stop - 1 - size)
            targets = text[begin:stop]
            yield begin, Window([*lead, *text[start : begin + len(targets) - 1]], targets)
            begin, stop = stop, stop + step


@dataclass(frozen=True)
class Perplexity(Score):
    """The cost of texts, and how it was found."""

    bytes: int
    """Of the predicted tokens' text."""
    words: int | None
    """Parts of the texts between spaces; None if not all of the texts counts."""
    texts: int
    protocol: str
    """In words, with its numbers."""

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the predicted text."""
        return self.nats / self.bytes / math.log(2) if self.bytes else math.nan

    @property
    def word_perplexity(self) -> float | None:
        """exp of the nats per word."""
        return Score(self.nats, self.words).perplexity if self.words else None

    def to_dict(self) -> dict[str, float | str | None]:
        """Everything, for JSON, which has no infinite numbers."""
        names = ("loss", "perplexity", "bits_per_token", "bits_per_byte", "word_perplexity")
        said = {**vars(self), **{name: getattr(self, name) for name in names}}
        return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in said.items()}


def default_context(model: Transformer) -> int:
    """The trained context, but no more than 1,024 tokens."""
    return min(model.config.max_seq_len, _LONGEST)


def perplexity_of(
    lm: TextModel,
    texts: Iterable[str],
    protocol: Protocol | None = None,
    *,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """The perplexity of `texts`, by default in disjoint windows.

    limit: only the first so many tokens of all texts are looked at. progress: is told of the tokens scored so far.
    """
    check_reader(lm.model)
    rule = Protocol(context=default_context(lm.model)) if protocol is None else protocol
    reading = _Reading(tokenizer_of(lm), rule, math.inf if limit is None else limit, lm.runtime.codec)
    _check_room(lm.model, rule)
    nats, count = 0.0, 0
    for logprobs in reading.remembered(lm.model, texts) if rule.kind == "memory" else reading.windowed(lm.model, texts):
        nats, count = nats - float(logprobs.sum()), count + len(logprobs)
        if progress is not None:
            progress(count)
    if not count:
        need = f"a whole window of {rule.context}" if rule.kind == "half" else f"more than {rule.skip or 1}"
        raise DataError(f"data: nothing to predict: no text has {need} tokens; give longer texts")
    return Perplexity(nats, count, reading.bytes, reading.words if reading.whole else None, reading.texts, reading.said)


def tokenizer_of(lm: TextModel) -> Tokenizer:
    """The model's tokenizer; refused where it has none."""
    if lm.tokenizer is None:
        raise DataError("tokenizer: this model was saved without one, so no text can be evaluated; save it with one")
    return lm.tokenizer


def _check_room(model: Transformer, protocol: Protocol) -> None:
    room, learned = model.config.max_seq_len, isinstance(model.config.embedding.positions, Learned)
    if learned and protocol.kind != "memory" and protocol.context > room:
        raise DataError(f"context: {protocol.context} tokens, but the model has {room} positions; choose fewer")


def encoded(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before the text, and the rest: the text, and what it puts behind it."""
    tokens = tokenizer.encode(text)
    before = tokenizer.around[0] if isinstance(tokenizer, PieceTokenizer) else []
    led = len(before) if tokens[: len(before)] == before else 0
    return tokens[:led], tokens[led:]


@dataclass
class _Reading:
    """Texts on their way to the model, and what they amount to."""

    tokenizer: Tokenizer
    protocol: Protocol
    left: float
    """Tokens that may still be looked at."""
    codec: Codec = "raw"
    """How the cache of `memory` stores keys and values."""
    texts: int = 0
    bytes: int = 0
    words: int = 0
    led: int = 0
    """Tokens in front of every window."""
    whole: bool = True
    """Whether every token counted that can be predicted."""

    @property
    def said(self) -> str:
        """The protocol, with what the tokenizer and the cache add to it."""
        codec = f" of {self.codec}" if self.protocol.kind == "memory" and self.codec != "raw" else ""
        led = f", each behind {self.led} of the tokenizer's tokens" if self.led else ""
        return f"{self.protocol}{codec}{led}"

    def windowed(self, model: Transformer, texts: Iterable[str]) -> Iterator[torch.Tensor]:
        """The log-probabilities, window by window."""
        for found in scored(model, self._windows(texts)):
            yield found.logprobs

    def _windows(self, texts: Iterable[str]) -> Iterator[Window]:
        for lead, text, ends in self._encoded(texts):
            for begin, window in self.protocol.windows(text, lead):
                self.bytes += _between(ends, begin, begin + len(window.targets))
                yield window

    def remembered(self, model: Transformer, texts: Iterable[str]) -> Iterator[torch.Tensor]:
        """The same, piece by piece through a cache."""
        runner = TorchRunner(model, model.config.vocab_size, Runtime(deterministic=False, codec=self.codec))
        if runner.reads_prefix:
            raise DataError("protocol: memory would show this model, which sees prefixes whole, what it must predict")
        with evaluating(model):
            for lead, text, ends in self._encoded(texts):
                first = self.protocol.first(lead)
                if len(text) > first:
                    self.bytes += _between(ends, first, len(text))
                    yield from _through_cache(runner, [*lead, *text], len(lead) + first)

    def _encoded(self, texts: Iterable[str]) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Each text as what stands before it, its tokens, and the bytes up to the end of each."""
        for text in texts:
            if self.left < 1:
                self.whole = False
                return
            lead, tokens = encoded(self.tokenizer, text)
            ends = byte_ends(self.tokenizer, tokens)
            self.whole = self.whole and len(tokens) <= self.left and not self.protocol.skip
            if len(tokens) <= self.left and ends:
                ends[-1] = len(text.encode())  # a tokenizer that changes letters has still read these
            tokens = tokens[: int(min(self.left, len(tokens)))]
            self.left -= len(tokens)
            self.whole = self.whole and self.protocol.kind != "half"
            self.texts, self.led, self.words = self.texts + 1, len(lead), self.words + len(text.split())
            yield lead, tokens, ends


def _through_cache(runner: TorchRunner, tokens: list[int], first: int) -> Iterator[torch.Tensor]:
    """The log-probabilities of tokens[first:], each from all before it."""
    if runner.max_length is not None and len(tokens) - 1 > runner.max_length:
        raise DataError(
            f"protocol: memory reads whole texts, but the model has {runner.max_length} positions and a text "
            f"{len(tokens)} tokens; choose disjoint or sliding windows"
        )
    state = runner.start(1, len(tokens))
    for start in range(0, len(tokens) - 1, _PIECE):
        piece = tokens[start : min(start + _PIECE, len(tokens) - 1)]
        logits = torch.from_numpy(state.extend_all([piece])[0])
        wanted = torch.tensor(tokens[start + 1 : start + 1 + len(piece)])
        logprobs = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        yield logprobs[max(0, first - 1 - start) :].double()


def byte_ends(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """How many bytes of text there are up to the end of each token; those of a character count with its last one."""
    if isinstance(tokenizer, ByteTokenizer):
        return list(range(1, len(tokens) + 1))
    ends, written = list[int](), 0

    def fed() -> Iterator[int]:
        for token in tokens:
            yield token
            ends.append(written)  # the next token is asked for when everything before it was given

    for piece in tokenizer.stream(fed()):
        written += len(piece.encode())
    return [*ends[:-1], written] if ends else []


def _between(ends: Sequence[int], start: int, stop: int) -> int:
    return ends[stop - 1] - (ends[start - 1] if start else 0)
