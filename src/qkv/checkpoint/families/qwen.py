"""Qwen2, Qwen2.5 and Qwen3: biased projections in Qwen2, normed queries and keys in Qwen3, windows in upper layers.

Qwen2 has windows in the layers from `max_window_layers` on, and only if `use_sliding_window` says so; newer files list
`layer_types` as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.families.llama_like import (
    IGNORED,
    N_LAYERS,
    NORM,
    QK_NORMS,
    RULES,
    SLIDING,
    TIED,
    block,
    heads,
    model,
)
from qkv.checkpoint.layers import FirstThen, Layers
from qkv.checkpoint.template import Family, Json, Key, Keys, Leaf, read
from qkv.errors import CheckpointError

FULL_WORD, SLIDING_WORD = "full_attention", "sliding_attention"
UPPER = FirstThen(N_LAYERS, Key("max_window_layers", 28), FULL_WORD, SLIDING_WORD)


@dataclass(frozen=True)
class WindowedLayers(Leaf):
    """Which layers have a window."""

    def read(self, keys: Keys) -> Any:
        windows = keys.get("use_sliding_window", False) and keys.get("sliding_window", None) is not None
        words = keys.get("layer_types", None)
        if words is None:
            return UPPER.read(keys) if windows else [FULL_WORD] * read(N_LAYERS, keys)
        if SLIDING_WORD in words and not windows:
            raise CheckpointError(f"{keys.name}: layer_types has windows, but use_sliding_window or sliding_window not")
        return words

    def write(self, value: Any, out: Json) -> None:
        out["use_sliding_window"] = SLIDING_WORD in value
        out.setdefault("sliding_window", None)  # written by the layers that have one
        UPPER.write(value, out)
        out["layer_types"] = value


def template(attention: Json) -> Json:
    """A model of these heads, some of them with a window."""
    kinds = {FULL_WORD: block(attention), SLIDING_WORD: block(attention | {"pattern": SLIDING})}
    return model(Layers(N_LAYERS, WindowedLayers(), kinds, NORM))


# They speak of windows, and say nothing where no layer has one.
FREE = ("sliding_window", "max_window_layers")

FAMILIES = (
    Family(
        name="qwen2",
        model_types=("qwen2",),
        architecture="Qwen2ForCausalLM",
        template=template(heads(qkv_bias=True, o_bias=False)),
        rules=RULES,
        must={"use_mrope": False},
        free=FREE,
        ignored=IGNORED,
        tied=TIED,
    ),
    Family(
        name="qwen3",
        model_types=("qwen3",),
        architecture="Qwen3ForCausalLM",
        template=template(
            heads(
                head_dim=Key("head_dim", 128),
                qkv_bias=Key("attention_bias", False),
                o_bias=Key("attention_bias", False),
                qk_norm=NORM,
            )
        ),
        rules=(*RULES, *QK_NORMS),
        free=FREE,
        ignored=IGNORED,
        tied=TIED,
    ),
)
