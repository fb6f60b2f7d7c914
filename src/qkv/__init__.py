"""qkv: one Transformer from which every Transformer is made.

The public names below are imported when first used: `import qkv` itself loads neither torch, NumPy nor pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BackendError": "qkv.errors",
    "CacheError": "qkv.errors",
    "CheckpointError": "qkv.errors",
    "ConfigError": "qkv.errors",
    "DataError": "qkv.errors",
    "GenerationError": "qkv.errors",
    "TrainingError": "qkv.errors",
    "QkvError": "qkv.errors",
    "ModelConfig": "qkv.config",
    "config": "qkv.config",
    "register": "qkv.extend",
    "preset": "qkv.config.presets",
    "presets": "qkv.config.presets",
    "reference": "qkv.reference",
    "Cache": "qkv.cache.cache",
    "Greedy": "qkv.config.decoding",
    "Sampling": "qkv.config.decoding",
    "Beam": "qkv.config.decoding",
    "Recipe": "qkv.config.recipe",
    "Runtime": "qkv.generate.runners.torch",
    "build": "qkv.model",
    "load": "qkv.model",
    "TextModel": "qkv.model",
    "capture": "qkv.nn.capture",
    "train": "qkv.train",
    "verify": "qkv.verify",
}

__all__ = [
    "BackendError",
    "Beam",
    "Cache",
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "GenerationError",
    "Greedy",
    "ModelConfig",
    "QkvError",
    "Recipe",
    "Runtime",
    "Sampling",
    "TextModel",
    "TrainingError",
    "build",
    "capture",
    "config",
    "load",
    "preset",
    "presets",
    "reference",
    "register",
    "train",
    "verify",
]

if TYPE_CHECKING:
    from qkv import config, reference
    from qkv import train as train
    from qkv import verify as verify
    from qkv.cache.cache import Cache
    from qkv.config import ModelConfig
    from qkv.config.decoding import Beam, Greedy, Sampling
    from qkv.config.presets import preset, presets
    from qkv.config.recipe import Recipe
    from qkv.errors import (
        BackendError,
        CacheError,
        CheckpointError,
        ConfigError,
        DataError,
        GenerationError,
        QkvError,
        TrainingError,
    )
    from qkv.extend import register
    from qkv.generate.runners.torch import Runtime
    from qkv.model import TextModel, build, load
    from qkv.nn.capture import capture


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qkv' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = importlib.import_module(_HOME[name])
    return module if module.__name__ == f"qkv.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
