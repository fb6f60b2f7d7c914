"""Who may import whom: the table of the design, held against every import statement of the package.

A layer names the layers that it may reach; `cache.spec` is that module alone. What stands inside functions counts too:
a lazy import is still a dependency. The native path must start without torch, so the layers below it load none.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

import qkv

from .source import PACKAGE, ROOT, Import, files, imports, module_name, relative

_CONFIG = {"errors", "config"}
_MODEL = _CONFIG | {"cache", "checkpoint", "text", "nn", "generate", "generate.runners", "engine"}
_TO_MODEL = _MODEL | {"model", "extend", "reference", "plan"}

LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "callable": set(),
    "config": {"errors"},
    "reference": _CONFIG,
    "text": _CONFIG,
    "checkpoint": _CONFIG,
    "cache": _CONFIG,
    "plan": _CONFIG | {"cache.spec"},
    "nn": _CONFIG | {"cache"},
    "engine": _CONFIG | {"cache", "checkpoint"},
    "generate": _CONFIG | {"cache", "text", "generate.runners"},
    "generate.runners": _CONFIG | {"cache", "text", "generate", "nn", "engine"},
    "extend": _CONFIG | {"nn", "reference"},
    "model": _MODEL,
    "evaluate": _TO_MODEL,
    "train": _TO_MODEL | {"evaluate", "callable"},
    "verify": _TO_MODEL | {"callable"},
    "lens": _TO_MODEL,
    "lab": _TO_MODEL,
    "serve": _TO_MODEL,
}
LAYERS["cli"] = set(LAYERS)
LAYERS["__main__"] = {"cli"}
"""Only `python -m qkv` names `cli`, and only `cli` names `serve`."""

WITHOUT_TORCH = {"errors", "config", "reference", "plan", "checkpoint", "text", "cache", "generate", "engine"}
MODULES = {module_name(path): path for path in files(".py") if path.is_relative_to(PACKAGE)}
DISTRIBUTIONS = packages_distributions()
INSIDE = sorted(name for name in MODULES if name != "qkv")


def layer(name: str) -> str:
    """The layer of a dotted name below qkv: the longest that the table knows, or else its first part."""
    parts = name.split(".")[1:]
    known = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((candidate for candidate in known if candidate in LAYERS), parts[0] if parts else "")


def home(name: str) -> str:
    """Where a public name is defined: `qkv.preset` is `qkv.config.presets`."""
    first = name.split(".")[1] if "." in name else ""
    return qkv._HOME.get(first, name)


def misplaced(module: str, found: list[Import]) -> list[str]:
    """The imports of a module that the table does not allow."""
    own = layer(module)
    wrong = []
    for one in found:
        if one.name.split(".")[0] != "qkv":
            continue
        target = home(one.name)
        below = target.removeprefix("qkv.")
        reached = {below, layer(target), *(a for a in LAYERS[own] if f"{below}.".startswith(f"{a}."))}
        if own not in reached and not reached & LAYERS[own]:
            wrong.append(f"{module}:{one.line} imports {one.name}, but {own} may reach {sorted(LAYERS[own])} only")
    return wrong


def loads_torch(module: str, found: list[Import]) -> list[str]:
    """The imports by which loading a module of the native path would load torch."""
    loading = [one for one in found if one.when == "loading"]
    torch = [one for one in loading if one.name.split(".")[0] == "torch"]
    above = [one for one in loading if one.name.startswith("qkv") and layer(home(one.name)) not in WITHOUT_TORCH]
    return [f"{module}:{one.line} loads {one.name}: move it into the function that needs it" for one in torch + above]


def imports_of(module: str) -> list[Import]:
    path = MODULES[module]
    return imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")


@pytest.mark.parametrize("module", INSIDE)
def test_a_module_reaches_only_the_layers_below_it(module: str) -> None:
    assert layer(module) in LAYERS, f"{relative(MODULES[module])}: say in LAYERS what {layer(module)} may import"
    assert misplaced(module, imports_of(module)) == []


@pytest.mark.parametrize("module", [name for name in INSIDE if layer(name) in WITHOUT_TORCH])
def test_the_native_path_loads_no_torch(module: str) -> None:
    assert loads_torch(module, imports_of(module)) == []


def test_the_root_loads_nothing_of_the_package() -> None:
    assert [one for one in imports_of("qkv") if one.when == "loading" and one.name.startswith("qkv")] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qkv.config.base", "from qkv.nn import model"),
        ("qkv.config.base", "from qkv import nn"),
        ("qkv.config.base", "import qkv.nn.model"),
        ("qkv.config.base", "import qkv"),
        ("qkv.config.base", "def f():\n    from qkv import reference"),
        ("qkv.config.base", "from ..nn import model"),
        ("qkv.config.base", "from .. import nn"),
        ("qkv.config.base", "import importlib\nimportlib.import_module('qkv.nn')"),
        ("qkv.config.base", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from qkv.nn import model"),
        ("qkv.reference.model", "from qkv.nn.context import Context"),
        ("qkv.nn.model", "from qkv.reference import forward"),
        ("qkv.plan.cache", "from qkv.cache import layout"),
        ("qkv.plan.cache", "from qkv.cache.layout import Layout"),
        ("qkv.plan.bytes", "from qkv.cache import Cache"),
        ("qkv.generate.loop", "from qkv.nn import model"),
        ("qkv.nn.model", "from qkv import TextModel"),
        ("qkv.train.loop", "from qkv.serve import server"),
        ("qkv.serve.server", "from qkv.cli import main"),
        ("qkv.errors", "from qkv.config import ModelConfig"),
    ],
)
def test_the_table_refuses(module: str, source: str) -> None:
    assert misplaced(module, imports(source, module, is_package=False)) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qkv.config.base", "from qkv.errors import ConfigError\nfrom . import norm\nfrom .norm import Norm"),
        ("qkv.nn.model", "from qkv.cache.spec import Streams\nfrom qkv.cache import spec\nfrom qkv import config as c"),
        ("qkv.nn.backends.eager", "from ..context import Context\nimport torch"),
        ("qkv.generate.runners.torch", "def f():\n    from qkv.nn import model"),
        ("qkv.generate.loop", "from qkv.generate.runners import Runner"),
        ("qkv.model", "from qkv.generate.runners.torch import TorchRunner"),
        ("qkv.cli.main", "from qkv.serve import server\nfrom qkv import load"),
    ],
)
def test_the_table_allows(module: str, source: str) -> None:
    assert misplaced(module, imports(source, module, is_package=False)) == []


@pytest.mark.parametrize(
    ("source", "loads"),
    [
        ("import torch", True),
        ("from torch import nn", True),
        ("try:\n    import torch.nn\nexcept ImportError:\n    pass", True),
        ("class A:\n    import torch", True),
        ("from qkv.nn import model", True),
        ("import torchvision", False),
        ("def f():\n    import torch", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\nelse:\n    import torch", True),
    ],
)
def test_torch_is_seen_where_it_is_loaded(source: str, loads: bool) -> None:
    assert bool(loads_torch("qkv.text.bpe", imports(source, "qkv.text.bpe", is_package=False))) == loads


def declared(*extras: str) -> set[str]:
    """The distributions that pyproject.toml asks for, those of some extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    # pydantic is a face of pydantic-core: one version asks for exactly one of the other.
    return {"pydantic-core"} | {plain(re.split(r"[<>=!~ ;]", one)[0]) for one in wanted}


