"""The ledger names every row, only tests that exist, and no debt that is paid."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from .ledger import PARTS, TABLES, Row, rows

TESTS = Path(__file__).resolve().parents[1]
ROWS = rows()


def functions(file: Path) -> set[str]:
    """The tests that a file defines; nothing is imported."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


FOUND = {str(file.relative_to(TESTS)): functions(file) for file in sorted(TESTS.rglob("test_*.py"))}


def in_words(row: Row) -> str:
    return f"{row.table}: {row.name}"


def slug(name: str) -> str:
    """How a test of the row would begin: `KV cache` -> `test_kv_cache`."""
    return "test_" + re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def test_every_row_is_shown_or_owed():
    assert [in_words(row) for row in ROWS if not row.shown and not row.owed] == []


def test_every_test_that_a_row_names_exists():
    missing = [(in_words(r), node) for r in ROWS for node in r.shown if node[1] not in FOUND.get(node[0], set())]
    assert missing == []


def test_every_part_that_owes_something_is_known():
    assert [(in_words(row), part) for row in ROWS for part in row.owed if part not in PARTS] == []


def test_no_row_names_anything_twice():
    twice = [in_words(row) for row in ROWS if max(Counter((*row.shown, *row.owed)).values(), default=0) > 1]
    assert twice == []


def test_no_debt_is_paid_already():
    """A part that owes a row has no test among those that the row names; a row that nothing shows yet has no test that
    is named after it, anywhere: whoever writes it moves the row.
    """
    paid = [
        (in_words(r), part)
        for r in ROWS
        for part in r.owed
        for file, _ in r.shown
        if file.startswith(f"{PARTS[part]}/")
    ]
    everywhere = [(file, name) for file, names in FOUND.items() for name in names]
    paid += [
        (in_words(row), f"{file}::{name}")
        for row in ROWS
        if not row.shown
        for file, name in everywhere
        if name == slug(row.name) or name.startswith(f"{slug(row.name)}_")
    ]
    assert paid == []


def test_every_test_of_this_folder_belongs_to_a_row():
    """By its own name, or as a continuation of a name that a row has."""
    named = tuple(name for row in ROWS for _, name in row.shown)
    others = FOUND.keys() - {"facts/test_ledger.py"}
    ours = {name for file in others if file.startswith("facts/") for name in FOUND[file]}
    assert sorted(name for name in ours if not name.startswith(named)) == []


# --- Against the lists themselves, which are not in the repository ----------------------------------------------------


def listed(data: Path, name: str) -> str:
    file = data / name
    if not file.is_file():
        pytest.skip(f"{name} is not below QKV_DATA")
    return file.read_text(encoding="utf-8")


def first_cells(text: str, start: str, stop: str) -> list[str]:
    """The first column of the table between two headings, without marks and without the text that a row belongs to."""
    part = text[text.index(start) : text.index(stop) if stop else len(text)]
    cells = [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("|")]
    plain = [re.sub(r" \(S[01](,S[01])?\)$", "", cell.replace("**", "")) for cell in cells]
    return [cell for cell in plain[1:] if not set(cell) <= set("-")]


@pytest.mark.data
def test_the_ledger_has_every_row_of_the_facts(data: Path):
    text = listed(data, "FACTS.md")
    assert first_cells(text, "## 1.1", "### Further counts") == list(TABLES["models"])
    assert first_cells(text, "### Further counts", "## 1.2") == list(TABLES["counts"])
    assert first_cells(text, "## 1.2", "") == list(TABLES["methods"])


@pytest.mark.data
def test_the_ledger_has_every_entry_of_the_errata(data: Path):
    text = listed(data, "ERRATA.md")
    assert re.findall(r"^\| (E\d\d) \|", text, re.MULTILINE) == list(TABLES["errata"])
    right = text[text.index("**Verified right") :].partition(":")[2].strip().removesuffix(".")
    assert [item.strip() for item in right.split(";")] == list(TABLES["verified"])


@pytest.mark.data
def test_the_ledger_has_every_bug(data: Path):
    text = listed(data, "BUGS.md")
    assert re.findall(r"^\| (B\d+) \|", text, re.MULTILINE) == list(TABLES["bugs"])


@pytest.mark.data
def test_every_computed_erratum_is_shown_or_owed_to_a_part_without_tests_yet(data: Path):
    """Entries that carry a computed figure have a test now, unless caches, training or planning must come first."""
    text = listed(data, "ERRATA.md")
    computed = set(re.findall(r"^\| (E\d\d) \|.*\[C", text, re.MULTILINE))
    owing = {row.name for row in ROWS if row.table == "errata" and not row.shown}
    assert computed & owing == set()
