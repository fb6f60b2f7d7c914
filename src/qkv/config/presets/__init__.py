"""Published models as data: `preset(name)` is a model's architecture, from its paper or its released configuration.

Conventions, the same in every family:

- A comment above each table names its source; what the source leaves open is said beside the choice.
- `max_seq_len` is the context that the model was trained for. Files called `config.json` often allow more positions.
- Dropout is that of the published training run, or else of the released configuration.
- A language model carries its language-model head, a BERT-like encoder the head that its released weights count.

The names are known without building a config; a config is built, and checked as a whole, when it is asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from qkv.config.model import ModelConfig
from qkv.config.presets import (
    bert,
    bloom,
    chatglm,
    deepseek,
    gemma,
    gpt,
    llama,
    mistral,
    palm,
    qwen,
    smollm,
    t5,
    transformer,
    transformer_xl,
    yi,
)
from qkv.errors import ConfigError

_MODELS: dict[str, Callable[[], ModelConfig]] = {
    **transformer.MODELS,
    **bert.MODELS,
    **gpt.MODELS,
    **t5.MODELS,
    **transformer_xl.MODELS,
    **llama.MODELS,
    **mistral.MODELS,
    **qwen.MODELS,
    **chatglm.MODELS,
    **deepseek.MODELS,
    **yi.MODELS,
    **bloom.MODELS,
    **palm.MODELS,
    **smollm.MODELS,
    **gemma.MODELS,
}


def presets() -> tuple[str, ...]:
    """The names of all published models that qkv knows."""
    return tuple(_MODELS)


def preset(name: str) -> ModelConfig:
    """The architecture of a published model. Raises ConfigError, with the nearest names, if there is no such preset."""
    if name not in _MODELS:
        close = difflib.get_close_matches(name.lower(), _MODELS, n=3)
        remedy = f"did you mean {' or '.join(map(repr, close))}?" if close else "qkv.presets() lists the names"
        raise ConfigError(f"unknown preset {name!r}; {remedy}")
    return _MODELS[name]()
