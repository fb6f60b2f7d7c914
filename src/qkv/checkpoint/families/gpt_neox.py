"""GPT-NeoX and Pythia: attention and network read the same x through norms of their own, a quarter of each head turns.

Queries, keys and values lie together for each head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qkv.checkpoint.families.common import ACTIVATIONS
from qkv.checkpoint.ops import SplitHeads
from qkv.checkpoint.rope import Rope
from qkv.checkpoint.rules import Ignored, Rule, Tied
from qkv.checkpoint.template import Case, Family, Json, Key, Keys, Quotient
from qkv.errors import CheckpointError

NORM = {"kind": "layernorm", "eps": Key("layer_norm_eps", 1e-5)}


@dataclass(frozen=True)
class NeoxRope(Rope):
    """Rotary positions under names of their own; releases from 4.45 on write the common names beside them."""

    fraction: str | None = "rotary_pct"
    default_fraction: float = 0.25

    def read(self, keys: Keys) -> Json:
        for ours, theirs in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
            common, own = keys.get(ours, None), keys.get(theirs, None)
            if None not in (common, own) and common != own:
                raise CheckpointError(f"{keys.name}: {ours} is {common!r}, but {theirs}, its other name, is {own!r}")
        named = self.fraction if keys.get("rotary_pct", None) is not None else "partial_rotary_factor"
        return Rope.read(replace(self, theta=keys.get("rotary_emb_base", self.theta), fraction=named), keys)

    def write(self, value: Any, out: Json) -> None:
        super().write(value, out)
        out["rotary_emb_base"] = out.pop("rope_theta")


_QKV = tuple(f"decoder.layers.{{i}}.attention.{name}_proj" for name in "qkv")
_LAYER = (
    ("attention.dense", "attention.o_proj"),
    ("mlp.dense_h_to_4h", "ffn.up_proj"),
    ("mlp.dense_4h_to_h", "ffn.down_proj"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
)
_BIAS = Key("attention_bias", True)
_DROPOUT = Key("hidden_dropout", Key("hidden_dropout_prob", 0.0))  # the 20B model's name

FAMILIES = (
    Family(
        name="gpt-neox",
        model_types=("gpt_neox",),
        architecture="GPTNeoXForCausalLM",
        template={
            "vocab_size": Key("vocab_size"),
            "d_model": Key("hidden_size"),
            "max_seq_len": Key("max_position_embeddings"),
            "embedding": {"dropout": _DROPOUT},
            "decoder": {
                "n_layers": Key("num_hidden_layers"),
                "layers": [
                    {
                        "attention": {
                            "kind": "multi-head",
                            "n_heads": Key("num_attention_heads"),
                            "head_dim": Quotient("hidden_size", "num_attention_heads"),
                            "qkv_bias": _BIAS,
                            "o_bias": _BIAS,
                            "dropout": Key("attention_dropout", Key("attention_probs_dropout_prob", 0.0)),
                            "pattern": {"kind": "causal"},
                            "positions": NeoxRope(),
                        },
                        "ffn": {
                            "kind": "dense",
                            "d_ff": Key("intermediate_size"),
                            "activation": Key("hidden_act", "gelu", ACTIVATIONS),
                            "bias": True,
                        },
                        "norm": NORM,
                        "residual": Case(
                            "use_parallel_residual",
                            {True: {"kind": "parallel", "shared_norm": False}, False: {"kind": "pre"}},
                            default=True,
                        ),
                        "dropout": _DROPOUT,
                    }
                ],
                "norm": NORM,
            },
            "head": {"kind": "lm", "tied": Key("tie_word_embeddings", False)},
            "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
        },
        rules=(
            Rule("gpt_neox.embed_in.weight", "embed.tokens.weight"),
            *(
                Rule(
                    f"gpt_neox.layers.{{i}}.attention.query_key_value.{kind}",
                    tuple(f"{name}.{kind}" for name in _QKV),
                    SplitHeads(),
                )
                for kind in ("weight", "bias")
            ),
            *(
                Rule(f"gpt_neox.layers.{{i}}.{theirs}.{kind}", f"decoder.layers.{{i}}.{ours}.{kind}")
                for theirs, ours in _LAYER
                for kind in ("weight", "bias")
            ),
            *(Rule(f"gpt_neox.final_layer_norm.{kind}", f"decoder.norm.{kind}") for kind in ("weight", "bias")),
            Rule("embed_out.weight", "head.weight"),
        ),
        free=("classifier_dropout",),
        ignored=(
            Ignored(r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias", "the causal mask"),
            Ignored(r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\..*", "computed from theta"),
        ),
        tied=(Tied("embed_out.weight", "gpt_neox.embed_in.weight"),),
    ),
)
