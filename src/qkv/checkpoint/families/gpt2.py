"""GPT-2: fused queries, keys and values, stored (in, out)."""

from __future__ import annotations

from qkv.checkpoint.families.common import ACTIVATIONS
from qkv.checkpoint.ops import Split, Transpose
from qkv.checkpoint.rules import Ignored, Rule, Spelling, Tied
from qkv.checkpoint.template import Family, Key, Product, Quotient

NORM = {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)}
_QKV = tuple(f"decoder.layers.{{i}}.attention.{name}_proj" for name in "qkv")

FAMILIES = (
    Family(
        name="gpt2",
        model_types=("gpt2",),
        architecture="GPT2LMHeadModel",
        template={
            "vocab_size": Key("vocab_size"),
            "d_model": Key("n_embd"),
            "max_seq_len": Key("n_positions"),
            "embedding": {"positions": {"kind": "learned"}, "dropout": Key("embd_pdrop", 0.1)},
            "decoder": {
                "n_layers": Key("n_layer"),
                "layers": [
                    {
                        "attention": {
                            "kind": "multi-head",
                            "n_heads": Key("n_head"),
                            "head_dim": Quotient("n_embd", "n_head"),
                            "qkv_bias": True,
                            "o_bias": True,
                            "dropout": Key("attn_pdrop", 0.1),
                            "pattern": {"kind": "causal"},
                        },
                        "ffn": {
                            "kind": "dense",
                            "d_ff": Key("n_inner", Product("n_embd", 4)),
                            "activation": Key("activation_function", "gelu-tanh", ACTIVATIONS),
                            "bias": True,
                        },
                        "norm": NORM,
                        "residual": {"kind": "pre"},
                        "dropout": Key("resid_pdrop", 0.1),
                    }
                ],
                "norm": NORM,
            },
            "head": {"kind": "lm", "tied": Key("tie_word_embeddings", True)},
            "init": {"kind": "gpt2", "std": Key("initializer_range", 0.02)},
        },
        rules=(
            Rule("transformer.wte.weight", "embed.tokens.weight"),
            Rule("transformer.wpe.weight", "embed.positions.weight"),
            Rule("transformer.h.{i}.attn.c_attn.weight", tuple(f"{n}.weight" for n in _QKV), Transpose(), Split()),
            Rule("transformer.h.{i}.attn.c_attn.bias", tuple(f"{n}.bias" for n in _QKV), Split()),
            Rule("transformer.h.{i}.attn.c_proj.weight", "decoder.layers.{i}.attention.o_proj.weight", Transpose()),
            Rule("transformer.h.{i}.attn.c_proj.bias", "decoder.layers.{i}.attention.o_proj.bias"),
            Rule("transformer.h.{i}.mlp.c_fc.weight", "decoder.layers.{i}.ffn.up_proj.weight", Transpose()),
            Rule("transformer.h.{i}.mlp.c_fc.bias", "decoder.layers.{i}.ffn.up_proj.bias"),
            Rule("transformer.h.{i}.mlp.c_proj.weight", "decoder.layers.{i}.ffn.down_proj.weight", Transpose()),
            Rule("transformer.h.{i}.mlp.c_proj.bias", "decoder.layers.{i}.ffn.down_proj.bias"),
            *(
                Rule(f"transformer.h.{{i}}.{theirs}.{kind}", f"decoder.layers.{{i}}.{ours}.{kind}")
                for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "ffn_norm"))
                for kind in ("weight", "bias")
            ),
            *(Rule(f"transformer.ln_f.{kind}", f"decoder.norm.{kind}") for kind in ("weight", "bias")),
            Rule("lm_head.weight", "head.weight"),
        ),
        must={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        free=("n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
              "summary_use_proj"),
        ignored=(Ignored(r"transformer\.h\.\d+\.attn\.(masked_)?bias", "the causal mask"),),
        tied=(Tied("lm_head.weight", "transformer.wte.weight"),),
        spellings=(Spelling(r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),  # the published files lack the prefix
    ),
)  # fmt: skip