def plain(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_what_a_module_needs_is_declared(module: str) -> None:
    """Loading a module takes runtime dependencies only; a function may use what the extras add."""
    for one in imports_of(module):
        first = one.name.split(".", maxsplit=1)[0]
        if first == "qkv" or first in sys.stdlib_module_names or one.when == "checking":
            continue
        allowed = declared("plot", "peer", "data", "log", "eval", "harness") if one.when == "calling" else declared()
        offered = {plain(name) for name in DISTRIBUTIONS.get(first, [first])}
        assert offered & allowed, f"{module}:{one.line} needs {first}, which pyproject.toml does not ask for"


# The same, measured in a fresh process


def loaded_by(statement: str, *suspects: str) -> list[str]:
    """Which of the suspects a fresh process has loaded after the statement."""
    probe = f"import sys\n{statement}\nprint(*[name for name in {suspects} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split("\n")[-2].split()


@pytest.mark.parametrize(
    ("statement", "suspects"),
    [
        ("import qkv", ("torch", "numpy", "pydantic")),
        ("import qkv; dir(qkv); qkv.ConfigError", ("torch", "numpy", "pydantic")),
        ("import qkv.config, qkv.config.presets", ("torch", "numpy")),
        *(
            (f"import qkv.{name}", ("torch",))
            for name in sorted(WITHOUT_TORCH)
            if importlib.util.find_spec(f"qkv.{name}") is not None
        ),
    ],
)
def test_a_fresh_process_loads_little(statement: str, suspects: tuple[str, ...]) -> None:
    assert loaded_by(statement, *suspects) == []


def test_the_probe_sees_what_is_loaded() -> None:
    assert loaded_by("import qkv.reference", "torch", "numpy") == ["numpy"]


@pytest.mark.parametrize("command", ["qkv.cli"] if "qkv.cli" in MODULES else [])
def test_help_is_shown_without_torch_numpy_or_pydantic(command: str) -> None:
    statement = (
        f"from {command} import main\nsys.argv = ['qkv', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert loaded_by(statement, "torch", "numpy", "pydantic") == []


@pytest.mark.parametrize("name", qkv.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    importlib.import_module(qkv._HOME[name])
    assert getattr(qkv, name) is not None
