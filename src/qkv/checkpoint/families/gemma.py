"""Gemma 1, 2 and 3 (text): a scaled token table that is the head too, heads wider than the model, 1 + weight norms.

Gemma 2 adds norms behind the sublayers, windows in every other layer, and softcaps; Gemma 3 drops the softcaps, norms
queries and keys, and has five local layers to one global, each kind with a theta of its own. Of Gemma 3's models that
read images as well, the text model is read; what remains is saved as Gemma 3's text model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.families.common import ACTIVATIONS, LLAMA_FRAME, LLAMA_LAYER
from qkv.checkpoint.families.llama_like import (
    IGNORED,
    N_LAYERS,
    QK_NORMS,
    RULES,
    SLIDING,
    TIED,
    OrNull,
    block,
    gated,
    heads,
    model,
    uniform,
)
from qkv.checkpoint.layers import Every, Layers
from qkv.checkpoint.rope import Rope
from qkv.checkpoint.rules import Ignored, Rule, Spelling
from qkv.checkpoint.template import Family, Json, Key, Keys, Leaf
from qkv.errors import CheckpointError

LOCAL, GLOBAL = "sliding_attention", "full_attention"
NORM = {"kind": "rmsnorm", "eps": Key("rms_norm_eps", 1e-6), "unit_offset": True, "cast": "after"}
TANH_FIRST = {"gelu_pytorch_tanh": "gelu-tanh", **ACTIVATIONS}
"""The name that these files use is the one that is written."""
HIDDEN_ACT = Key("hidden_act", "gelu-tanh", TANH_FIRST | {"gelu": "gelu-tanh"})


@dataclass(frozen=True)
class Gemma1Activation(Leaf):
    """`hidden_activation`, or else `hidden_act`, where the first files say `gelu` and mean its tanh form."""

    def read(self, keys: Keys) -> Any:
        older = HIDDEN_ACT.read(keys)
        return Key("hidden_activation", older, TANH_FIRST).read(keys)

    def write(self, value: Any, out: Json) -> None:
        HIDDEN_ACT.write(value, out)
        out["hidden_activation"] = out["hidden_act"]


@dataclass(frozen=True)
class PreAttentionScalar(Leaf):
    """scale = query_pre_attn_scalar^(-1/2); no number of ours where that is the width of a head."""

    def read(self, keys: Keys) -> float | None:
        scalar = keys.get("query_pre_attn_scalar", 256)
        return None if scalar == keys.get("head_dim", 256) else float(scalar**-0.5)

    def write(self, value: Any, out: Json) -> None:
        # The peer takes whole numbers only; another scale is noticed when the file is read again.
        out["query_pre_attn_scalar"] = out["head_dim"] if value is None else round(value**-2)


@dataclass(frozen=True)
class KindRope(Rope):
    """Gemma 3's positions of one kind of layer: its own table in `rope_parameters`, or keys of their own."""

    kind: str = GLOBAL

    def read(self, keys: Keys) -> Json:
        tables = keys.get("rope_parameters", None)
        if tables is not None:
            if not isinstance(tables.get(self.kind), dict):
                raise CheckpointError(f"{keys.name}: rope_parameters has no table {self.kind!r}")
            keys.read |= {"rope_theta", "rope_scaling", "rope_local_base_freq"}
            return self.from_parameters(dict(tables[self.kind]), keys)
        if self.kind == GLOBAL:
            return super().read(keys)
        return self.from_parameters({"rope_theta": keys.get("rope_local_base_freq", self.theta)}, keys)

    def write(self, value: Any, out: Json) -> None:
        if value["kind"] != "rotary":
            raise CheckpointError(f"their format has no {value['kind']!r} positions; save in qkv's own format")
        if self.kind == GLOBAL:
            super().write(value, out)
        else:
            out["rope_local_base_freq"] = value["theta"]


def attention(**changes: Any) -> Json:
    """Heads of a width of their own."""
    bias = Key("attention_bias", False)
    return heads(head_dim=Key("head_dim", 256), qkv_bias=bias, o_bias=bias, **changes)


def layer(attention: Json) -> Json:
    """A layer of Gemma 2 and 3: each sublayer between two norms."""
    ffn = gated(activation=Key("hidden_activation", "gelu-tanh", TANH_FIRST))
    return block(attention, ffn=ffn, norm=NORM, residual={"kind": "sandwich"})


