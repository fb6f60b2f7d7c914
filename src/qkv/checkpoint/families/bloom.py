"""BLOOM: fused queries, keys and values head by head, ALiBi, a norm after the embedding."""

from __future__ import annotations

from qkv.checkpoint.families.leaves_old import Alias, Ratio, Times
from qkv.checkpoint.ops import SplitHeads
from qkv.checkpoint.rules import Rule, Spelling, Tied
from qkv.checkpoint.template import Family, Key

NORM = {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)}
# The first releases say `n_embed` and `num_attention_heads`.
WIDTH, HEADS = Alias(("hidden_size", "n_embed")), Alias(("n_head", "num_attention_heads"))
_FUSED = "transformer.h.{i}.self_attention.query_key_value"
_QKV = tuple(f"decoder.layers.{{i}}.attention.{name}_proj" for name in "qkv")
_NAMES = {
    "transformer.h.{i}.self_attention.dense": "decoder.layers.{i}.attention.o_proj",
    "transformer.h.{i}.mlp.dense_h_to_4h": "decoder.layers.{i}.ffn.up_proj",
    "transformer.h.{i}.mlp.dense_4h_to_h": "decoder.layers.{i}.ffn.down_proj",
    "transformer.h.{i}.input_layernorm": "decoder.layers.{i}.attention_norm",
    "transformer.h.{i}.post_attention_layernorm": "decoder.layers.{i}.ffn_norm",
    "transformer.word_embeddings_layernorm": "embed.norm",
    "transformer.ln_f": "decoder.norm",
}
_RULES = (
    Rule("transformer.word_embeddings.weight", "embed.tokens.weight"),
    *(Rule(f"{_FUSED}.{kind}", tuple(f"{name}.{kind}" for name in _QKV), SplitHeads()) for kind in ("weight", "bias")),
    *(Rule(f"{theirs}.{kind}", f"{ours}.{kind}") for theirs, ours in _NAMES.items() for kind in ("weight", "bias")),
    Rule("lm_head.weight", "head.weight"),
)

FAMILIES = (
    Family(
        name="bloom",
        model_types=("bloom",),
        architecture="BloomForCausalLM",
        template={
            "vocab_size": Key("vocab_size"),
            "d_model": WIDTH,
            "max_seq_len": Key("seq_length", 2048),
            "embedding": {"norm": NORM},
            "decoder": {
                "n_layers": Alias(("n_layer", "num_hidden_layers")),
                "layers": [
                    {
                        "attention": {
                            "kind": "multi-head",
                            "n_heads": HEADS,
                            "head_dim": Ratio(WIDTH, HEADS),
                            "qkv_bias": True,
                            "o_bias": True,
                            "dropout": Key("attention_dropout", 0.0),
                            "pattern": {"kind": "causal"},
                            "positions": {"kind": "alibi"},
                        },
                        "ffn": {"kind": "dense", "d_ff": Times(WIDTH, 4), "activation": "gelu-tanh", "bias": True},
                        "norm": NORM,
                        "residual": {"kind": "pre"},
                        "dropout": Key("hidden_dropout", 0.0),
                    }
                ],
                "norm": NORM,
            },
            "head": {"kind": "lm", "tied": Key("tie_word_embeddings", True)},
            "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
        },
        rules=_RULES,
        must={"apply_residual_connection_post_layernorm": False, "n_inner": None},
        # How the sums were split over devices or kernels, and a number that the published code never reads.
        free=("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi",
              "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id"),
        tied=(Tied("lm_head.weight", "transformer.word_embeddings.weight"),),
        # The published files leave out the prefix of the model without its head.
        spellings=(Spelling(r"^(?=(word_embeddings|word_embeddings_layernorm|h|ln_f)\.)", "transformer."),),
    ),
)  # fmt: skip
