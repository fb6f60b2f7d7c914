"""`qkv verify`: the equivalence certificate of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qkv.verify import Row


def command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A saved or pulled model, or a preset (at toy size)."),
    ],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the certificate here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Show that all paths of MODEL compute the same: oracle, backends, precisions, batches, caches, generation, saved.

    Exits with 1 if any path differs.
    """
    from rich.console import Console

    from qkv.verify import verify

    console = Console(stderr=as_json)
    with console.status("comparing paths") as status:

        def show(row: Row) -> None:
            console.print(_line(row), highlight=False, markup=False, soft_wrap=True)
            status.update("comparing paths")

        certificate = verify(model, on_row=show)
    if certificate.note:
        console.print(certificate.note, highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        out.write_text(certificate.to_json() + "\n", encoding="utf-8")
    if as_json:
        print(certificate.to_json())
    console.print("passed: every path that ran is equal" if certificate.passed else "FAILED: a path differs")
    if not certificate.passed:
        sys.exit(1)


def _line(row: Row) -> str:
    if row.deviation is None:
        return f"{row.path:42} {'':9}  {'':9}  not run  {row.note}"
    said = "; ".join(part for part in (row.where, row.note) if part)
    return f"{row.path:42} {row.deviation:9.2e}  {row.tolerance:9.2e}  {row.verdict:7}  {said}".rstrip()
