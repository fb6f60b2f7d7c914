"""Falcon 7B (one key and value for all heads), 40B, 180B and Falcon 2 11B (groups): attention and network in parallel.

The fused matrix holds, for each key-value head, its queries, its key and its value; with one key-value head these are
all queries, one key, one value. The 40B layer has a norm for each of the two branches, the others one for both.
Falcon-RW is refused: it multiplies ALiBi, too, by 1/sqrt(head_dim), and its branches run one after the other.
"""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families.common import ACTIVATIONS
from qkv.checkpoint.families.leaves_old import Alias, Choice, Ratio, Times
from qkv.checkpoint.ops import SplitHeads
from qkv.checkpoint.rope import Rope
from qkv.checkpoint.rules import Rule, Tied
from qkv.checkpoint.template import Family, Json, Key

NORM = {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)}
WIDTH = Alias(("hidden_size", "n_embed"))
_FUSED = "transformer.h.{i}.self_attention.query_key_value"
_QKV = tuple(f"decoder.layers.{{i}}.attention.{name}_proj" for name in "qkv")
_NAMES = {
    "transformer.h.{i}.self_attention.dense": "decoder.layers.{i}.attention.o_proj",
    "transformer.h.{i}.mlp.dense_h_to_4h": "decoder.layers.{i}.ffn.up_proj",
    "transformer.h.{i}.mlp.dense_4h_to_h": "decoder.layers.{i}.ffn.down_proj",
    "transformer.h.{i}.input_layernorm": "decoder.layers.{i}.norm",
    "transformer.h.{i}.ln_attn": "decoder.layers.{i}.attention_norm",
    "transformer.h.{i}.ln_mlp": "decoder.layers.{i}.ffn_norm",
    "transformer.ln_f": "decoder.norm",
}
_RULES = (
    Rule("transformer.word_embeddings.weight", "embed.tokens.weight"),
    *(Rule(f"{_FUSED}.{kind}", tuple(f"{name}.{kind}" for name in _QKV), SplitHeads()) for kind in ("weight", "bias")),
    *(Rule(f"{theirs}.{kind}", f"{ours}.{kind}") for theirs, ours in _NAMES.items() for kind in ("weight", "bias")),
    Rule("lm_head.weight", "head.weight"),
)


def _block(n_kv_heads: Any, *, shared_norm: bool) -> Json:
    """A layer with these key-value heads, and one norm or two."""
    return {
        "attention": {
            "kind": "multi-head",
            "n_heads": Key("num_attention_heads"),
            "n_kv_heads": n_kv_heads,
            "head_dim": Ratio(WIDTH, Key("num_attention_heads")),
            "qkv_bias": Key("bias", False),
            "o_bias": Key("bias", False),
            "dropout": Key("attention_dropout", 0.0),
            "pattern": {"kind": "causal"},
            "positions": Rope(),
        },
        "ffn": {
            "kind": "dense",
            "d_ff": Key("ffn_hidden_size", Times(WIDTH, 4)),
            "activation": Key("activation", "gelu", ACTIVATIONS),
            "bias": Key("bias", False),
        },
        "norm": NORM,
        "residual": {"kind": "parallel", "shared_norm": shared_norm},
        "dropout": Key("hidden_dropout", 0.0),
    }


_GROUPS = Key("num_kv_heads", Key("num_attention_heads"))
LAYER = Choice(
    {"new_decoder_architecture": False, "multi_query": True, "num_ln_in_parallel_attn": 2},
    (
        ({"new_decoder_architecture": False, "multi_query": True}, _block(1, shared_norm=True)),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2}, _block(_GROUPS, shared_norm=False)),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, _block(_GROUPS, shared_norm=True)),
        (
            {"new_decoder_architecture": False, "multi_query": False},
            _block(Key("num_attention_heads"), shared_norm=True),
        ),
    ),
)

FAMILIES = (
    Family(
        name="falcon",
        model_types=("falcon",),
        architecture="FalconForCausalLM",
        template={
            "vocab_size": Key("vocab_size"),
            "d_model": WIDTH,
            "max_seq_len": Key("max_position_embeddings", 2048),
            "embedding": {},
            "decoder": {"n_layers": Key("num_hidden_layers"), "layers": [LAYER], "norm": NORM},
            "head": {"kind": "lm", "tied": Key("tie_word_embeddings", True)},
            "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
        },
        rules=_RULES,
        must={"alibi": False, "parallel_attn": True, "apply_residual_connection_post_layernorm": False},
        free=("num_kv_heads", "ff_factor"),  # read where groups exist; `ffn_hidden_size` says the width itself
        tied=(Tied("lm_head.weight", "transformer.word_embeddings.weight"),),
    ),
)
