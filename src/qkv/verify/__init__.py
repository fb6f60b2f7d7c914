"""The equivalence certificate: that all paths of a model compute the same, shown for the user's own weights.

    cert = qkv.verify("runs/demo")      # a folder, a pulled model, a preset at toy size, or a model
    cert.passed, cert.rows, cert.to_json()

The oracle (`qkv.reference`, float64, written apart from the model) says what is right; every other path is held against
it or against a path that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path

from qkv.callable import make_callable
from qkv.checkpoint.pull import pulled
from qkv.checkpoint.source import format_of
from qkv.config.presets import preset, presets
from qkv.nn import Transformer
from qkv.verify.cached import caches
from qkv.verify.certificate import Certificate, Row
from qkv.verify.generated import generation
from qkv.verify.native import native_engine
from qkv.verify.paths import backends, batching, compiled, oracle, precision, saving
from qkv.verify.peer import peer
from qkv.verify.rounded import rounded_weights
from qkv.verify.sample import part_of, truncated
from qkv.verify.subject import Subject

PATHS: tuple[Callable[[Subject], Iterator[Row]], ...] = (
    oracle,
    backends,
    precision,
    rounded_weights,
    batching,
    caches,
    generation,
    native_engine,
    compiled,
    saving,
)
LARGE = 20_000_000  # parameters above which the oracle's patience ends
DEPTH = 2


def verify(model: Transformer | str | PathLike[str], *, on_row: Callable[[Row], None] | None = None) -> Certificate:
    """Compare every path of `model`; a large model is cut to its first layers, and the certificate says so.

    `on_row` is called with each row as it is known, for a progress display.
    """
    name = "model" if isinstance(model, Transformer) else str(model)
    whole = model if isinstance(model, Transformer) else _load(model)
    config, notes = whole.config, []
    if not isinstance(model, Transformer) and _is_preset(model):
        notes.append("a preset, checked at toy size with fresh weights: give a folder to check a model's own")
    if config.n_parameters > LARGE:
        config = truncated(config, DEPTH)
        notes.append(
            f"checked on the first {DEPTH} layers of each stack: {whole.config.n_parameters:,} parameters are many"
        )
    subject = Subject(config, whole.eval() if config is whole.config else part_of(whole, config))
    rows: list[Row] = []
    for row in _rows(subject, model, whole):
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return Certificate(name, tuple(rows), "; ".join(notes))


def _rows(subject: Subject, model: Transformer | str | PathLike[str], whole: Transformer) -> Iterator[Row]:
    for path in PATHS:
        yield from path(subject)
    folder = None if isinstance(model, Transformer) else _place(model)
    if folder is not None and format_of(folder) == "hf":
        yield from peer(folder, whole)


def _load(path: str | PathLike[str]) -> Transformer:
    from qkv.model import build, load

    return build(preset(str(path)).toy()) if _is_preset(path) else load(path).model


def _is_preset(path: str | PathLike[str]) -> bool:
    """Whether nothing but a preset has this name: a model that was pulled goes before it."""
    return _place(path) is None and str(path) in presets()


def _place(path: str | PathLike[str]) -> Path | None:
    """What is on the disk under this name."""
    return Path(path) if Path(path).exists() else pulled(str(path))


make_callable(__name__, verify)

__all__ = ["Certificate", "Row", "verify"]