def frame(**head: Any) -> Json:
    """What Gemma has instead of Llama's embedding and head."""
    return {
        "embedding": {"scale": "sqrt_d_model"},
        "head": {"kind": "lm", "tied": Key("tie_word_embeddings", True), **head},
    }


SANDWICH = tuple(
    Rule(f"model.layers.{{i}}.{theirs}.weight", f"decoder.layers.{{i}}.{ours}.weight")
    for theirs, ours in (
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "attention_post_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "ffn_post_norm"),
    )
)
MUST = {"use_bidirectional_attention": False}
FREE = ("cache_implementation", "_attn_implementation")  # how the peer computes

GEMMA_1 = uniform(block(attention(), ffn=gated(activation=Gemma1Activation()), norm=NORM), **frame())

_heads_2 = attention(scale=PreAttentionScalar(), softcap=OrNull("attn_logit_softcapping", 50.0))
GEMMA_2 = model(
    Layers(
        N_LAYERS,
        Key("layer_types", Every(N_LAYERS, 2, LOCAL, GLOBAL)),
        {LOCAL: layer(_heads_2 | {"pattern": SLIDING}), GLOBAL: layer(_heads_2)},
        NORM,
    ),
    **frame(softcap=OrNull("final_logit_softcapping", 30.0)),
)

_heads_3 = attention(scale=PreAttentionScalar(), qk_norm=NORM)
GEMMA_3 = model(
    Layers(
        N_LAYERS,
        Key(
            "layer_types",
            Every(N_LAYERS, Key("sliding_window_pattern", Key("_sliding_window_pattern", 6)), LOCAL, GLOBAL),
        ),
        {
            LOCAL: layer(_heads_3 | {"pattern": SLIDING, "positions": KindRope(kind=LOCAL)}),
            GLOBAL: layer(_heads_3 | {"positions": KindRope(theta=1e6, kind=GLOBAL)}),
        },
        NORM,
    ),
    **frame(softcap=OrNull("final_logit_softcapping", None)),
)

# The two patterns say nothing beside `layer_types`; the others speak of kinds that no layer may have.
FREE_3 = (
    *FREE, "sliding_window_pattern", "_sliding_window_pattern", "sliding_window", "rope_local_base_freq", "rope_theta",
    "rope_scaling",
)  # fmt: skip
VISION = Ignored(
    r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    "they belong to the vision part, which qkv does not have: this is the text model alone",
    told=True,
)

FAMILIES = (
    Family(
        name="gemma",
        model_types=("gemma",),
        architecture="GemmaForCausalLM",
        template=GEMMA_1,
        rules=RULES,
        must=MUST,
        free=FREE,
        ignored=IGNORED,
        tied=TIED,
    ),
    Family(
        name="gemma2",
        model_types=("gemma2",),
        architecture="Gemma2ForCausalLM",
        template=GEMMA_2,
        rules=(*LLAMA_FRAME, *LLAMA_LAYER, *SANDWICH),
        must=MUST,
        # Released files repeat the activation and the window under names that the peer does not read.
        free=(*FREE, "hidden_act", "sliding_window", "sliding_window_size"),
        ignored=IGNORED,
        tied=TIED,
    ),
    Family(
        name="gemma3",
        model_types=("gemma3_text",),
        architecture="Gemma3ForCausalLM",
        template=GEMMA_3,
        rules=(*LLAMA_FRAME, *LLAMA_LAYER, *SANDWICH, *QK_NORMS),
        must=MUST | {"attn_logit_softcapping": None},
        free=FREE_3,
        ignored=IGNORED,
        tied=TIED,
    ),
    Family(
        name="gemma3-multimodal",
        model_types=("gemma3",),
        architecture="Gemma3ForConditionalGeneration",
        template=GEMMA_3,
        rules=(*LLAMA_FRAME, *LLAMA_LAYER, *SANDWICH, *QK_NORMS),
        must=MUST | {"attn_logit_softcapping": None},
        free=FREE_3,
        ignored=(*IGNORED, VISION),
        tied=TIED,
        spellings=(Spelling(r"^language_model\.", ""), Spelling(r"^model\.language_model\.", "model.")),
        instead="gemma3",
        inside="text_config",
        beside=(
            "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_id",
            "image_token_index", "initializer_range", "mm_tokens_per_image", "tie_word_embeddings", "vision_config",
        ),
        # The released files say only what differs from the smallest of these models.
        defaults={
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
    ),
)  # fmt: skip
