"""The repository's own files, and what each of them imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "qkv"
# What git ignores, too: anywhere, and at the root.
_GENERATED = {"__pycache__", "build", "dist"}
_AT_ROOT = {"data", "runs"}
_HIDDEN_BUT_OURS = {".ci", ".gitignore"}


def files(*suffixes: str) -> list[Path]:
    """Every file of the repository with one of these suffixes; without any, every file."""
    return sorted(path for path in _walk(ROOT) if not suffixes or path.suffix in suffixes)


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        hidden = path.name.startswith(".") and path.name not in _HIDDEN_BUT_OURS
        generated = path.name in _GENERATED or (folder == ROOT and path.name in _AT_ROOT)
        if hidden or generated or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def relative(path: Path) -> str:
    """The path as a message names it."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Import:
    """One imported name, as `package.module.name`."""

    name: str
    line: int
    when: str
    """`loading` the module, `calling` a function of it, or `checking` types only."""


def imports(source: str, module: str, is_package: bool) -> list[Import]:
    """Every import of a module, wherever it stands; `importlib.import_module("name")` counts."""
    found: list[Import] = []

    def visit(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = "calling"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, "checking")
            for child in node.orelse:
                visit(child, when)
            return
        found.extend(Import(name, node.lineno, when) for name in _names(node, module, is_package))
        for child in ast.iter_child_nodes(node):
            visit(child, when)

    visit(ast.parse(source), "loading")
    return found


def _names(node: ast.AST, module: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = module.split(".")
        # One dot is the package of the module, each further dot its parent.
        base = base[: len(base) - node.level + is_package] if node.level else []
        start = ".".join([*base, *([node.module] if node.module else [])])
        return [f"{start}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def module_name(path: Path) -> str:
    """`qkv.config.base` for the file of that module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
