"""ChatGLM2 and ChatGLM3 (model_type `chatglm`): Llama's block, grouped keys, half of each head turned in pairs.

The fused matrix holds all queries, then all keys, then all values; `dense_h_to_4h` the gate, then up. The norm's
weight multiplies before the result is rounded. `rope_ratio` means two things: the code of the 32k release of ChatGLM2
divides positions by it, that of ChatGLM3 and GLM-4 multiplies theta. Only `_name_or_path` says which code a file goes
with, so a ratio without it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.families.leaves_old import Alias
from qkv.checkpoint.ops import Split
from qkv.checkpoint.rules import Ignored, Rule
from qkv.checkpoint.template import Family, Json, Key, Keys, Leaf, Quotient
from qkv.errors import CheckpointError

NORM = {"kind": "rmsnorm", "eps": Key("layernorm_epsilon", 1e-5), "unit_offset": False, "cast": "after"}
LAYER, OURS = "transformer.encoder.layers.{i}", "decoder.layers.{i}"
THETA = 10_000.0
# What `_name_or_path` holds, and what the release's code does with the ratio. The first of each is written.
_DIVIDES, _MULTIPLIES = ("THUDM/chatglm2-6b-32k", "chatglm2"), ("THUDM/chatglm3-6b-32k", "chatglm3", "glm-4")
_QKV = tuple(f"{OURS}.attention.{name}_proj" for name in "qkv")


@dataclass(frozen=True)
class _Rope(Leaf):
    """Half of each head, with `rope_ratio`."""

    def read(self, keys: Keys) -> Json:
        ratio, name = keys.get("rope_ratio", 1), str(keys.get("_name_or_path", "")).lower()
        theta, scaling = THETA, {"kind": "none"}
        if ratio != 1 and any(known in name for known in _MULTIPLIES[1:]):
            theta = THETA * ratio
        elif ratio != 1 and any(known in name for known in _DIVIDES[1:]):
            scaling = {"kind": "linear", "factor": ratio}
        elif ratio != 1:
            raise CheckpointError(
                f"{keys.name}: rope_ratio is {ratio!r}, which divides positions in ChatGLM2 and multiplies theta in "
                f"ChatGLM3 and GLM-4: set _name_or_path to {_DIVIDES[0]!r} or {_MULTIPLIES[0]!r}"
            )
        return {"kind": "rotary", "theta": theta, "fraction": 0.5, "layout": "pairs", "scaling": scaling}

    def write(self, value: Any, out: Json) -> None:
        factor, ratio = value.get("scaling", {}).get("factor", 1), value.get("theta", THETA) / THETA
        if factor != 1:
            out |= {"rope_ratio": factor, "_name_or_path": _DIVIDES[0]}
        elif ratio != 1:
            out |= {"rope_ratio": int(ratio) if ratio.is_integer() else ratio, "_name_or_path": _MULTIPLIES[0]}


FAMILIES = (
    Family(
        name="chatglm",
        model_types=("chatglm",),
        architecture="ChatGLMModel",
        also=("ChatGLMForConditionalGeneration",),
        template={
            "vocab_size": Alias(("padded_vocab_size", "vocab_size")),
            "d_model": Key("hidden_size"),
            "max_seq_len": Key("seq_length"),
            "embedding": {},
            "decoder": {
                "n_layers": Alias(("num_layers", "num_hidden_layers")),
                "layers": [
                    {
                        "attention": {
                            "kind": "multi-head",
                            "n_heads": Key("num_attention_heads"),
                            "n_kv_heads": Key("multi_query_group_num"),
                            "head_dim": Key("kv_channels", Quotient("hidden_size", "num_attention_heads")),
                            "qkv_bias": Key("add_qkv_bias", False),
                            "dropout": Key("attention_dropout", 0.0),
                            "pattern": {"kind": "causal"},
                            "positions": _Rope(),
                        },
                        "ffn": {"kind": "gated", "d_ff": Key("ffn_hidden_size"), "activation": "silu"},
                        "norm": NORM,
                        "residual": {"kind": "pre"},
                        "dropout": Key("hidden_dropout", 0.0),
                    }
                ],
                "norm": NORM,
            },
            "head": {"kind": "lm", "tied": False},
            "init": {"kind": "llama"},
        },
        rules=(
            Rule("transformer.embedding.word_embeddings.weight", "embed.tokens.weight"),
            *(
                Rule(f"{LAYER}.self_attention.query_key_value.{kind}", tuple(f"{n}.{kind}" for n in _QKV), Split())
                for kind in ("weight", "bias")
            ),
            Rule(f"{LAYER}.self_attention.dense.weight", f"{OURS}.attention.o_proj.weight"),
            Rule(
                f"{LAYER}.mlp.dense_h_to_4h.weight",
                (f"{OURS}.ffn.gate_proj.weight", f"{OURS}.ffn.up_proj.weight"),
                Split(),
            ),
            Rule(f"{LAYER}.mlp.dense_4h_to_h.weight", f"{OURS}.ffn.down_proj.weight"),
            Rule(f"{LAYER}.input_layernorm.weight", f"{OURS}.attention_norm.weight"),
            Rule(f"{LAYER}.post_attention_layernorm.weight", f"{OURS}.ffn_norm.weight"),
            Rule("transformer.encoder.final_layernorm.weight", "decoder.norm.weight"),
            Rule("transformer.output_layer.weight", "head.weight"),
        ),
        must={
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
            "multi_query_attention": True,
            "original_rope": True,
            "post_layer_norm": True,
            "pre_seq_len": None,
            "quantization_bit": 0,
            "rmsnorm": True,
            "tie_word_embeddings": False,
        },
        # `apply_query_key_layer_scaling` divides scores and multiplies them back; the others choose number formats
        # and kernels, or speak of parts that a language model lacks.
        free=("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion",
              "classifier_dropout", "fp32_residual_connection", "prefix_projection"),
        ignored=(Ignored(r"transformer\.rotary_pos_emb\.inv_freq", "computed from theta"),),
    ),
)  # fmt: skip
