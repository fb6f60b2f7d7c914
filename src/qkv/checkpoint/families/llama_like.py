"""Pieces of the many templates that begin as Llama's: RMS norms, rotary positions, a gated network, no biases.

Each piece is a function that gives a fresh table, in which a family replaces what differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.families.common import ACTIVATIONS, LLAMA_FRAME, LLAMA_LAYER
from qkv.checkpoint.rope import Rope
from qkv.checkpoint.rules import Ignored, Rule, Tied
from qkv.checkpoint.template import Json, Key, Keys, Leaf, Quotient

N_LAYERS = Key("num_hidden_layers")
NORM = {"kind": "rmsnorm", "eps": Key("rms_norm_eps", 1e-6), "unit_offset": False, "cast": "before"}
SLIDING = {"kind": "sliding-window", "window": Key("sliding_window")}

PRE_NORMS = (
    Rule("model.layers.{i}.input_layernorm.weight", "decoder.layers.{i}.attention_norm.weight"),
    Rule("model.layers.{i}.post_attention_layernorm.weight", "decoder.layers.{i}.ffn_norm.weight"),
)
QK_NORMS = tuple(
    Rule(f"model.layers.{{i}}.self_attn.{name}.weight", f"decoder.layers.{{i}}.attention.{name}.weight")
    for name in ("q_norm", "k_norm")
)
RULES = (*LLAMA_FRAME, *LLAMA_LAYER, *PRE_NORMS)
IGNORED = (Ignored(r".*rotary_emb\.inv_freq", "computed from theta"),)
TIED = (Tied("lm_head.weight", "model.embed_tokens.weight"),)


@dataclass(frozen=True)
class KvHeads(Leaf):
    """The number of key-value heads; several releases of the peer refuse null here, so that a number is written."""

    def read(self, keys: Keys) -> Any:
        return keys.get("num_key_value_heads", Key("num_attention_heads"))

    def write(self, value: Any, out: Json) -> None:
        out["num_key_value_heads"] = out["num_attention_heads"] if value is None else value


@dataclass(frozen=True)
class OrNull(Leaf):
    """A key of which null says `not at all`, and absence something else."""

    name: str
    absent: Any = None

    def read(self, keys: Keys) -> Any:
        keys.read.add(self.name)
        return keys.data.get(self.name, self.absent)

    def write(self, value: Any, out: Json) -> None:
        out[self.name] = value


@dataclass(frozen=True)
class Window(Leaf):
    """The pattern of all layers: a sliding window, or causal where the key is null."""

    absent: int | None = None

    def read(self, keys: Keys) -> Json:
        window = OrNull("sliding_window", self.absent).read(keys)
        return {"kind": "causal"} if window is None else {"kind": "sliding-window", "window": window}

    def write(self, value: Any, out: Json) -> None:
        out["sliding_window"] = value.get("window")


def heads(**changes: Any) -> Json:
    """Multi-head attention with grouped keys."""
    return {
        "kind": "multi-head",
        "n_heads": Key("num_attention_heads"),
        "n_kv_heads": KvHeads(),
        "head_dim": Key("head_dim", Quotient("hidden_size", "num_attention_heads")),
        "dropout": Key("attention_dropout", 0.0),
        "pattern": {"kind": "causal"},
        "positions": Rope(),
        **changes,
    }


def gated(**changes: Any) -> Json:
    """A gated network without biases."""
    activation = Key("hidden_act", "silu", ACTIVATIONS)
    return {"kind": "gated", "d_ff": Key("intermediate_size"), "activation": activation, "bias": False, **changes}


def block(attention: Json, **changes: Any) -> Json:
    """A pre-norm layer."""
    return {"attention": attention, "ffn": gated(), "norm": NORM, "residual": {"kind": "pre"}, **changes}


def model(decoder: Json | Leaf, **changes: Any) -> Json:
    """A language model."""
    return {
        "vocab_size": Key("vocab_size"),
        "d_model": Key("hidden_size"),
        "max_seq_len": Key("max_position_embeddings"),
        "embedding": {},
        "decoder": decoder,
        "head": {"kind": "lm", "tied": Key("tie_word_embeddings", False)},
        "init": {"kind": "llama", "std": Key("initializer_range", 0.02)},
        **changes,
    }


def uniform(layer: Json, **changes: Any) -> Json:
    """A language model whose layers are alike."""
    return model({"n_layers": N_LAYERS, "layers": [layer], "norm": layer["norm"]}, **changes)
