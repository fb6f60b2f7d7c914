"""GGUF's architectures as data: how each one's metadata and tensors are our config and ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.gguf_leaves import (
    DIVISORS,
    HEADS,
    N_LAYERS,
    TIED,
    GemmaScale,
    Has,
    PlusOne,
    Rotate,
    Rows,
    Width,
    Window,
    Windows,
)
from qkv.checkpoint.layers import Layers
from qkv.checkpoint.layout import FromPairs
from qkv.checkpoint.ops import Op, Split, Stack
from qkv.checkpoint.rules import Ignored, Rule
from qkv.checkpoint.template import Case, Json, Key


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`."""

    name: str
    template: Json
    rules: tuple[Rule, ...]
    must: tuple[tuple[str, Any], ...] = ()
    """Keys that must have this value, if they are there; they are written."""
    free: tuple[str, ...] = ()
    """Keys that say nothing about what we compute."""
    ignored: tuple[Ignored, ...] = ()
    older: tuple[Rule, ...] = ()
    """How older files hold what a rule above makes: where a file does, it replaces that rule. They are not written."""


FREE = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "rope.scaling.original_context_length")
RMS = {"kind": "rmsnorm", "eps": Key("attention.layer_norm_rms_epsilon"), "unit_offset": False, "cast": "before"}
GEMMA_NORM = RMS | {"unit_offset": True, "cast": "after"}
LAYERNORM = {"kind": "layernorm", "eps": Key("attention.layer_norm_epsilon")}


def heads(**changes: Any) -> Json:
    """Rotary, causal, perhaps grouped heads; biases where the file has them."""
    return {
        "kind": "multi-head",
        "n_heads": HEADS,
        "n_kv_heads": Key("attention.head_count_kv", HEADS),
        "head_dim": Width(),
        "qkv_bias": Has("blk.0.attn_q.bias"),
        "o_bias": Has("blk.0.attn_output.bias"),
        "pattern": {"kind": "causal"},
        "positions": Rotate(),
        **changes,
    }


def gated(activation: str) -> Json:
    """A gated network."""
    return {
        "kind": "gated",
        "d_ff": Key("feed_forward_length"),
        "activation": activation,
        "bias": Has("blk.0.ffn_up.bias"),
    }


SWIGLU, GEGLU = gated("silu"), gated("gelu-tanh")
MIXTURE = {
    "kind": "mixture-of-experts", "n_experts": Key("expert_count"), "top_k": Key("expert_used_count"),
    "d_ff": Key("feed_forward_length"), "activation": "silu", "score": "softmax", "normalize": True,
}  # fmt: skip


def model(decoder: Any, **changes: Any) -> Json:
    """A decoder with a head that is the token table where the file has no other."""
    return {
        "vocab_size": Rows("token_embd.weight", "vocab_size"),
        "d_model": Key("embedding_length"),
        "max_seq_len": Key("context_length"),
        "embedding": {},
        "decoder": decoder,
        "head": {"kind": "lm", "tied": Key(TIED)},
        **changes,
    }


def uniform(attention: Json, ffn: Any, norm: Json, residual: str = "pre") -> Json:
    """Equal layers and a last norm."""
    layer = {"attention": attention, "ffn": ffn, "norm": norm, "residual": {"kind": residual}}
    return {"n_layers": N_LAYERS, "layers": [layer], "norm": norm}


def windowed(local: Json, whole: Json, order: Windows) -> Layers:
    """Gemma's layers with a window among such as see all."""
    layer = {"ffn": GEGLU, "norm": GEMMA_NORM, "residual": {"kind": "sandwich"}}
    window = {"kind": "sliding-window", "window": Key("attention.sliding_window"), "sinks": 0}
    kinds = {"local": {"attention": local | {"pattern": window}, **layer}, "whole": {"attention": whole, **layer}}
    return Layers(N_LAYERS, order, kinds, GEMMA_NORM)


def renamed(theirs: str, ours: str, *ops: Op, kinds: tuple[str, ...] = ("weight", "bias")) -> tuple[Rule, ...]:
    """A layer's or the model's weight and bias; a rule applies where the config has the tensor."""
    return tuple(Rule(f"{theirs}.{kind}", f"{ours}.{kind}", *ops) for kind in kinds)


def projections(stack: str, *rotated: Op) -> tuple[Rule, ...]:
    """Queries, keys and values of one layer, with what is done to queries and keys."""
    blk, our = "blk.{i}", f"{stack}.layers.{{i}}.attention"
    return (
        *renamed(f"{blk}.attn_q", f"{our}.q_proj", *rotated),
        *renamed(f"{blk}.attn_k", f"{our}.k_proj", *rotated),
        *renamed(f"{blk}.attn_v", f"{our}.v_proj"),
    )


