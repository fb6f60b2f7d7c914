"""A config whose rotary angles are stretched, so that its model reads texts longer than it was trained on.

stretched(cfg, "yarn:4")       YaRN to four times the trained length
stretched(cfg, "linear:2")     every angle halved
"""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.model import ModelConfig
from qkv.config.position import (
    DynamicNtkScaling,
    LinearScaling,
    NoScaling,
    NtkScaling,
    Rotary,
    RotaryScaling,
    YarnScaling,
)
from qkv.errors import ConfigError

_RULES: dict[str, Callable[[float, int], RotaryScaling]] = {
    "linear": lambda factor, trained: LinearScaling(factor=factor),
    "ntk": lambda factor, trained: NtkScaling(factor=factor),
    "dynamic-ntk": lambda factor, trained: DynamicNtkScaling(factor=factor, original_max_seq_len=trained),
    "yarn": lambda factor, trained: YarnScaling(factor=factor, original_max_seq_len=trained),
}


def stretched(config: ModelConfig, rule: str) -> ModelConfig:
    """`config` with the rule `KIND:FACTOR` for all its rotary positions, and its context made longer by the factor."""
    kind, _, written = rule.partition(":")
    if kind not in _RULES:
        raise ConfigError(f"rope: {rule!r}: choose one of {', '.join(_RULES)} and a factor, as in yarn:4")
    try:
        factor = float(written)
    except ValueError:
        raise ConfigError(f"rope: {rule!r}: give the factor as a number, as in {kind}:4") from None
    if not 1 <= factor < float("inf"):
        raise ConfigError(f"rope: {rule!r}: the factor must be 1 or more, as in {kind}:4")
    scaling = _RULES[kind](factor, config.max_seq_len)
    changes: dict[str, object] = {"max_seq_len": int(config.max_seq_len * factor)}
    for name, stack in config.stacks.items():
        for part, blocks in (("first", stack.first), ("layers", stack.layers)):
            for index, block in enumerate(blocks):
                positions = block.attention.positions
                if not isinstance(positions, Rotary):
                    continue
                if not isinstance(positions.scaling, NoScaling):
                    raise ConfigError(
                        f"rope: {name}.{part}.{index} is stretched already, by {positions.scaling.kind!r}; "
                        "its own rule stays: leave this one out"
                    )
                changes[f"{name}.{part}.{index}.attention.positions.scaling"] = scaling.to_dict()
    if len(changes) == 1:
        raise ConfigError("rope: this model has no rotary positions to stretch; leave it out")
    return config.override(changes)
