"""What BERT and its kin share: the template of a post-norm encoder, its heads, and rules under BERT's names."""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families.common import ACTIVATIONS
from qkv.checkpoint.families.leaves_encoders import Classes, Segments
from qkv.checkpoint.rules import Ignored, Rule, Spelling
from qkv.checkpoint.template import Json, Key, Quotient

NORM = {"kind": "layernorm", "eps": Key("layer_norm_eps", 1e-12)}
DROPOUT = Key("hidden_dropout_prob", 0.1)
ACTIVATION = Key("hidden_act", "gelu", ACTIVATIONS)

MUST = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
TIED_MUST = {**MUST, "tie_word_embeddings": True}
FREE = (
    "_num_labels", "classifier_dropout", "directionality", "num_labels", "pooler_fc_size", "pooler_num_attention_heads",
    "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "tie_word_embeddings",
)  # fmt: skip

BUFFERS = Ignored(r".*embeddings\.(position_ids|token_type_ids)", "numbers 0, 1, 2 ..., and zeros")
OLD_NORMS = (
    Spelling(r"(?<=[Nn]orm\.)gamma$", "weight"),
    Spelling(r"(?<=[Nn]orm\.)beta$", "bias"),
)
"""TensorFlow's names, kept by the first converted files."""


def unprefixed(model: str) -> tuple[Spelling, ...]:
    """For a bare model: files of the model with a head put its tensors below a prefix."""
    return (Spelling(rf"^{model}\.", ""), *OLD_NORMS)


def prefixed(model: str) -> tuple[Spelling, ...]:
    """For a model with a head: files of the bare model lack the prefix."""
    return (Spelling(r"^(?=(embeddings|encoder|pooler|transformer)\.)", f"{model}."), *OLD_NORMS)


def attention(**changes: Any) -> Json:
    """BERT's attention, with changes."""
    return {
        "kind": "multi-head",
        "n_heads": Key("num_attention_heads"),
        "head_dim": Quotient("hidden_size", "num_attention_heads"),
        "qkv_bias": True,
        "o_bias": True,
        "dropout": Key("attention_probs_dropout_prob", 0.1),
        "pattern": {"kind": "bidirectional"},
        **changes,
    }


def block(heads: Json) -> Json:
    """One layer around this attention."""
    return {
        "attention": heads,
        "ffn": {"kind": "dense", "d_ff": Key("intermediate_size"), "activation": ACTIVATION, "bias": True},
        "norm": NORM,
        "residual": {"kind": "post"},
        "dropout": DROPOUT,
    }


def embedding(positions: Any, **changes: Any) -> Json:
    """norm(token + position + segment)."""
    return {"positions": positions, "n_segments": Segments(), "norm": NORM, "dropout": DROPOUT, **changes}


def model(head: Json, *, embed: Json, layers: Any, d_model: Any = None, length: Any = None) -> Json:
    """The whole template; `layers` is a list of blocks, or a leaf that gives one."""
    return {
        "vocab_size": Key("vocab_size"),
        "d_model": Key("hidden_size") if d_model is None else d_model,
        "max_seq_len": Key("max_position_embeddings", 512) if length is None else length,
        "encoder": {"n_layers": Key("num_hidden_layers"), "layers": layers},
        "embedding": embed,
        "head": head,
        "init": {"kind": "bert", "std": Key("initializer_range", 0.02)},
    }


_HEAD_DROPOUT = Key("classifier_dropout", DROPOUT)
NO_HEAD = {"kind": "none"}
POOLER = {"kind": "pooler"}
NEXT_SENTENCE = {"kind": "next-sentence"}
SPAN = {"kind": "span"}
TOKENS = {"kind": "token-classifier", "n_classes": Classes(), "dropout": _HEAD_DROPOUT}
SEQUENCE = {
    "kind": "classifier", "n_classes": Classes(), "pooling": "first", "hidden": "tanh", "bias": True,
    "dropout": _HEAD_DROPOUT,
}  # fmt: skip


def classifier(activation: Any) -> Json:
    """A sequence classifier whose dense layer has the activation of the others."""
    return {**SEQUENCE, "hidden": activation}


def masked(activation: Any = ACTIVATION) -> Json:
    """The masked-LM head; RoBERTa's activation is fixed."""
    return {"kind": "masked-lm", "tied": True, "activation": activation, "norm": NORM}


def dense(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Weight and bias of a layer or norm."""
    return tuple(Rule(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in ("weight", "bias"))


_LAYER = {
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.self.query_global": "attention.q_global_proj",
    "attention.self.key_global": "attention.k_global_proj",
    "attention.self.value_global": "attention.v_global_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "ffn.up_proj",
    "output.dense": "ffn.down_proj",
    "output.LayerNorm": "ffn_norm",
}


def encoder(prefix: str) -> tuple[Rule, ...]:
    """Embedding and layers below `prefix` ("bert." or nothing)."""
    tables = {"word": "tokens", "position": "positions", "token_type": "segments"}
    return (
        *(Rule(f"{prefix}embeddings.{t}_embeddings.weight", f"embed.{o}.weight") for t, o in tables.items()),
        *dense(f"{prefix}embeddings.LayerNorm", "embed.norm"),
        *(
            rule
            for theirs, ours in _LAYER.items()
            for rule in dense(f"{prefix}encoder.layer.{{i}}.{theirs}", f"encoder.layers.{{i}}.{ours}")
        ),
    )


CLS = (
    *dense("cls.predictions.transform.dense", "head.transform"),
    *dense("cls.predictions.transform.LayerNorm", "head.norm"),
    Rule("cls.predictions.bias", "head.bias"),
)
"""BERT's masked-LM head."""
LM_HEAD = (
    *dense("lm_head.dense", "head.transform"),
    *dense("lm_head.layer_norm", "head.norm"),
    Rule("lm_head.bias", "head.bias"),
)
"""RoBERTa's masked-LM head."""
