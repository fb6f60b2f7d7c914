"""`qkv bench cache`: what a KV cache saves in time, and what kinds of attention take in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.models import AsJson
from qkv.cli.stream import notes
from qkv.cli.table import aligned
from qkv.errors import DataError

if TYPE_CHECKING:
    from qkv.config import ModelConfig
    from qkv.lab.cache import Exponents, Point, Setting, Timing, Way
    from qkv.lab.cache_memory import Size
    from qkv.nn import Transformer

app = typer.Typer(help="Measure.", no_args_is_help=True, rich_markup_mode=None)

_MOST_PARAMETERS = 2_000_000_000
"""Of a model with random weights: 8 GB in float32."""
_SMALL = "a small Llama"


@app.callback()
def _group() -> None:
    """Measure."""


@app.command("cache")
def cache(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL|PRESET]", help="A saved model or a preset; by default a small one.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Positions to measure; by default doubling up to 2048.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How often all cases take their turn; by default 7, or 3 with --quick.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default as many as it takes.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Measure steps in deterministic mode.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short texts and few rounds.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Only the tables of memory, which need no weights.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a figure: .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a KV cache saves and takes.

    One decode step against its position, with and without a cache; ways to run it; and bytes, by kind of attention.
    A preset gets random weights, which take as long as any.
    """
    positions = None if lengths is None else _positions(lengths)
    if plot is not None:
        from qkv.lab.cache_figure import check

        if memory:
            raise DataError("--plot: draws steps and memory, and --memory measures no steps; leave one of them out")
        check(plot)
    if memory:
        report = Report(model or _SMALL, _config(model))
    else:
        with notes(), _threads(threads) as used:
            built = _model(model)
            report = Report(model or _SMALL, built.config)
            report.measure(built, positions, deterministic, quick, rounds or (3 if quick else 7), used)
    if as_json:
        print(json.dumps(report.described(), indent=2))
    else:
        print(report.text())
    if plot is not None:
        report.draw(plot)


