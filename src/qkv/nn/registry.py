"""Which torch module runs which config class.

`@implements(config.Rotary)` above a module class enters it; `make(config, ...)` builds the module of a config. Every
file of `qkv.nn` is imported by `qkv.nn`, so that the table is full whenever anything is built; a user's own module
enters through `qkv.register`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from qkv.config import Config
from qkv.errors import ConfigError

M = TypeVar("M", bound=type[nn.Module])

_MODULES: dict[type[Config], type[nn.Module]] = {}


def implements(config_class: type[Config]) -> Callable[[M], M]:
    """Enter the decorated module class as the one that runs `config_class`."""

    def enter(module_class: M) -> M:
        _MODULES[config_class] = module_class
        return module_class

    return enter


def implementation(config_class: type[Config]) -> type[nn.Module] | None:
    """The module class that runs `config_class`, or None."""
    return _MODULES.get(config_class)


def make(config: Config, *args: Any) -> Any:
    """The module that runs `config`, built with it and `args`."""
    module_class = implementation(type(config))
    if module_class is None:
        name = type(config).__name__
        raise ConfigError(f"{name} has no torch module: pass one with qkv.register({name}, module=...)")
    return module_class(config, *args)
