"""How files are written: small, described, and each thing said once."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from .source import PACKAGE, ROOT, files, relative

FILE_LINES, FUNCTION_LINES, EQUAL_LINES = 450, 70, 30
PYTHON = files(".py")
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PYTHON}
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:{})/".format("|".join(["work", "tmp", "root", "home"])))
"""An absolute path of one machine; the parts stand apart, so that this line is none."""

every_file = pytest.mark.parametrize("path", PYTHON, ids=relative)


def function_problems(tree: ast.AST) -> list[str]:
    """Functions that are too long."""
    lengths = {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return [f"{name} has {length} lines" for name, length in lengths.items() if length > FUNCTION_LINES]


def forbidden_words(tree: ast.AST) -> list[str]:
    """`hasattr` dispatch, and handlers that catch whatever happens."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            found.append(f"line {node.lineno}: hasattr; say what the object is")
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {None if one is None else ast.unparse(one) for one in caught}
            if names & {None, "Exception", "BaseException"}:
                found.append(f"line {node.lineno}: catches everything; name what can go wrong")
    return found


def code_lines(source: str) -> list[str]:
    """The lines that say something to Python, without their indentation."""
    stripped = (line.strip() for line in source.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def shared_passages(sources: dict[str, str], length: int) -> dict[frozenset[str], str]:
    """The groups of files that hold `length` equal consecutive code lines, each with the first of these lines."""
    holders: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name, source in sources.items():
        lines = code_lines(source)
        for start in range(len(lines) - length + 1):
            holders[tuple(lines[start : start + length])].add(name)
    return {frozenset(names): passage[0] for passage, names in holders.items() if len(names) > 1}


@every_file
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines < FILE_LINES, f"{relative(path)} has {lines} lines: split it"
    if lines:
        assert ast.get_docstring(TREES[path]), f"{relative(path)} has no docstring"


@every_file
def test_functions_are_short(path: Path) -> None:
    assert function_problems(TREES[path]) == []


@every_file
def test_no_file_guesses_or_hides_errors(path: Path) -> None:
    assert forbidden_words(TREES[path]) == []


def test_no_two_files_say_the_same() -> None:
    sources = {relative(path): path.read_text(encoding="utf-8") for path in PYTHON}
    assert shared_passages(sources, EQUAL_LINES + 1) == {}


def test_no_file_knows_this_machine() -> None:
    texts = {relative(path): path.read_bytes().decode("utf-8", errors="replace") for path in files()}
    assert len(texts) > len(PYTHON)
    found = {name: match.group() for name, text in texts.items() if (match := MACHINE_PATH.search(text))}
    assert found == {}


def test_every_folder_of_tests_is_a_package() -> None:
    # Two test files of one name can only be told apart by their packages.
    folders = {path.parent for path in PYTHON if path.name.startswith("test_") and path.is_relative_to(ROOT / "tests")}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_package_ships_its_types() -> None:
    assert (PACKAGE / "py.typed").is_file()


# The rules themselves


def test_the_rules_see_what_they_forbid() -> None:
    long = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
    assert function_problems(ast.parse(long)) == [f"f has {FUNCTION_LINES + 1} lines"]
    assert function_problems(ast.parse("def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1))) == []
    for source in ("hasattr(x, 'y')", *(f"try:\n    x\nexcept{what}:\n    y" for what in ("", " Exception"))):
        assert len(forbidden_words(ast.parse(source))) == 1
    assert forbidden_words(ast.parse("try:\n    x\nexcept (KeyError, BaseException):\n    y")) != []
    assert forbidden_words(ast.parse("try:\n    x\nexcept KeyError:\n    y")) == []


def test_a_copied_passage_is_seen_through_comments_and_indentation() -> None:
    first = "\n".join(f"x{i} = {i}" for i in range(40))
    second = "y = 1\nif y:\n" + "\n\n    # why\n".join(f"    x{i} = {i}" for i in range(5, 36))
    assert shared_passages({"a": first, "b": second}, 31) == {frozenset("ab"): "x5 = 5"}
    assert shared_passages({"a": first, "b": second}, 32) == {}


@pytest.mark.parametrize("folder", ["work", "tmp", "root"])
def test_a_machine_path_is_seen(folder: str) -> None:
    path = f"/{folder}/" + "x"
    assert MACHINE_PATH.search(f"open('{path}')")
    assert MACHINE_PATH.search(path)
    assert not MACHINE_PATH.search(f"https://example.org{path}")
    assert not MACHINE_PATH.search(f"tests{path}")
