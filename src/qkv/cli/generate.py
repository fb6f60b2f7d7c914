"""`qkv generate`: continue texts with a saved model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qkv.cli.decoding import Choosing, Guiding, MaxNewTokens, Running, Stop, expanded
from qkv.cli.models import AsJson, Model
from qkv.cli.stream import INTERRUPTED, Screen, Tally, note_of_length, notes, tell, well_formed, write
from qkv.errors import GenerationError

if TYPE_CHECKING:
    from qkv.config.decoding import Beam, Greedy, Sampling
    from qkv.generate import Generation
    from qkv.generate.constrain import Factory
    from qkv.model import TextModel


@expanded
def command(
    model: Model,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Texts to continue, each by itself.")],
    choosing: Choosing,
    guiding: Guiding,
    running: Running,
    max_new_tokens: MaxNewTokens = 200,
    stop: Stop = None,
    n: Annotated[int, typer.Option("--n", min=1, help="How many continuations of each prompt.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Continue texts with MODEL.

    The text comes as it is written, what it took on stderr. Ctrl-C ends it where it is.
    """
    texts = [well_formed(prompt) for prompt in prompts]
    decoding = choosing.decoding(guiding.beam)
    _check_samples(n, decoding, guiding)
    with notes():
        lm = running.load(model)
        writer = Writer(lm, decoding, max_new_tokens, stop or [], guiding.constraint(lm), guiding.drafter(running))
        if lm.tokenizer is not None:
            note_of_length(lm, max(len(lm.tokenizer.encode(text)) for text in texts), max_new_tokens)
        if as_json:
            writer.print_json(texts, n)
        elif n == 1:
            writer.print_streams(texts, repeat=lm.model.encoder is None)
        else:
            writer.print_samples(texts, n)


def _check_samples(n: int, decoding: Greedy | Sampling | Beam, guiding: Guiding) -> None:
    if n > 1 and decoding.kind != "sampling":
        raise GenerationError(f"--n: {decoding.kind} decoding finds one text; leave --n out, or give a temperature")
    if n > 1 and guiding.draft is not None:
        raise GenerationError("--n: samples are drawn together, without a draft; leave out --n or --draft")


@dataclass(frozen=True)
class Writer:
    """A model, and what is asked of it for every text."""

    lm: TextModel
    decoding: Greedy | Sampling | Beam
    max_new_tokens: int
    stop: list[str]
    constraint: Factory | None = None
    draft: TextModel | Literal["lookup"] | None = None

    def print_streams(self, prompts: list[str], *, repeat: bool) -> None:
        """Each text as it is written, one after another, after its prompt if `repeat`; then the summary."""
        screen = Screen()
        for number, prompt in enumerate(prompts):
            if number and repeat:
                write("\n")
            self.show(screen, prompt, prompt if repeat else "")
            if screen.tally.interrupted:
                break
        finish(screen.tally)

    def show(self, screen: Screen, prompt: str, before: str = "") -> None:
        """One text as it is written."""
        screen.show(lambda: self._pieces(prompt), before)
        screen.tally.add(self.lm.usage)

    def print_samples(self, prompts: list[str], n: int) -> None:
        """Several continuations of each prompt."""
        samples, tally = self._together(prompts, n)
        shown = [f"{prompt}{one.text}\n" for prompt, row in zip(prompts, samples, strict=True) for one in row]
        write("\n".join(shown))
        finish(tally)

    def print_json(self, prompts: list[str], n: int = 1) -> None:
        """Everything that is known of every text."""
        samples, tally = self._together(prompts, n)
        generations: list[dict[str, Any]] = [
            {"prompt": prompt, "sample": sample, **asdict(one)}
            for prompt, row in zip(prompts, samples, strict=True)
            for sample, one in enumerate(row)
        ]
        cost = {"new_tokens": tally.tokens, "seconds": tally.seconds, "cache_bytes": tally.cache_bytes or None}
        print(json.dumps({"generations": generations, "usage": cost}, indent=2))

    def _pieces(self, prompt: str) -> Iterator[str]:
        """The text as it is written; that of a beam search as a whole."""
        from qkv.config.decoding import Beam
        from qkv.generate import Usage

        if not isinstance(self.decoding, Beam):
            yield from self.lm.stream(
                prompt,
                self.max_new_tokens,
                decoding=self.decoding,
                stop=self.stop,
                constraint=self.constraint,
                draft=self.draft,
            )
            return
        (done,) = self._all([prompt])
        self.lm.usage = Usage(new_tokens=len(done.tokens))  # a search counts nothing itself
        yield done.text

    def _all(self, prompts: list[str]) -> list[Generation]:
        return self.lm.generate(
            prompts,
            self.max_new_tokens,
            decoding=self.decoding,
            stop=self.stop,
            constraint=self.constraint,
            draft=self.draft,
        )

    def _together(self, prompts: list[str], n: int) -> tuple[list[list[Generation]], Tally]:
        """`n` continuations of each prompt, as one batch where they can be."""
        from qkv.config.decoding import Sampling

        start, tally = perf_counter(), Tally()
        if n == 1:
            samples = [[one] for one in self._all(prompts)]
            tally.add(self.lm.usage)
        else:
            assert isinstance(self.decoding, Sampling)
            samples = []
            for prompt in prompts:
                samples.append(
                    self.lm.samples(
                        prompt,
                        n,
                        self.max_new_tokens,
                        decoding=self.decoding,
                        stop=self.stop,
                        constraint=self.constraint,
                    )
                )
                tally.add(self.lm.usage)
        tally.seconds = perf_counter() - start
        tally.tokens = sum(len(one.tokens) for row in samples for one in row)
        return samples, tally


def finish(tally: Tally) -> None:
    """The summary line; the program ends if the user ended the text."""
    tell(tally.line())
    if tally.interrupted:
        raise typer.Exit(INTERRUPTED)
