"""Packages that are also functions: `qkv.verify(model)` and `from qkv.verify import Certificate`.

Importing a submodule makes it an attribute of its package, so that a function of the same name could never be found
there. The module itself is made callable instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Let the module be called as `function`; it stays a module in every other way."""
    methods = {"__call__": staticmethod(function), "__doc__": function.__doc__}
    sys.modules[module_name].__class__ = type("CallableModule", (ModuleType,), methods)
