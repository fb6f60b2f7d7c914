"""A config as an indented tree: `field: value`, a union member by its kind with its fields below it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from qkv.config import Config, Variant


def tree(config: Config, show_all: bool) -> str:
    """The tree's text; without `show_all` fields that have their default value are left out."""
    return "\n".join(_fields(config, show_all, ""))


def _fields(config: Config, show_all: bool, indent: str) -> Iterator[str]:
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        hidden = not show_all and not field.is_required() and value == field.default
        if value is None or hidden or (name == "kind" and isinstance(config, Variant)):
            continue
        yield from _value(f"{indent}{name}:", value, show_all, indent)


def _value(label: str, value: Any, show_all: bool, indent: str) -> Iterator[str]:
    if isinstance(value, Config):
        yield f"{label} {value.kind}" if isinstance(value, Variant) else label
        yield from _fields(value, show_all, f"{indent}  ")
    elif isinstance(value, tuple) and any(isinstance(item, Config) for item in value):
        yield label
        for index, item in enumerate(value):  # numbered as `override` counts them
            yield from _value(f"{indent}  {index}:", item, show_all, f"{indent}  ")
    else:
        yield f"{label} {json.dumps(value)}"