def outputs(stack: str) -> tuple[Rule, ...]:
    """What follows them in a layer."""
    blk, our = "blk.{i}", f"{stack}.layers.{{i}}"
    return (
        *renamed(f"{blk}.attn_output", f"{our}.attention.o_proj"),
        *renamed(f"{blk}.ffn_gate", f"{our}.ffn.gate_proj"),
        *renamed(f"{blk}.ffn_up", f"{our}.ffn.up_proj"),
        *renamed(f"{blk}.ffn_down", f"{our}.ffn.down_proj"),
    )


def norm_rules(pairs: dict[str, str], *ops: Op) -> tuple[Rule, ...]:
    """Norms by their names, and the last one."""
    return tuple(rule for theirs, ours in pairs.items() for rule in renamed(theirs, ours, *ops))


FRAME = (Rule("token_embd.weight", "embed.tokens.weight"), Rule("output.weight", "head.weight"))
LAST_NORM = {"output_norm": "decoder.norm"}
PRE_NORMS = {
    **LAST_NORM,
    "blk.{i}.attn_norm": "decoder.layers.{i}.attention_norm",
    "blk.{i}.ffn_norm": "decoder.layers.{i}.ffn_norm",
}
SANDWICH = {
    **PRE_NORMS,
    "blk.{i}.post_attention_norm": "decoder.layers.{i}.attention_post_norm",
    "blk.{i}.post_ffw_norm": "decoder.layers.{i}.ffn_post_norm",
}
QK_NORMS = {
    "blk.{i}.attn_q_norm": "decoder.layers.{i}.attention.q_norm",
    "blk.{i}.attn_k_norm": "decoder.layers.{i}.attention.k_norm",
}
POST_NORMS = {
    "token_embd_norm": "embed.norm",
    "blk.{i}.attn_output_norm": "encoder.layers.{i}.attention_norm",
    "blk.{i}.layer_output_norm": "encoder.layers.{i}.ffn_norm",
}
EXPERTS = (
    Rule("blk.{i}.ffn_gate_inp.weight", "decoder.layers.{i}.ffn.router.weight"),
    *(
        Rule(f"blk.{{i}}.ffn_{part}_exps.weight", f"decoder.layers.{{i}}.ffn.experts.{part}_proj")
        for part in ("gate", "up", "down")
    ),
)
OLDER_EXPERTS = tuple(
    Rule(f"blk.{{i}}.ffn_{part}.{{e}}.weight", f"decoder.layers.{{i}}.ffn.experts.{part}_proj", Stack())
    for part in ("gate", "up", "down")
)
FREQUENCIES = Ignored("|".join(map(re.escape, DIVISORS.values())), "read into the config")

_GEMMA = {"embedding": {"scale": "sqrt_d_model"}}
_fused = tuple(f"decoder.layers.{{i}}.attention.{part}_proj" for part in "qkv")

