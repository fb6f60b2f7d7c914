"""MPT: fused queries, keys and values one after another, ALiBi, no bias anywhere, not even in the norms."""

from __future__ import annotations

from qkv.checkpoint.families.leaves_old import Merge, Times, Whole, Within
from qkv.checkpoint.ops import Split
from qkv.checkpoint.rules import Rule, Tied
from qkv.checkpoint.template import Family, Key, Quotient

NORM = {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5), "bias": False}
_QKV = tuple(f"decoder.layers.{{i}}.attention.{name}_proj.weight" for name in "qkv")
_NAMES = {
    "attn.out_proj": "attention.o_proj",
    "ffn.up_proj": "ffn.up_proj",
    "ffn.down_proj": "ffn.down_proj",
    "norm_1": "attention_norm",
    "norm_2": "ffn_norm",
}

ATTENTION = Merge(
    (
        {
            "kind": "multi-head",
            "n_heads": Key("n_heads"),
            "head_dim": Quotient("d_model", "n_heads"),
            "pattern": {"kind": "causal"},
        },
        Within(
            "attn_config",
            {
                "clip": Key("clip_qkv", None),
                "dropout": Whole(Key("attn_pdrop", 0.0)),
                "scale": Key("softmax_scale", None),
                "positions": {"kind": "alibi", "max_bias": Whole(Key("alibi_bias_max", 8.0))},
            },
            must={
                "alibi": True,
                "attn_type": "multihead_attention",
                "attn_uses_sequence_id": False,
                "prefix_lm": False,
                "qk_ln": False,
            },
            # Which kernel ran, and what release 5 writes into every table of settings.
            free=("_name_or_path", "architectures", "attn_impl", "chunk_size_feed_forward", "dtype", "id2label",
                  "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states",
                  "problem_type", "return_dict", "torch_dtype"),
        ),
    )
)  # fmt: skip

FAMILIES = (
    Family(
        name="mpt",
        model_types=("mpt",),
        architecture="MptForCausalLM",
        also=("MPTForCausalLM",),
        template={
            "vocab_size": Key("vocab_size"),
            "d_model": Key("d_model"),
            "max_seq_len": Key("max_seq_len"),
            "embedding": {"dropout": Key("emb_pdrop", 0.0)},
            "decoder": {
                "n_layers": Key("n_layers"),
                "layers": [
                    {
                        "attention": ATTENTION,
                        "ffn": {"kind": "dense", "d_ff": Times(Key("d_model"), 4), "activation": "gelu"},
                        "norm": NORM,
                        "residual": {"kind": "pre"},
                        "dropout": Key("resid_pdrop", 0.0),
                    }
                ],
                "norm": NORM,
            },
            "head": {"kind": "lm", "tied": Key("tie_word_embeddings", True)},
            "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
        },
        rules=(
            Rule("transformer.wte.weight", "embed.tokens.weight"),
            Rule("transformer.blocks.{i}.attn.Wqkv.weight", _QKV, Split()),
            *(
                Rule(f"transformer.blocks.{{i}}.{theirs}.weight", f"decoder.layers.{{i}}.{ours}.weight")
                for theirs, ours in _NAMES.items()
            ),
            Rule("transformer.norm_f.weight", "decoder.norm.weight"),
            Rule("lm_head.weight", "head.weight"),
        ),
        must={
            "expansion_ratio": 4,
            "no_bias": True,
            "logit_scale": None,
            "norm_type": "low_precision_layernorm",
        },
        # `learned_pos_emb` is overruled by ALiBi, which `attn_config` must ask for; `embedding_fraction` scales a
        # gradient; `init_config` says how the weights were drawn.
        free=("embedding_fraction", "init_config", "init_device", "learned_pos_emb", "tokenizer_name", "verbose"),
        tied=(Tied("lm_head.weight", "transformer.wte.weight"),),
    ),
)
