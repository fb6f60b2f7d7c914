"""Qwen of 2023 (model_type `qwen`): Llama's block, fused and biased queries, keys and values, two rules for length.

The network is c_proj(w1(x) * silu(w2(x))): w2 is the gate. `intermediate_size` counts gate and up together.
"""

from __future__ import annotations

from qkv.checkpoint.families.leaves_old import Alias, Halved
from qkv.checkpoint.ops import Split
from qkv.checkpoint.rules import Ignored, Rule
from qkv.checkpoint.template import Case, Family, Key

NORM = {"kind": "rmsnorm", "eps": Key("layer_norm_epsilon", 1e-6), "unit_offset": False, "cast": "before"}
_QKV = tuple(f"decoder.layers.{{i}}.attention.{name}_proj" for name in "qkv")
_NAMES = {
    "attn.c_proj": "attention.o_proj",
    "mlp.w2": "ffn.gate_proj",
    "mlp.w1": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
    "ln_1": "attention_norm",
    "ln_2": "ffn_norm",
}

# The names of the first release, of August 2023, stand second.
ATTENTION = {
    "kind": "multi-head",
    "n_heads": Alias(("num_attention_heads", "n_head")),
    "head_dim": Key("kv_channels", 128),
    "qkv_bias": True,
    "dropout": Alias(("attn_dropout_prob", "attn_pdrop"), 0.0),
    "log_n": Case("use_logn_attn", {False: None, True: Key("seq_length")}, False),
    "pattern": {"kind": "causal"},
    "positions": {
        "kind": "rotary",
        "theta": Key("rotary_emb_base", 10_000.0),
        "fraction": Key("rotary_pct", 1.0),
        "layout": "halves",
        "scaling": Case(
            "use_dynamic_ntk",
            {False: {"kind": "none"}, True: {"kind": "qwen-dynamic", "original_max_seq_len": Key("seq_length")}},
            False,
        ),
    },
}

FAMILIES = (
    Family(
        name="qwen",
        model_types=("qwen",),
        architecture="QWenLMHeadModel",
        template={
            "vocab_size": Alias(("vocab_size", "padded_vocab_size")),
            "d_model": Alias(("hidden_size", "n_embd")),
            "max_seq_len": Key("seq_length"),
            "embedding": {"dropout": Alias(("emb_dropout_prob", "embd_pdrop"), 0.0)},
            "decoder": {
                "n_layers": Alias(("num_hidden_layers", "n_layer")),
                "layers": [
                    {
                        "attention": ATTENTION,
                        "ffn": {
                            "kind": "gated",
                            "d_ff": Halved(Alias(("intermediate_size", "ffn_hidden_size"))),
                            "activation": "silu",
                        },
                        "norm": NORM,
                        "residual": {"kind": "pre"},
                    }
                ],
                "norm": NORM,
            },
            "head": {"kind": "lm", "tied": False},
            "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
        },
        rules=(
            Rule("transformer.wte.weight", "embed.tokens.weight"),
            *(
                Rule(f"transformer.h.{{i}}.attn.c_attn.{kind}", tuple(f"{name}.{kind}" for name in _QKV), Split())
                for kind in ("weight", "bias")
            ),
            *(
                Rule(f"transformer.h.{{i}}.{theirs}.weight", f"decoder.layers.{{i}}.{ours}.weight")
                for theirs, ours in _NAMES.items()
            ),
            Rule("transformer.ln_f.weight", "decoder.norm.weight"),
            Rule("lm_head.weight", "head.weight"),
        ),
        must={
            "no_bias": True,
            "scale_attn_weights": True,
            "tie_word_embeddings": False,
            "apply_residual_connection_post_layernorm": False,
            "activation": "swiglu",
            "pos_emb": "rotary",
        },
        # How many positions were tabled, and which kernels and number formats ran.
        free=("bf16", "bias_dropout_fusion", "fp16", "fp32", "max_position_embeddings", "n_positions", "onnx_safe",
              "params_dtype", "resid_pdrop", "softmax_in_fp32", "tokenizer_type", "use_cache_kernel",
              "use_cache_quantization", "use_flash_attn"),
        ignored=(Ignored(r"transformer\.rotary_emb\.inv_freq", "computed from theta"),),
    ),
)  # fmt: skip
