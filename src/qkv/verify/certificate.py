"""The certificate: which paths were compared, how far they lie apart, and where.

Equality is the largest deviation over the largest absolute value of the expected result, on real tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One comparison."""

    path: str
    """What was compared with what."""
    deviation: float | None
    """None where the path was not run; `note` says why."""
    tolerance: float
    where: str = ""
    """Where the largest deviation lies; of a failure, also the first layer that deviates."""
    note: str = ""

    @property
    def verdict(self) -> str:
        """`equal`, `DIFFERS`, or `not run`."""
        if self.deviation is None:
            return "not run"
        return "equal" if self.deviation <= self.tolerance else "DIFFERS"


@dataclass(frozen=True)
class Certificate:
    """All comparisons of one model."""

    model: str
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether every path that was run is equal."""
        return all(row.verdict != "DIFFERS" for row in self.rows)

    def to_json(self) -> str:
        """The certificate as a JSON document."""
        rows: list[dict[str, Any]] = [asdict(row) | {"verdict": row.verdict} for row in self.rows]
        return json.dumps({"model": self.model, "passed": self.passed, "note": self.note, "rows": rows}, indent=2)


def compare(
    path: str,
    expected: Tensor,
    found: Tensor,
    tolerance: float,
    *,
    valid: Tensor | None = None,
    origin: tuple[int, int] = (0, 0),
) -> Row:
    """A row for two results of one shape, (B, T, ...) or (B, n); `valid` (B, T) says which tokens count, `origin` which
    row and position the first one has."""
    gap = (expected.double() - found.double()).abs()
    largest = expected.double().abs()
    if valid is not None and gap.shape[:2] == valid.shape:
        gap, largest = (x * valid.view(*valid.shape, *[1] * (x.ndim - 2)) for x in (gap, largest))
    deviation = float(gap.max() / largest.max().clamp(min=1e-30))
    at = [int(i) for i in (gap == gap.max()).nonzero()[0]] if gap.numel() and gap.isfinite().all() else []
    if not at:
        return Row(path, float("inf"), tolerance, "not finite")
    if not deviation:
        return Row(path, 0.0, tolerance)
    where = f"row {origin[0] + at[0]}" + (f", position {origin[1] + at[1]}" if gap.ndim > 2 else "")
    return Row(path, deviation, tolerance, where)


def worst(rows: Iterable[Row]) -> Row:
    """The row that deviates most."""
    return max(rows, key=lambda row: -1.0 if row.deviation is None else row.deviation)
