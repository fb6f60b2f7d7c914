"""Transformer-XL (Dai 2019, arXiv 1901.02860): sinusoids of the distance, adaptive embedding and softmax.

The fused matrix holds all queries, then all keys, then all values; `r_w_bias` is the paper's u, `r_r_bias` its v. With
`div_val` 1 all clusters are as wide as the model: one table, no projections, and each cluster's matrix is a part of
it. A model with `same_length` sees the last `mem_len` tokens, its own included, however a text is cut into segments:
that is a sliding window. Without it the reach depends on how a text is cut; ours is read whole, as with `mem_len` 0.
The peer's first segment attends to a memory of zero vectors, which takes part in its softmax; ours, like the authors'
code, begins without a memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.families.leaves_old import Alias, Same
from qkv.checkpoint.ops import Split
from qkv.checkpoint.rules import Ignored, Rule, Tied
from qkv.checkpoint.template import Case, Family, Json, Key, Keys, Leaf
from qkv.errors import CheckpointError

NORM = {"kind": "layernorm", "eps": Key("layer_norm_epsilon", 1e-5)}
DROPOUT = Key("dropout", 0.1)
TIED = Alias(("tie_word_embeddings", "tie_weight"), True)


@dataclass(frozen=True)
class _Reach(Leaf):
    """The pattern: a window of `mem_len` tokens with `same_length`, all of the past without."""

    def read(self, keys: Keys) -> Json:
        memory, same = keys.get("mem_len", 1600), keys.get("same_length", True)
        if not same:
            return {"kind": "causal"}
        if memory < 1:
            raise CheckpointError(f"{keys.name}: same_length needs a mem_len of 1 or more, got {memory}")
        return {"kind": "sliding-window", "window": memory}

    def write(self, value: Any, out: Json) -> None:
        out["same_length"] = value["kind"] == "sliding-window"
        out["mem_len"] = value.get("window", 0)


@dataclass(frozen=True)
class _Clamp(Leaf):
    """The largest distance; not above 0 for none."""

    def read(self, keys: Keys) -> int | None:
        clamp: int = keys.get("clamp_len", 1000)
        return clamp if clamp > 0 else None

    def write(self, value: Any, out: Json) -> None:
        out["clamp_len"] = -1 if value is None else value


@dataclass(frozen=True)
class _TiedProjections(Leaf):
    """For each cluster, whether the softmax has the embedding's projection; files say it in one of two ways."""

    def read(self, keys: Keys) -> list[bool]:
        shared = keys.get("proj_share_all_but_first", True)
        tied: list[bool] = keys.get("tie_projs", [False] + [shared] * len(keys.get("cutoffs")))
        return tied

    def write(self, value: Any, out: Json) -> None:
        tied = list(value or [])
        out["tie_projs"] = tied + [False] * (len(out.get("cutoffs") or ()) + 1 - len(tied))
        out["proj_share_all_but_first"] = all(out["tie_projs"][1:])


_CLUSTERS = {"kind": "adaptive", "cutoffs": Key("cutoffs"), "tied": TIED}
_XL = {"kind": "transformer-xl", "theta": 10_000.0, "clamp": _Clamp()}
TEMPLATE = {
    "vocab_size": Key("vocab_size"),
    "d_model": Same("d_model", "d_embed"),
    "max_seq_len": Key("tgt_len", 128),
    "embedding": {
        "tokens": Case(
            "div_val",
            {1: {"kind": "full"}},
            default=4,
            otherwise={"kind": "adaptive", "cutoffs": Key("cutoffs"), "divisor": Key("div_val", 4)},
        ),
        "scale": "sqrt_d_model",
        "dropout": DROPOUT,
    },
    "decoder": {
        "n_layers": Key("n_layer"),
        "layers": [
            {
                "attention": {
                    "kind": "multi-head",
                    "n_heads": Key("n_head"),
                    "head_dim": Key("d_head"),
                    "dropout": Key("dropatt", 0.0),
                    "pattern": _Reach(),
                    "positions": _XL,
                },
                "ffn": {
                    "kind": "dense",
                    "d_ff": Key("d_inner"),
                    "activation": "relu",
                    "bias": True,
                    "dropout": DROPOUT,
                },
                "norm": NORM,
                "residual": {"kind": Key("pre_lnorm", "post", {False: "post", True: "pre"})},
                "dropout": DROPOUT,
            }
        ],
    },
    "head": Case(
        "div_val",
        {1: {**_CLUSTERS, "divisor": 1, "projected": False}},
        default=4,
        otherwise={**_CLUSTERS, "divisor": Key("div_val", 4), "tied_projections": _TiedProjections()},
    ),
    "init": {"kind": "llama", "std": Key("init_std", 0.02)},
}

