"""GPT-1 (openai-gpt): norms behind each addition, fused queries, keys and values, matrices stored (in, out)."""

from __future__ import annotations

from qkv.checkpoint.ops import Split, Transpose
from qkv.checkpoint.rules import Ignored, Rule, Spelling, Tied
from qkv.checkpoint.template import Family, Key, Product, Quotient

# Its `gelu` is the tanh form: the only one that its code has.
ACTIVATIONS = {"gelu": "gelu-tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
_QKV = tuple(f"decoder.layers.{{i}}.attention.{name}_proj" for name in "qkv")
_MATRICES = (("attn.c_proj", "attention.o_proj"), ("mlp.c_fc", "ffn.up_proj"), ("mlp.c_proj", "ffn.down_proj"))

FAMILIES = (
    Family(
        name="gpt1",
        model_types=("openai-gpt",),
        architecture="OpenAIGPTLMHeadModel",
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
                            "d_ff": Product("n_embd", 4),
                            "activation": Key("afn", "gelu-tanh", ACTIVATIONS),
                            "bias": True,
                        },
                        "norm": {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)},
                        "residual": {"kind": "post"},
                        "dropout": Key("resid_pdrop", 0.1),
                    }
                ],
            },
            "head": {"kind": "lm", "tied": Key("tie_word_embeddings", True)},
            "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
        },
        rules=(
            Rule("transformer.tokens_embed.weight", "embed.tokens.weight"),
            Rule("transformer.positions_embed.weight", "embed.positions.weight"),
            Rule("transformer.h.{i}.attn.c_attn.weight", tuple(f"{n}.weight" for n in _QKV), Transpose(), Split()),
            Rule("transformer.h.{i}.attn.c_attn.bias", tuple(f"{n}.bias" for n in _QKV), Split()),
            *(
                Rule(f"transformer.h.{{i}}.{theirs}.weight", f"decoder.layers.{{i}}.{ours}.weight", Transpose())
                for theirs, ours in _MATRICES
            ),
            *(
                Rule(f"transformer.h.{{i}}.{theirs}.bias", f"decoder.layers.{{i}}.{ours}.bias")
                for theirs, ours in _MATRICES
            ),
            *(
                Rule(f"transformer.h.{{i}}.{theirs}.{kind}", f"decoder.layers.{{i}}.{ours}.{kind}")
                for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "ffn_norm"))
                for kind in ("weight", "bias")
            ),
            Rule("lm_head.weight", "head.weight"),
        ),
        free=("n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
              "summary_use_proj"),
        ignored=(Ignored(r"transformer\.h\.\d+\.attn\.bias", "the causal mask"),),
        tied=(Tied("lm_head.weight", "transformer.tokens_embed.weight"),),
        spellings=(Spelling(r"^(?!transformer\.|lm_head\.)", "transformer."),),  # the release holds the bare model
    ),
)  # fmt: skip
