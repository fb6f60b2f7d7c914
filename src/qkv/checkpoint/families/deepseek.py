"""DeepSeek-V2, V2-Lite and V3 (also R1): latent attention, dense layers first, then experts saved one by one.

YaRN's temperature multiplies the scores here, not the cosines: scale = m^2 / sqrt(nope + rope) with
m = 0.1 * mscale_all_dim * ln(factor) + 1. The norms of the two latents have their own epsilon, 1e-6 in the code.
V3 stores a further layer that predicts a second token in training; it is not part of the model and is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.families.common import ACTIVATIONS, LLAMA_FRAME, LLAMA_LAYER
from qkv.checkpoint.families.leaves_old import Merge, Repeat, Same
from qkv.checkpoint.ops import Stack
from qkv.checkpoint.rope import Rope
from qkv.checkpoint.rules import Ignored, Rule, Tied
from qkv.checkpoint.template import Case, Family, Json, Key, Keys, Leaf

NORM = {"kind": "rmsnorm", "eps": Key("rms_norm_eps", 1e-6), "unit_offset": False, "cast": "before"}


@dataclass(frozen=True)
class LatentScale(Leaf):
    """The factor of the scores: nothing special, or YaRN's temperature squared over the root of the query's width."""

    rope: Rope

    def read(self, keys: Keys) -> float | None:
        scaling = self.rope.read(keys)["scaling"]
        if scaling["kind"] != "yarn" or not scaling.get("mscale_all_dim"):
            return None
        temperature = 1.0
        if scaling["factor"] > 1:
            temperature = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0
        return temperature**2 / math.sqrt(keys.get("qk_nope_head_dim") + keys.get("qk_rope_head_dim"))


@dataclass(frozen=True)
class InterleavedRope(Rope):
    """V3's rotary: `rope_interleave` says which elements pair; the published files pair neighbours."""

    def read(self, keys: Keys) -> Json:
        layout = "pairs" if keys.get("rope_interleave", True) else "halves"
        return super().read(keys) | {"layout": layout}

    def write(self, value: Any, out: Json) -> None:
        super().write(value, out)
        out["rope_interleave"] = value["layout"] == "pairs"


@dataclass(frozen=True)
class SharedWidth(Leaf):
    """The shared network's width, which they count in experts."""

    def read(self, keys: Keys) -> Json:
        return {"shared_d_ff": keys.get("n_shared_experts", 0) * keys.get("moe_intermediate_size")}

    def write(self, value: Any, out: Json) -> None:
        out["n_shared_experts"] = value.get("shared_d_ff", 0) // value["d_ff"]


def _block(rope: Rope, ffn: Any) -> Json:
    """A layer of latent attention and this network."""
    return {
        "attention": {
            "kind": "latent",
            "n_heads": Same("num_attention_heads", "num_key_value_heads"),
            "q_rank": Key("q_lora_rank", None),
            "kv_rank": Key("kv_lora_rank"),
            "nope_dim": Key("qk_nope_head_dim"),
            "rope_dim": Key("qk_rope_head_dim"),
            "v_head_dim": Key("v_head_dim"),
            "scale": LatentScale(rope),
            "dropout": Key("attention_dropout", 0.0),
            "norm": {"kind": "rmsnorm", "eps": 1e-6, "unit_offset": False, "cast": "before"},
            "pattern": {"kind": "causal"},
            "positions": rope,
        },
        "ffn": ffn,
        "norm": NORM,
        "residual": {"kind": "pre"},
    }


def _template(rope: Rope, routing: Any) -> Json:
    """The whole model; `routing` is how experts are chosen."""
    activation = Key("hidden_act", "silu", ACTIVATIONS)
    dense = {"kind": "gated", "d_ff": Key("intermediate_size"), "activation": activation, "bias": False}
    experts = {
        "kind": "mixture-of-experts",
        "n_experts": Key("n_routed_experts"),
        "top_k": Key("num_experts_per_tok"),
        "d_ff": Key("moe_intermediate_size"),
        "activation": activation,
        "scale": Key("routed_scaling_factor", 1.0),
    }
    return {
        "vocab_size": Key("vocab_size"),
        "d_model": Key("hidden_size"),
        "max_seq_len": Key("max_position_embeddings"),
        "embedding": {},
        "decoder": {
            "n_layers": Key("num_hidden_layers"),
            "first": Repeat(Key("first_k_dense_replace", 0), _block(rope, dense)),
            "layers": [_block(rope, Merge((experts, SharedWidth(), routing)))],
            "norm": NORM,
        },
        "head": {"kind": "lm", "tied": Key("tie_word_embeddings", False)},
        "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
    }


GROUPS_V2 = Case(
    "topk_method",
    {
        "greedy": {"n_groups": 1, "top_groups": 1},
        "group_limited_greedy": {"n_groups": Key("n_group"), "top_groups": Key("topk_group")},
    },
    default="greedy",
)
ROUTING_V2 = Merge((GROUPS_V2, {"score": "softmax", "normalize": False, "correction": False, "group_score": "max"}))
ROUTING_V3 = {
    "score": "sigmoid",
    "normalize": Key("norm_topk_prob", True),
    "correction": True,
    "n_groups": Key("n_group", 1),
    "top_groups": Key("topk_group", 1),
    "group_score": "top2",
}

_NAMES = {
    "self_attn.q_a_proj": "attention.q_down_proj",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down_proj",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.kv_up_proj",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn.router",
    "mlp.shared_experts.gate_proj": "ffn.shared.gate_proj",
    "mlp.shared_experts.up_proj": "ffn.shared.up_proj",
    "mlp.shared_experts.down_proj": "ffn.shared.down_proj",
}
RULES = (
    *LLAMA_FRAME,
    *LLAMA_LAYER,
    *(
        Rule(f"model.layers.{{i}}.{theirs}.weight", f"decoder.layers.{{i}}.{ours}.weight")
        for theirs, ours in _NAMES.items()
    ),
    *(
        Rule(f"model.layers.{{i}}.mlp.experts.{{e}}.{name}.weight", f"decoder.layers.{{i}}.ffn.experts.{name}", Stack())
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
    Rule("model.layers.{i}.mlp.gate.e_score_correction_bias", "decoder.layers.{i}.ffn.router.correction"),
)
# Widths that other keys give, how training balanced the experts, and the extra layer of training. `intermediate_size`
# is read where a dense layer is.
FREE = ("aux_loss_alpha", "ep_size", "head_dim", "intermediate_size", "output_router_logits", "qk_head_dim", "seq_aux")
ROTARY = Ignored(r".*rotary_emb\.inv_freq", "computed from theta")
TIED = Tied("lm_head.weight", "model.embed_tokens.weight")

FAMILIES = (
    Family(
        name="deepseek-v2",
        model_types=("deepseek_v2",),
        architecture="DeepseekV2ForCausalLM",
        template=_template(Rope(layout="pairs"), ROUTING_V2),
        rules=RULES,
        must={
            "attention_bias": False,
            "mlp_bias": False,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
        },
        free=(*FREE, "n_group", "topk_group"),  # read where `topk_method` limits groups
        ignored=(ROTARY,),
        tied=(TIED,),
    ),
    Family(
        name="deepseek-v3",
        model_types=("deepseek_v3",),
        architecture="DeepseekV3ForCausalLM",
        template=_template(InterleavedRope(), ROUTING_V3),
        rules=RULES,
        must={
            "attention_bias": False,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        free=(*FREE, "num_nextn_predict_layers"),
        ignored=(ROTARY, Ignored(r"model\.layers\.61\..*", "predicts a second token, in training")),
        tied=(TIED,),
    ),
)
