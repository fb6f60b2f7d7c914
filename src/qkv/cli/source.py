"""What NAME|PATH on the command line means: a preset, a saved folder, or a config file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import ConfigError

if TYPE_CHECKING:
    from qkv.config import ModelConfig


def config_of(name: str) -> ModelConfig:
    """The config behind a preset's name, a saved model of any format, or a JSON or TOML file."""
    from qkv.checkpoint.source import read_config
    from qkv.config import ModelConfig
    from qkv.config.presets import preset, presets

    path = Path(name)
    if name in presets():
        return preset(name)
    decode = {".json": ModelConfig.from_json, ".toml": ModelConfig.from_toml}.get(path.suffix)
    if decode is not None and path.is_file():
        try:
            return decode(path.read_text(encoding="utf-8"))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    if path.exists() and decode is None:
        return read_config(path)
    if decode is not None or len(path.parts) > 1:
        raise ConfigError(f"{path}: no such folder or config file; `qkv presets` lists the names of models")
    return preset(name)
