"""Falcon 7B (one key and value for all heads), 40B, 180B and Falcon 2 11B (groups), Falcon-RW (own keys, ALiBi).

The fused matrix holds, for each key-value head, its queries, its key and its value; with one key-value head these are
all queries, one key, one value. The 40B layer has a norm for each of the two branches, the others one for both.
Falcon-RW's branches run one after the other. It multiplies ALiBi, too, by 1/sqrt(head_dim), and rounds it to
bfloat16, whatever type the model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.checkpoint.families.common import ACTIVATIONS
from qkv.checkpoint.families.leaves_old import Alias, Choice, Ratio, Times
from qkv.checkpoint.ops import SplitHeads
from qkv.checkpoint.rope import Rope
from qkv.checkpoint.rules import Rule, Tied
from qkv.checkpoint.template import Case, Family, Json, Key, Leaf

NORM = {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)}
WIDTH = Alias(("hidden_size", "n_embed"))
_FUSED = "transformer.h.{i}.self_attention.query_key_value"
_QKV = tuple(f"decoder.layers.{{i}}.attention.{name}_proj" for name in "qkv")
_NAMES = {
    "transformer.h.{i}.self_attention.dense": "decoder.layers.{i}.attention.o_proj",
    "transformer.h.{i}.mlp.dense_h_to_4h": "decoder.layers.{i}.ffn.up_proj",
    "transformer.h.{i}.mlp.dense_4h_to_h": "decoder.layers.{i}.ffn.down_proj",
    "transformer.ln_f": "decoder.norm",
}
_AT_ONCE = {
    "transformer.h.{i}.input_layernorm": "decoder.layers.{i}.norm",
    "transformer.h.{i}.ln_attn": "decoder.layers.{i}.attention_norm",
    "transformer.h.{i}.ln_mlp": "decoder.layers.{i}.ffn_norm",
}
_IN_TURN = {
    "transformer.h.{i}.input_layernorm": "decoder.layers.{i}.attention_norm",
    "transformer.h.{i}.post_attention_layernorm": "decoder.layers.{i}.ffn_norm",
}


def _rules(norms: Mapping[str, str]) -> tuple[Rule, ...]:
    """Every tensor, with the norms that the order of the branches gives."""
    names, kinds = {**_NAMES, **norms}.items(), ("weight", "bias")
    return (
        Rule("transformer.word_embeddings.weight", "embed.tokens.weight"),
        *(Rule(f"{_FUSED}.{kind}", tuple(f"{name}.{kind}" for name in _QKV), SplitHeads()) for kind in kinds),
        *(Rule(f"{theirs}.{kind}", f"{ours}.{kind}") for theirs, ours in names for kind in kinds),
        Rule("lm_head.weight", "head.weight"),
    )


_ALIBI = {"kind": "alibi", "max_bias": 8.0, "scaled": True, "rounded": True}


def _block(n_kv_heads: Any, residual: Json) -> Json:
    """A layer with these key-value heads, and this order of its branches."""
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
            "positions": Case("alibi", {True: _ALIBI, False: Rope()}, default=False),
        },
        "ffn": {
            "kind": "dense",
            "d_ff": Key("ffn_hidden_size", Times(WIDTH, 4)),
            "activation": Key("activation", "gelu", ACTIVATIONS),
            "bias": Key("bias", False),
        },
        "norm": NORM,
        "residual": residual,
        "dropout": Key("hidden_dropout", 0.0),
    }


_GROUPS = Key("num_kv_heads", Key("num_attention_heads"))
_OWN = Key("num_attention_heads")
_ONE_NORM, _TWO_NORMS = ({"kind": "parallel", "shared_norm": shared} for shared in (True, False))
_ONE_KEY, _OWN_KEYS = ({"new_decoder_architecture": False, "multi_query": single} for single in (True, False))
AT_ONCE = Choice(
    {"new_decoder_architecture": False, "multi_query": True, "num_ln_in_parallel_attn": 2},
    (
        (_ONE_KEY, _block(1, _ONE_NORM)),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2}, _block(_GROUPS, _TWO_NORMS)),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, _block(_GROUPS, _ONE_NORM)),
        (_OWN_KEYS, _block(_OWN, _ONE_NORM)),
    ),
)
IN_TURN = Choice(
    {"new_decoder_architecture": False, "multi_query": True},
    ((_ONE_KEY, _block(1, {"kind": "pre"})), (_OWN_KEYS, _block(_OWN, {"kind": "pre"}))),
)


def _family(name: str, layer: Leaf, norms: Mapping[str, str], *, parallel: bool) -> Family:
    return Family(
        name=name,
        model_types=("falcon",),
        architecture="FalconForCausalLM",
        where={} if parallel else {"parallel_attn": False},
        template={
            "vocab_size": Key("vocab_size"),
            "d_model": WIDTH,
            "max_seq_len": Key("max_position_embeddings", 2048),
            "embedding": {},
            "decoder": {"n_layers": Key("num_hidden_layers"), "layers": [layer], "norm": NORM},
            "head": {"kind": "lm", "tied": Key("tie_word_embeddings", True)},
            "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
        },
        rules=_rules(norms),
        must={"parallel_attn": parallel, "apply_residual_connection_post_layernorm": False},
        # Groups and norms are read where they exist; `ffn_hidden_size` says the width itself; ALiBi has no angles.
        free=("num_kv_heads", "num_ln_in_parallel_attn", "ff_factor", "rope_theta", "rope_scaling", "rope_parameters"),
        tied=(Tied("lm_head.weight", "transformer.word_embeddings.weight"),),
    )


FAMILIES = (
    _family("falcon-rw", IN_TURN, _IN_TURN, parallel=False),
    _family("falcon", AT_ONCE, _AT_ONCE, parallel=True),
)