_FULL, _ADAPTIVE = "embed.tokens.weight", "embed.tokens.clusters.0.weight"
_LAYER = {
    "dec_attn.o_net.weight": "attention.o_proj.weight",
    "dec_attn.r_net.weight": "attention.positions.r_proj.weight",
    "dec_attn.r_w_bias": "attention.positions.u",
    "dec_attn.r_r_bias": "attention.positions.v",
    "dec_attn.layer_norm.weight": "attention_norm.weight",
    "dec_attn.layer_norm.bias": "attention_norm.bias",
    "pos_ff.CoreNet.0.weight": "ffn.up_proj.weight",
    "pos_ff.CoreNet.0.bias": "ffn.up_proj.bias",
    "pos_ff.CoreNet.3.weight": "ffn.down_proj.weight",
    "pos_ff.CoreNet.3.bias": "ffn.down_proj.bias",
    "pos_ff.layer_norm.weight": "ffn_norm.weight",
    "pos_ff.layer_norm.bias": "ffn_norm.bias",
}
_RULES = (
    Rule("transformer.word_emb.emb_layers.0.weight", _FULL),
    Rule("transformer.word_emb.emb_layers.{i}.weight", "embed.tokens.clusters.{i}.weight"),
    Rule("transformer.word_emb.emb_projs.{i}", "embed.tokens.projections.{i}.weight"),
    Rule(
        "transformer.layers.{i}.dec_attn.qkv_net.weight",
        tuple(f"decoder.layers.{{i}}.attention.{name}_proj.weight" for name in "qkv"),
        Split(),
    ),
    *(Rule(f"transformer.layers.{{i}}.{theirs}", f"decoder.layers.{{i}}.{ours}") for theirs, ours in _LAYER.items()),
    Rule("crit.cluster_weight", "head.cluster_weight"),
    Rule("crit.cluster_bias", "head.cluster_bias"),
    Rule("crit.out_layers.{i}.weight", "head.clusters.{i}.weight", unless=_FULL),
    Rule("crit.out_layers.{i}.bias", "head.biases.{i}", unless=_FULL),
    Rule("crit.out_layers.0.weight", "head.clusters.{c}.weight", Split(), unless=_ADAPTIVE),
    Rule("crit.out_layers.0.bias", "head.biases.{c}", Split(), unless=_ADAPTIVE),
    Rule("crit.out_projs.{i}", "head.projections.{i}.weight"),
)

FAMILIES = (
    Family(
        name="transformer-xl",
        model_types=("transfo-xl",),
        architecture="TransfoXLLMHeadModel",
        template=TEMPLATE,
        rules=_RULES,
        must={"attn_type": 0, "ext_len": 0, "sample_softmax": -1, "untie_r": True},
        # How the weights were drawn, and what the peer's code never reads. Without projections the two keys that tie
        # them are idle.
        free=(
            "adaptive", "init", "init_range", "proj_init_std", "proj_share_all_but_first", "tie_projs",
            "trainer_compatible",
        ),
        ignored=(Ignored(r"transformer\.pos_emb\.inv_freq", "computed from theta"),),
        tied=(
            Tied("crit.out_layers.{i}.weight", "transformer.word_emb.emb_layers.{i}.weight"),
            Tied("crit.out_projs.{i}", "transformer.word_emb.emb_projs.{i}"),
        ),
    ),
)  # fmt: skip
