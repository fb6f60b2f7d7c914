"""Llama 1 to 3.2, CodeLlama, Yi, DeepSeek-LLM, SmolLM2: one template and one set of rules."""

from __future__ import annotations

from qkv.checkpoint.families.common import ACTIVATIONS, LLAMA_FRAME, LLAMA_LAYER
from qkv.checkpoint.rope import Rope
from qkv.checkpoint.rules import Ignored, Rule, Tied
from qkv.checkpoint.template import Family, Key, Quotient

NORM = {"kind": "rmsnorm", "eps": Key("rms_norm_eps", 1e-6), "unit_offset": False, "cast": "before"}

TEMPLATE = {
    "vocab_size": Key("vocab_size"),
    "d_model": Key("hidden_size"),
    "max_seq_len": Key("max_position_embeddings", 2048),
    "embedding": {},
    "decoder": {
        "n_layers": Key("num_hidden_layers"),
        "layers": [
            {
                "attention": {
                    "kind": "multi-head",
                    "n_heads": Key("num_attention_heads"),
                    "n_kv_heads": Key("num_key_value_heads", Key("num_attention_heads")),
                    "head_dim": Key("head_dim", Quotient("hidden_size", "num_attention_heads")),
                    "qkv_bias": Key("attention_bias", False),
                    "o_bias": Key("attention_bias", False),
                    "dropout": Key("attention_dropout", 0.0),
                    "pattern": {"kind": "causal"},
                    "positions": Rope(),
                },
                "ffn": {
                    "kind": "gated",
                    "d_ff": Key("intermediate_size"),
                    "activation": Key("hidden_act", "silu", ACTIVATIONS),
                    "bias": Key("mlp_bias", False),
                },
                "norm": NORM,
                "residual": {"kind": "pre"},
            }
        ],
        "norm": NORM,
    },
    "head": {"kind": "lm", "tied": Key("tie_word_embeddings", False)},
    "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
}

FAMILIES = (
    Family(
        name="llama",
        model_types=("llama",),
        architecture="LlamaForCausalLM",
        also=("LLaMAForCausalLM",),
        template=TEMPLATE,
        rules=(
            *LLAMA_FRAME,
            *LLAMA_LAYER,
            Rule("model.layers.{i}.input_layernorm.weight", "decoder.layers.{i}.attention_norm.weight"),
            Rule("model.layers.{i}.post_attention_layernorm.weight", "decoder.layers.{i}.ffn_norm.weight"),
        ),
        ignored=(Ignored(r".*rotary_emb\.inv_freq", "computed from theta"),),
        tied=(Tied("lm_head.weight", "model.embed_tokens.weight"),),
    ),
)
