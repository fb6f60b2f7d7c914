"""`qkv eval`: how well a model does on held-out data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.decoding import Running, Width, expanded
from qkv.cli.models import AsJson, Model
from qkv.cli.stream import INTERRUPTED, notes, tell
from qkv.errors import DataError

if TYPE_CHECKING:
    from qkv.evaluate.translation import Sentence
    from qkv.model import TextModel

Shown = list[tuple[str, str]]
Progress = Callable[[int], None]


class Task(StrEnum):
    """What is measured."""

    AUTO = "auto"
    PERPLEXITY = "perplexity"
    MASKED = "masked"
    TRANSLATION = "translation"


class Form(StrEnum):
    """What the data is."""

    AUTO = "auto"
    TEXT = "text"
    LINES = "lines"
    JSONL = "jsonl"
    PARALLEL = "parallel"


class Kind(StrEnum):
    """How far back a token may look."""

    DISJOINT = "disjoint"
    SLIDING = "sliding"
    HALF = "half"
    MEMORY = "memory"


@dataclass(frozen=True)
class Files:
    """How the data is read."""

    form: Annotated[
        Form,
        typer.Option(
            "--format", help="text: a file is one text; lines: each line is one; by default what the name says."
        ),
    ] = Form.AUTO
    field: Annotated[
        str | None,
        typer.Option(help="Of jsonl: where the text is. Of parallel: the columns of source and references, as 1,2."),
    ] = None
    separator: Annotated[str | None, typer.Option(help='Of text: lines between texts; "" for blank lines.')] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read only the first so many tokens, or sentences in translation.")
    ] = None

    def texts(self, names: list[str]) -> Iterator[str]:
        """The texts of all files."""
        from qkv.train.data.files import read_lines
        from qkv.train.data.records import Reading, Text

        for name in names:
            form = _form(name) if self.form is Form.AUTO else self.form
            if form is Form.PARALLEL:
                raise DataError(f"{name}: pairs of texts; this task reads single ones: --format text, lines or jsonl")
            if form is Form.LINES:
                yield from (line for _, line in read_lines(name) if line.strip())
                continue
            reading = Reading("jsonl" if form is Form.JSONL else "text", self.field or "text", self.separator)
            for record in reading.records(name):
                assert isinstance(record, Text)
                yield record.text

    def sentences(self, names: list[str]) -> list[Sentence]:
        """The sentences of all files, each with its references."""
        from qkv.evaluate.translation import grouped

        if self.form not in (Form.AUTO, Form.PARALLEL):
            raise DataError(f"--format: translation reads pairs, not {self.form.value}; give --format parallel")
        return grouped(pair for name in names for pair in self._pairs(name))[: self.limit]

    def _pairs(self, name: str) -> Iterator[tuple[str, str]]:
        from qkv.train.data.records import TWO_FILES, Pair, Reading

        source, *targets = name.split(TWO_FILES)
        columns = (self.field or "1,2").split(",")
        if targets:
            asked = [(f"{source}{TWO_FILES}{target}", "1,2") for target in targets]
        else:
            asked = [(name, f"{columns[0]},{column}") for column in columns[1:] or [""]]
        for where, field in asked:
            for record in Reading("parallel", field).records(where):
                assert isinstance(record, Pair)
                yield record.source, record.target


def _form(name: str) -> Form:
    """What a file's name says of it."""
    plain = name.removesuffix(".gz")
    if "::" in name or plain.endswith(".tsv"):
        return Form.PARALLEL
    return Form.JSONL if plain.endswith(".jsonl") or name.startswith("datasets:") else Form.TEXT


@dataclass(frozen=True)
class Windows:
    """What a token may look at."""

    protocol: Annotated[
        Kind | None, typer.Option(help="How far back a token may look; disjoint, or sliding with --stride.")
    ] = None
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window; by default the trained ones, at most 1,024.")
    ] = None
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens from one sliding window to the next.")] = None

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{name}" for name in ("protocol", "context", "stride") if getattr(self, name) is not None]


@dataclass(frozen=True)
class Translating:
    """How sentences are translated and compared."""

    beam: Width = None
    tokenize: Annotated[str, typer.Option(help="BLEU's words: 13a, intl, zh, char or none.")] = "13a"
    split_compounds: Annotated[
        bool, typer.Option("--split-compounds", help="BLEU counts bottom-up as three words, as many papers do.")
    ] = False
    prefix: Annotated[str, typer.Option(help='Put before each source; T5 wants "translate English to German: ".')] = ""
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest translation.")] = 256


@dataclass(frozen=True)
class Filling:
    """How tokens are hidden."""

    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Masked: how many are hidden together.")] = 0.15
    singly: Annotated[int, typer.Option(min=0, help="Masked: how many are hidden one by one.")] = 1000
    seed: Annotated[int, typer.Option(min=0, help="Masked: another seed hides others.")] = 0


