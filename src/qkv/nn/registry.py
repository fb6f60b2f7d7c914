"""Which torch module runs which config class.

`@implements(config.Rotary)` above a module class enters it; `make(config, ...)` builds the module of a config. A rule
of rotary scaling has no tensors: a function implements it. Every file of `qkv.nn` is imported by `qkv.nn`, so that the
table is full whenever anything is built; a user's own module enters through `qkv.register`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from qkv.config import Config
from qkv.errors import ConfigError

Implementation = Callable[..., Any]  # a module class, or the function of a scaling rule
M = TypeVar("M", bound=Implementation)

_IMPLEMENTATIONS: dict[type[Config], Implementation] = {}


def implements(config_class: type[Config]) -> Callable[[M], M]:
    """Enter the decorated class or function as what runs `config_class`."""

    def enter(decorated: M) -> M:
        _IMPLEMENTATIONS[config_class] = decorated
        return decorated

    return enter


def implementation(config_class: type[Config]) -> Implementation:
    """What runs `config_class`."""
    if config_class not in _IMPLEMENTATIONS:
        name = config_class.__name__
        raise ConfigError(f"{name} has no torch module: pass one with qkv.register({name}, module=...)")
    return _IMPLEMENTATIONS[config_class]


def make(config: Config, *args: Any) -> Any:
    """The module that runs `config`, built with it and `args`."""
    return implementation(type(config))(config, *args)
