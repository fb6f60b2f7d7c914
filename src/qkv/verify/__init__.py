"""The equivalence certificate: that all paths of a model compute the same, shown for the user's own weights.

    cert = qkv.verify("runs/demo")      # a folder, a preset at toy size, or a model
    cert.passed, cert.rows, cert.to_json()

The oracle (`qkv.reference`, float64, written apart from the model) says what is right; every other path is held against
it or against a path that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path

from qkv.callable import make_callable
from qkv.checkpoint.source import format_of
from qkv.nn import Transformer
from qkv.verify.certificate import Certificate, Row
from qkv.verify.paths import PATHS, Subject
from qkv.verify.peer import peer
from qkv.verify.sample import part_of, truncated

LARGE = 20_000_000  # parameters above which the oracle's patience ends
DEPTH = 2


def verify(model: Transformer | str | PathLike[str], *, on_row: Callable[[Row], None] | None = None) -> Certificate:
    """Compare every path of `model`; a large model is cut to its first layers, and the certificate says so.

    `on_row` is called with each row as it is known, for a progress display.
    """
    name = "model" if isinstance(model, Transformer) else str(model)
    whole = model if isinstance(model, Transformer) else _load(model)
    config, note = whole.config, ""
    if config.n_parameters > LARGE:
        config = truncated(config, DEPTH)
        note = f"checked on the first {DEPTH} layers of each stack: {whole.config.n_parameters:,} parameters are many"
    subject = Subject(config, part_of(whole, config) if note else whole.eval())
    rows: list[Row] = []
    for row in _rows(subject, model, whole):
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return Certificate(name, tuple(rows), note)


def _rows(subject: Subject, model: Transformer | str | PathLike[str], whole: Transformer) -> Iterator[Row]:
    for path in PATHS:
        yield from path(subject)
    folder = None if isinstance(model, Transformer) else Path(model)
    if folder is not None and folder.exists() and format_of(folder) == "hf":
        yield from peer(folder, whole)


def _load(path: str | PathLike[str]) -> Transformer:
    from qkv.config.presets import presets
    from qkv.model import build, load

    if str(path) in presets():
        from qkv.config.presets import preset

        return build(preset(str(path)).toy())
    return load(path).model


make_callable(__name__, verify)

__all__ = ["Certificate", "Row", "verify"]
