"""A qkv model for EleutherAI's `lm-eval` (Gao 2021), which brings the tasks and their scores.

    from qkv.evaluate.harness import harness_model
    lm_eval.simple_evaluate(model=harness_model(qkv.load("smollm2-135m")), tasks=["hellaswag"])

What the library asks of a model, and how it is answered:

    loglikelihood           log p(continuation | context), and whether greedy decoding would write it
    loglikelihood_rolling   log p(text): each token once, in windows as long as the model takes, the last one full
    generate_until          a continuation up to a stop string

Texts too long for the model lose their beginning. An empty context is what the tokenizer puts before a text, or else
its end token (as in the library), or else a line break, which is what bytes have.

The library is imported when a model is made: `qkv` does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import Any, Protocol

from qkv.config.decoding import Greedy, Sampling
from qkv.errors import DataError
from qkv.evaluate.perplexity import tokenizer_of
from qkv.evaluate.scoring import Window, check_reader, scored
from qkv.generate import Request, generate
from qkv.model import TextModel
from qkv.text.pieces import PieceTokenizer

_BATCH = 16  # texts that are written together
_NEW_TOKENS = 256  # where a task does not say how many; the library's number


class Instance(Protocol):
    """What the library asks: its arguments are all that counts here."""

    args: tuple[Any, ...]


def harness_model(lm: TextModel, max_length: int | None = None) -> Any:
    """`lm` as a model of the library; `max_length`: the most tokens it reads, by default what it was trained on."""
    try:
        base = import_module("lm_eval.api.model").LM
    except ImportError:
        raise DataError("the harness needs the library lm-eval; install it with: pip install lm-eval") from None
    return type("HarnessModel", (Answers, base), {})(lm, max_length)


class Answers:
    """What the library asks of its class `LM`, which stands beside this one among the bases of a model's class."""

    cache_hook: Any
    """The library's: told of every answer."""

    def __init__(self, lm: TextModel, max_length: int | None = None) -> None:
        super().__init__()
        check_reader(lm.model)
        self.lm, self.tokenizer = lm, tokenizer_of(lm)
        self.max_length = lm.config.max_seq_len if max_length is None else max_length
        self.before = self._before()

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): its log-probability, and whether every token was the likeliest."""
        windows = [self.window(*self.pair(*request.args)) for request in requests]
        answers = [(0.0, True)] * len(windows)
        for found in scored(self.lm.model, windows):
            answers[found.index] = found.logprob, bool(found.likeliest.all())
        self._tell("loglikelihood", requests, answers)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Of each (text,): its log-probability."""
        windows = [(number, window) for number, one in enumerate(requests) for window in self.rolling(one.args[0])]
        answers = [0.0] * len(requests)
        for found in scored(self.lm.model, (window for _, window in windows)):
            answers[windows[found.index][0]] += found.logprob
        self._tell("loglikelihood_rolling", requests, answers)
        return answers

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Of each (context, options): the text that follows, without the stop string that ended it."""
        asked = [self.request(*request.args) for request in requests]
        order = sorted(range(len(asked)), key=lambda i: (asked[i].max_new_tokens, len(asked[i].prompt)))
        answers = [""] * len(asked)
        for _, alike in groupby(order, key=lambda i: asked[i].max_new_tokens):
            numbers = list(alike)
            for start in range(0, len(numbers), _BATCH):
                part = numbers[start : start + _BATCH]
                made = generate(self.lm.runner, [asked[i] for i in part], spell=self._spelled)
                for i, one in zip(part, made, strict=True):
                    answers[i] = one.text
        self._tell("generate_until", requests, answers)
        return answers

    # From texts to tokens

    def encode(self, text: str) -> list[int]:
        """A text with what the tokenizer puts before it, and without what it puts behind."""
        if not isinstance(self.tokenizer, PieceTokenizer):
            return self.tokenizer.encode(text)
        return [*self.tokenizer.around[0], *self.tokenizer.encode(text, add_special=False)]

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of both, encoded as one text; a space between them belongs to the continuation."""
        ends = len(context.rstrip())
        context, continuation = context[:ends], context[ends:] + continuation
        if not context:
            whole = self.encode(continuation)
            led = len(self.tokenizer.around[0]) if isinstance(self.tokenizer, PieceTokenizer) else 0
            return self.before, whole[led:]
        start = len(self.encode(context))
        whole = self.encode(context + continuation)
        return whole[:start], whole[start:]

    def window(self, context: Sequence[int], continuation: Sequence[int]) -> Window:
        """What is read and what is predicted; the beginning of what is too long is cut off."""
        if len(continuation) > self.max_length:
            raise DataError(f"harness: a continuation of {len(continuation)} tokens; the model takes {self.max_length}")
        whole = [*context, *continuation][-(self.max_length + 1) :]
        return Window(whole[:-1] or whole, continuation)

    def rolling(self, text: str) -> Iterator[Window]:
        """Windows of a text in which each token is predicted once; all but the first begin with a token of the text."""
        _, tokens = self.pair("", text)
        done = self.max_length - len(self.before) + 1
        if tokens:
            yield Window([*self.before, *tokens[:done][:-1]], tokens[:done])
        while done < len(tokens):
            stop = min(done + self.max_length, len(tokens))
            yield Window(tokens[stop - self.max_length - 1 : stop - 1], tokens[done:stop])
            done = stop

    def request(self, context: str, options: Mapping[str, Any]) -> Request:
        """What is to be written, by the options that tasks give."""
        until = options.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(until)
        new = int(options.get("max_gen_toks", _NEW_TOKENS))
        room = self.max_length - new
        if room < 1:
            raise DataError(
                f"harness: {new} new tokens leave no room for a context in {self.max_length}; ask for fewer"
            )
        temperature = float(options.get("temperature") or 0.0)
        sampled = bool(options.get("do_sample", temperature > 0)) and temperature > 0
        decoding = Sampling(temperature=temperature) if sampled else Greedy()
        prompt = (self.encode(context) if context else self.before)[-room:]
        ends = self.tokenizer.specials.ends if isinstance(self.tokenizer, PieceTokenizer) else frozenset()
        return Request(prompt, new, decoding, ends, tuple(one for one in stop if one))

    def _before(self) -> list[int]:
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, PieceTokenizer):
            return tokenizer.encode("\n")
        end = tokenizer.specials.bos if tokenizer.specials.eos is None else tokenizer.specials.eos
        return list(tokenizer.around[0]) or ([end] if end is not None else tokenizer.encode("\n"))

    def _spelled(self, tokens: Iterable[int]) -> Iterator[str]:
        if isinstance(self.tokenizer, PieceTokenizer):
            return self.tokenizer.stream(tokens, continues=True)
        return self.tokenizer.stream(tokens)

    def _tell(self, method: str, requests: Sequence[Instance], answers: Sequence[Any]) -> None:
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(method, request.args, answer)