@expanded
def command(
    model: Model,
    data: Annotated[
        list[str], typer.Option("--data", metavar="FILE", help="Held-out data; several times for several files.")
    ],
    files: Files,
    windows: Windows,
    filling: Filling,
    translating: Translating,
    running: Running,
    task: Annotated[Task, typer.Option(help="By default what the model is made for.")] = Task.AUTO,
    as_json: AsJson = False,
) -> None:
    """Measure MODEL on held-out data.

    Decoders: perplexity and bits per byte. Masked models: accuracy and pseudo-perplexity. Encoder-decoders: BLEU and
    chrF. Every figure comes with the protocol by which it was found.
    """
    with notes():
        lm = running.load(model)
        chosen = _task(lm) if task is Task.AUTO else task
        try:
            if chosen is Task.TRANSLATION:
                result, shown = _translation(lm, files.sentences(data), windows, translating)
            elif chosen is Task.MASKED:
                result, shown = _masked(lm, files.texts(data), files.limit, windows, filling)
            else:
                result, shown = _perplexity(lm, files.texts(data), files.limit, windows)
        except KeyboardInterrupt:
            tell("qkv: interrupted; nothing was measured")
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps({"model": model, "data": data, "task": chosen.value, **result}, ensure_ascii=False))
    else:
        from qkv.cli.table import aligned

        print(aligned(shown))


def _task(lm: TextModel) -> Task:
    """What the model is made for."""
    if lm.model.encoder is not None and lm.model.decoder is not None:
        return Task.TRANSLATION
    return Task.MASKED if lm.config.head.reads == "both sides" else Task.PERPLEXITY


def _perplexity(
    lm: TextModel, texts: Iterator[str], limit: int | None, windows: Windows
) -> tuple[dict[str, Any], Shown]:
    from qkv.evaluate.perplexity import Protocol, default_context, perplexity_of

    kind = windows.protocol or (Kind.DISJOINT if windows.stride is None else Kind.SLIDING)
    protocol = Protocol(kind.value, windows.context or default_context(lm.model), windows.stride)
    with _bar("tokens") as progress:
        found = perplexity_of(lm, texts, protocol, limit=limit, progress=progress)
    shown = [
        ("perplexity", f"{found.perplexity:.4f}"),
        ("loss", f"{found.loss:.6f} nats per token"),
        ("bits per token", f"{found.bits_per_token:.4f}"),
        ("bits per byte", f"{found.bits_per_byte:.4f}"),
    ]
    if found.word_perplexity is not None:
        shown.append(("word perplexity", f"{found.word_perplexity:.4f}"))
    said = f"{found.tokens:,} tokens, {found.bytes:,} bytes of {_counted(found.texts, 'text')}"
    return found.to_dict(), [*shown, ("counted", said), ("protocol", found.protocol)]


def _masked(
    lm: TextModel, texts: Iterator[str], limit: int | None, windows: Windows, filling: Filling
) -> tuple[dict[str, Any], Shown]:
    from qkv.evaluate.masked import fill_gaps

    if windows.protocol is not None or windows.stride is not None:
        raise DataError("--protocol, --stride: a masked model sees both sides of a token; leave them out")
    with _bar("hidden tokens") as progress:
        found = fill_gaps(
            lm,
            texts,
            share=filling.share,
            seed=filling.seed,
            context=windows.context,
            limit=limit,
            singly=filling.singly,
            progress=progress,
        )
    shown = [("accuracy", f"{found.accuracy:.4f} ({found.right:,} of {found.hidden.tokens:,} hidden tokens)")]
    if found.pseudo is not None:
        shown.append(
            ("pseudo-perplexity", f"{found.pseudo.perplexity:.4f} ({found.pseudo.tokens:,} tokens, one by one)")
        )
    return found.to_dict(), [*shown, ("protocol", found.protocol)]


def _translation(
    lm: TextModel, sentences: list[Sentence], windows: Windows, translating: Translating
) -> tuple[dict[str, Any], Shown]:
    from qkv.config.decoding import Beam
    from qkv.evaluate.translation import translation_quality

    if windows.given:
        raise DataError(f"{windows.given[0]}: sentences are translated whole; leave it out")
    with _bar("sentences", len(sentences)) as progress:
        found = translation_quality(
            lm,
            sentences,
            None if translating.beam is None else Beam(width=translating.beam),
            tokenize=translating.tokenize,
            split_compounds=translating.split_compounds,
            prefix=translating.prefix,
            max_new_tokens=translating.max_new_tokens,
            progress=progress,
        )
    shown = [
        ("BLEU", f"{found.bleu.score:.2f}  {found.bleu.signature}"),
        ("chrF", f"{found.chrf.score:.2f}  {found.chrf.signature}"),
        ("counted", f"{_counted(found.sentences, 'sentence')}, {_counted(found.references, 'reference')}"),
        ("protocol", found.protocol),
    ]
    return found.to_dict(), shown


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


@contextmanager
def _bar(what: str, total: int | None = None) -> Iterator[Progress]:
    """A progress bar on stderr; a file or a pipe gets none."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done)
