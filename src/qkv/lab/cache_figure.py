"""The figure of the cache experiment: a step against its position, and bytes against the context; both axes double."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import DataError
from qkv.lab.cache import Exponents, Point
from qkv.lab.cache_memory import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")


def check(path: Path) -> None:
    """Refuse what could not be drawn or written, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise DataError(f"{path}: a figure is a .png or .svg file; give such a name")
    if path.exists():
        raise DataError(f"{path}: exists already; give a new name")
    if not path.parent.is_dir():
        raise DataError(f"{path}: its folder does not exist; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise DataError(f"{path}: drawing needs matplotlib; run pip install 'qkv[plot]', or leave --plot out")


def draw(path: Path, points: Sequence[Point], found: Exponents, sizes: Sequence[Size]) -> None:
    """Write the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _steps(left, points, found)
    _memory(right, sizes)
    figure.savefig(path, dpi=150)


def _steps(axes: Axes, points: Sequence[Point], found: Exponents) -> None:
    positions = [point.position for point in points]
    for label, sides, slope, marker in (
        ("without a cache", [point.uncached for point in points], found.uncached_step, "s"),
        ("with a cache", [point.cached for point in points], found.cached_step, "o"),
    ):
        steps = [side.step for side in sides]
        (line,) = axes.plot(
            positions, [step.median for step in steps], marker=marker, label=f"{label}: n^{slope:.2f} at the end"
        )
        axes.fill_between(
            positions, [step.low for step in steps], [step.high for step in steps], color=line.get_color(), alpha=0.2
        )
    axes.set(title="One decode step", xlabel="position n", ylabel="milliseconds", yscale="log")
    _doubling(axes, positions)


def _memory(axes: Axes, sizes: Sequence[Size]) -> None:
    markers = iter("o^vDsxP")
    for kind in dict.fromkeys(size.kind for size in sizes):
        own = [size for size in sizes if size.kind == kind]
        axes.plot(
            [size.context for size in own], [size.planned / 2**20 for size in own], marker=next(markers), label=kind
        )
    axes.set(title="KV cache of one text, 16 bits", xlabel="context", ylabel="MiB", yscale="log")
    _doubling(axes, sorted({size.context for size in sizes}))


def _doubling(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