def _positions(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise DataError(f"--lengths: {text!r} is not a list of numbers; write 64,128,256") from None


def _config(name: str | None) -> ModelConfig:
    """The config alone, without torch where the name allows it."""
    if name is None:
        from qkv.lab.cache import small

        return small()
    from qkv.cli.source import config_of

    return config_of(name)


def _model(name: str | None) -> Transformer:
    """A saved model, or one with random weights."""
    from qkv.config.presets import presets
    from qkv.lab.cache import check_config
    from qkv.model import build, load

    if name is not None and name not in presets() and Path(name).suffix not in (".json", ".toml"):
        model = load(name).model
        check_config(model.config)
        return model
    config = _config(name)
    check_config(config)
    if config.n_parameters > _MOST_PARAMETERS:
        count = config.n_parameters
        raise DataError(
            f"{name}: random weights for {count:,} parameters take {count * 4 / 1e9:.0f} GB; "
            "give a saved model, a smaller preset, or --memory"
        )
    return build(config)


@contextmanager
def _threads(wanted: int | None) -> Iterator[int]:
    """Within the block, torch computes with so many threads; how many those are."""
    import torch

    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr once it has taken a second; its tick is called `total` times."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console, start = Console(stderr=True), perf_counter()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("", total=total)

    def tick(what: str) -> None:
        if perf_counter() - start > 1:
            progress.start()  # which does nothing the second time
        progress.update(task, advance=1, description=what)

    try:
        yield tick
    finally:
        progress.stop()


@dataclass(frozen=True)
class Measured:
    """Where and how steps were timed."""

    torch: str
    threads: int
    dtype: str
    deterministic: bool
    rounds: int
    points: list[Point]
    exponents: Exponents
    at: int
    """The position of `ways`."""
    ways: list[Way]


class Report:
    """The tables."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        from qkv.cache.spec import why_not
        from qkv.lab.cache_memory import published, sizes

        if config.decoder is None:
            raise DataError(f"{name}: has no decoder, so that it has no cache; choose a model that generates")
        self.name, self.config = name, config
        own = None if name == _SMALL or why_not(config) is not None else name
        self.sizes: list[Size] = sizes(config, own=own)
        self.published: list[Size] = published()
        self.measured: Measured | None = None

    def measure(
        self,
        model: Transformer,
        positions: tuple[int, ...] | None,
        deterministic: bool,
        quick: bool,
        rounds: int,
        threads: int,
    ) -> None:
        """Time the steps."""
        import torch

        from qkv.lab import cache as lab

        lengths = lab.lengths_for(lab.longest(model), quick) if positions is None else positions
        lab.check(model, lengths)
        at = max([n for n in lengths if n <= lengths[-1] // 4] or [lengths[0]])
        with _progress(lab.visits_of_curve(lengths, rounds) + lab.visits_of_ways(rounds)) as tick:
            points = lab.curve(model, lengths, lab.Setting(deterministic=deterministic), rounds, tick)
            ways = lab.compare(model, at, rounds, tick)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        found = lab.exponents(points)
        self.measured = Measured(torch.__version__, threads, dtype, deterministic, rounds, points, found, at, ways)

    def draw(self, path: Path) -> None:
        """The figure."""
        from qkv.lab.cache_figure import draw

        assert self.measured is not None
        draw(path, self.measured.points, self.measured.exponents, self.sizes)

    def described(self) -> dict[str, Any]:
        """For JSON."""
        steps = {} if self.measured is None else asdict(self.measured)
        sizes = [asdict(size) for size in self.sizes]
        return {"model": self.name, "config": self.config.to_dict(), **steps} | {
            "memory": sizes,
            "published": [asdict(size) for size in self.published],
        }

    def text(self) -> str:
        """For a person."""
        parts = [self._about()]
        if self.measured is not None:
            m = self.measured
            parts += [_curve(m.points), _growth(m.points, m.exponents), _ways(m.ways, m.at)]
        parts.append(
            "Memory of a text's cache in 16 bits, at equal width (bytes; `made` is the size of the arrays)\n\n"
            + _memory(self.sizes)
        )
        parts.append("Memory of published models, planned from their configs (bytes)\n\n" + _memory(self.published))
        return "\n\n".join(parts)

    def _about(self) -> str:
        decoder, config = self.config.decoder, self.config
        assert decoder is not None
        n = decoder.blocks[0].attention.n_heads
        shape = f"{decoder.n_layers} layers, d_model {config.d_model}, {n} heads, {config.n_parameters:,} parameters"
        if self.measured is None:
            return f"{self.name}: {shape}"
        m = self.measured
        mode = "deterministic" if m.deterministic else "not deterministic"
        used = f"torch {m.torch}, {m.threads} thread{'s' * (m.threads > 1)}, {m.dtype}, {mode}"
        return f"{self.name}: {shape}\n{used}; medians of {m.rounds} interleaved rounds"


def _curve(points: Sequence[Point]) -> str:
    rows = [["position", "with, ms", "range", "without, ms", "range", "ratio", "rows with", "rows without"]]
    for p in points:
        own, other = p.cached, p.uncached
        ms = [*_timing(own.step), *_timing(other.step), f"{p.ratio:.1f}"]
        rows.append([f"{p.position:,}", *ms, f"{own.step_rows:,}", f"{other.step_rows:,}"])
    title = "One decode step with a cache and without; rows are tokens that pass through the layers, counted"
    return f"{title}\n\n{_right(rows)}"


def _growth(points: Sequence[Point], found: Exponents) -> str:
    rows = [["steps", "with, s", "without, s", "ratio", "rows with", "rows without", "ratio"]]
    for p in points:
        own, other = p.cached, p.uncached
        seconds = [f"{own.total_ms / 1e3:.3f}", f"{other.total_ms / 1e3:.3f}", f"{other.total_ms / own.total_ms:.1f}"]
        counts = [f"{own.total_rows:,}", f"{other.total_rows:,}", f"{other.total_rows / own.total_rows:.1f}"]
        rows.append([f"{p.position:,}", *seconds, *counts])
    said = (
        f"From {found.first:,} to {found.last:,} tokens a step grows as n^{found.cached_step:.2f} with a cache and as "
        f"n^{found.uncached_step:.2f} without,\n"
        f"all steps so far as n^{found.cached_total:.2f} and n^{found.uncached_total:.2f}; their rows as n and n^2."
    )
    return f"All steps so far, from the first\n\n{_right(rows)}\n\n{said}"


def _ways(ways: Sequence[Way], at: int) -> str:
    """A line for each way, batches side by side."""
    batches = sorted({way.setting.batch for way in ways})
    head = ["deterministic", "codec", "layout"]
    for batch in batches:
        head += [f"batch {batch}, ms", "range", "ratio", "cache bytes"]
    lines: dict[tuple[str, ...], list[str]] = {}
    for way in ways:
        cells = [*_timing(way.step), f"{way.ratio:.2f}", f"{way.cache_bytes:,}"]
        lines.setdefault(_settings(way.setting), []).extend(cells)
    rows = [head, *([*key, *cells] for key, cells in lines.items())]
    table = aligned(rows, right=range(3, len(head)), indent="  ")
    return f"A step with a cache at {at:,}, by how it is run; ratios to the first line\n\n{table}"


def _settings(setting: Setting) -> tuple[str, ...]:
    return "yes" if setting.deterministic else "no", setting.codec, setting.layout


def _timing(timing: Timing) -> tuple[str, str]:
    return f"{timing.median:.2f}", f"{timing.low:.2f}-{timing.high:.2f}"


def _memory(sizes: Sequence[Size]) -> str:
    """Each kind at each context; what is unknown of all is left out."""
    made, share = any(size.made is not None for size in sizes), any(size.share is not None for size in sizes)
    rows = [["", "a token", "context", "planned", *["made"] * made, *["of MHA"] * share, "int8", "int4"]]
    for size in sizes:
        cells = [size.kind, f"{size.token_bytes:,}", f"{size.context:,}", f"{size.planned:,}"]
        if made:
            cells.append("too large" if size.made is None else f"{size.made:,}")
        if size.share is not None:
            cells.append(f"{100 * size.share:.1f} %")
        rows.append([*cells, *(f"{size.coded[codec]:,}" for codec in ("int8", "int4"))])
    return aligned(rows, right=range(1, len(rows[0])), indent="  ")


def _right(rows: Sequence[Sequence[str]]) -> str:
    return aligned(rows, right=range(len(rows[0])), indent="  ")