ARCHITECTURES = (
    Architecture(
        "qwen2",
        model(uniform(heads(qkv_bias=True, o_bias=False), SWIGLU, RMS)),
        (*FRAME, *projections("decoder"), *outputs("decoder"), *norm_rules(PRE_NORMS)),
        free=FREE,
        ignored=(FREQUENCIES,),
    ),
    Architecture(
        "qwen3",
        model(uniform(heads(qk_norm=RMS), SWIGLU, RMS)),
        (*FRAME, *projections("decoder"), *outputs("decoder"), *norm_rules(PRE_NORMS | QK_NORMS)),
        free=FREE,
        ignored=(FREQUENCIES,),
    ),
    # Queries and keys come with their rows in pairs: this architecture's files alone are permuted.
    Architecture(
        "llama",
        model(
            uniform(
                heads(positions=Rotate(whole=True)),
                Case("expert_count", {0: SWIGLU}, default=0, otherwise=MIXTURE),
                RMS,
            )
        ),
        (*FRAME, *projections("decoder", FromPairs()), *outputs("decoder"), *EXPERTS, *norm_rules(PRE_NORMS)),
        free=(*FREE, "expert_used_count"),
        ignored=(FREQUENCIES,),
        older=OLDER_EXPERTS,
    ),
    # Queries, keys and values lie one after the other in one tensor, gate and up in another.
    Architecture(
        "phi3",
        model(
            uniform(
                heads(qkv_bias=False, o_bias=False, pattern=Window(), positions=Rotate(long=True)),
                SWIGLU | {"bias": False},
                RMS,
            )
        ),
        (
            *FRAME,
            Rule("blk.{i}.attn_qkv.weight", tuple(f"{name}.weight" for name in _fused), Split()),
            Rule("blk.{i}.attn_output.weight", "decoder.layers.{i}.attention.o_proj.weight"),
            Rule(
                "blk.{i}.ffn_up.weight",
                tuple(f"decoder.layers.{{i}}.ffn.{part}_proj.weight" for part in ("gate", "up")),
                Split(),
            ),
            Rule("blk.{i}.ffn_down.weight", "decoder.layers.{i}.ffn.down_proj.weight"),
            *norm_rules(PRE_NORMS),
        ),
        free=FREE,
        ignored=(FREQUENCIES,),
    ),
    Architecture(
        "gemma",
        model(uniform(heads(), GEGLU, GEMMA_NORM), **_GEMMA),
        (*FRAME, *projections("decoder"), *outputs("decoder"), *norm_rules(PRE_NORMS, PlusOne())),
        free=FREE,
    ),
    Architecture(
        "gemma2",
        model(
            windowed(
                heads(softcap=Key("attn_logit_softcapping", None), scale=GemmaScale(46)),
                heads(softcap=Key("attn_logit_softcapping", None), scale=GemmaScale(46)),
                Windows(2),
            ),
            head={"kind": "lm", "tied": Key(TIED), "softcap": Key("final_logit_softcapping", None)},
            **_GEMMA,
        ),
        (*FRAME, *projections("decoder"), *outputs("decoder"), *norm_rules(SANDWICH, PlusOne())),
        free=(*FREE, "attention.sliding_window"),
    ),
    Architecture(
        "gemma3",
        model(
            windowed(
                heads(qk_norm=GEMMA_NORM, scale=GemmaScale(62), positions=Rotate("rope.freq_base_swa", scaled=False)),
                heads(qk_norm=GEMMA_NORM, scale=GemmaScale(62), positions=Rotate(theta=1e6)),
                Windows(6),
            ),
            head={"kind": "lm", "tied": Key(TIED), "softcap": Key("final_logit_softcapping", None)},
            **_GEMMA,
        ),
        (*FRAME, *projections("decoder"), *outputs("decoder"), *norm_rules(SANDWICH | QK_NORMS, PlusOne())),
        free=(*FREE, "attention.sliding_window", "rope.freq_base", "rope.freq_base_swa"),
    ),
    Architecture(
        "gpt2",
        {
            "vocab_size": Rows("token_embd.weight", "vocab_size"),
            "d_model": Key("embedding_length"),
            "max_seq_len": Key("context_length"),
            "embedding": {"positions": {"kind": "learned"}},
            "decoder": uniform(
                heads(qkv_bias=True, o_bias=True, positions={"kind": "none"}),
                {"kind": "dense", "d_ff": Key("feed_forward_length"), "activation": "gelu-tanh", "bias": True},
                LAYERNORM,
            ),
            "head": {"kind": "lm", "tied": Key(TIED)},
            "init": {"kind": "gpt2"},
        },
        (
            *FRAME,
            Rule("position_embd.weight", "embed.positions.weight"),
            *(
                Rule(f"blk.{{i}}.attn_qkv.{kind}", tuple(f"{name}.{kind}" for name in _fused), Split())
                for kind in ("weight", "bias")
            ),
            *outputs("decoder"),
            *norm_rules(PRE_NORMS),
        ),
        free=FREE,
    ),
    Architecture(
        "bert",
        {
            "vocab_size": Rows("token_embd.weight", "vocab_size"),
            "d_model": Key("embedding_length"),
            "max_seq_len": Key("context_length"),
            "embedding": {
                "positions": {"kind": "learned"},
                "n_segments": Rows("token_types.weight"),
                "norm": LAYERNORM,
            },
            "encoder": uniform(
                heads(qkv_bias=True, o_bias=True, positions={"kind": "none"}, pattern={"kind": "bidirectional"}),
                {"kind": "dense", "d_ff": Key("feed_forward_length"), "activation": "gelu", "bias": True},
                LAYERNORM,
                "post",
            )
            | {"norm": {"kind": "none"}},
            "head": {"kind": "none"},
            "init": {"kind": "bert"},
        },
        (
            Rule("token_embd.weight", "embed.tokens.weight"),
            Rule("position_embd.weight", "embed.positions.weight"),
            Rule("token_types.weight", "embed.segments.weight"),
            *projections("encoder"),
            *outputs("encoder"),
            *norm_rules(POST_NORMS),
        ),
        must=(("attention.causal", False),),
        free=(*FREE, "pooling_type"),
    ),
)
"""Every architecture that is read and written; of several that fit a model the first is written."""
