"""BART and Marian: the Transformer of 2017 with biases everywhere, and one token table for source, target and head.

BART (Lewis 2019, arXiv 1910.13461) has learned positions that start at row 2 and a norm after each embedding, so that
source and target share the tokens only. Marian (OPUS-MT) has sinusoids, sines before cosines, and no such norm:
there is nothing that source and target could differ in, unless they have a vocabulary each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.families.common import ACTIVATIONS
from qkv.checkpoint.families.leaves_encoders import Agreeing, Classes
from qkv.checkpoint.ops import Reshape
from qkv.checkpoint.rules import Fallback, Ignored, Rule, Tied
from qkv.checkpoint.template import Family, Json, Key, Quotient

NORM = {"kind": "layernorm", "eps": 1e-5}  # no key says it
DROPOUT = Key("dropout", 0.1)


def _heads(stack: str, pattern: str) -> Json:
    return {
        "kind": "multi-head",
        "n_heads": Key(f"{stack}_attention_heads"),
        "head_dim": Quotient("d_model", f"{stack}_attention_heads"),
        "qkv_bias": True,
        "o_bias": True,
        "dropout": Key("attention_dropout", 0.0),
        "pattern": {"kind": pattern},
    }


def _stack(stack: str, **attention: Json) -> Json:
    layer = {
        **attention,
        "ffn": {
            "kind": "dense",
            "d_ff": Key(f"{stack}_ffn_dim"),
            "activation": Key("activation_function", "gelu", ACTIVATIONS),
            "bias": True,
            "dropout": Key("activation_dropout", 0.0),
        },
        "norm": NORM,
        "residual": {"kind": "post"},
        "dropout": DROPOUT,
    }
    return {"n_layers": Key(f"{stack}_layers"), "layers": [layer]}


def _template(head: Json, embedding: Json, sharing: Any, vocab_size: Any) -> Json:
    return {
        "vocab_size": vocab_size,
        "d_model": Key("d_model"),
        "max_seq_len": Key("max_position_embeddings", 1024),
        "embedding": {
            "scale": Key("scale_embedding", 1.0, {False: 1.0, True: "sqrt_d_model"}),
            "dropout": DROPOUT,
            **embedding,
        },
        "encoder": _stack("encoder", attention=_heads("encoder", "bidirectional")),
        "decoder": _stack(
            "decoder", attention=_heads("decoder", "causal"), cross_attention=_heads("decoder", "bidirectional")
        ),
        "sharing": sharing,
        "head": head,
        "init": {"kind": "llama", "std": Key("init_std", 0.02)},
    }


_LAYER = {
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.out_proj": "attention.o_proj",
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn.q_proj": "cross_attention.q_proj",
    "encoder_attn.k_proj": "cross_attention.k_proj",
    "encoder_attn.v_proj": "cross_attention.v_proj",
    "encoder_attn.out_proj": "cross_attention.o_proj",
    "encoder_attn_layer_norm": "cross_attention_norm",
    "fc1": "ffn.up_proj",
    "fc2": "ffn.down_proj",
    "final_layer_norm": "ffn_norm",
}


def _dense(theirs: str, ours: str) -> tuple[Rule, ...]:
    return tuple(Rule(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in ("weight", "bias"))


def _layers(prefix: str) -> tuple[Rule, ...]:
    """Both stacks; an encoder has no cross-attention, so those rules apply nowhere in it."""
    return tuple(
        rule
        for stack in ("encoder", "decoder")
        for theirs, ours in _LAYER.items()
        for rule in _dense(f"{prefix}{stack}.layers.{{i}}.{theirs}", f"{stack}.layers.{{i}}.{ours}")
    )


def _bart_rules(prefix: str) -> tuple[Rule, ...]:
    embeddings = (("encoder", "embed"), ("decoder", "target_embed"))
    return (
        Rule(f"{prefix}shared.weight", "embed.tokens.weight"),
        *(Rule(f"{prefix}{stack}.embed_positions.weight", f"{ours}.positions.weight") for stack, ours in embeddings),
        *(r for stack, ours in embeddings for r in _dense(f"{prefix}{stack}.layernorm_embedding", f"{ours}.norm")),
        *_layers(prefix),
    )


def _copies(prefix: str) -> tuple[Tied, ...]:
    return tuple(Tied(f"{prefix}{stack}.embed_tokens.weight", f"{prefix}shared.weight") for stack in _STACKS)


_STACKS = ("encoder", "decoder")
_MUST = {
    "add_bias_logits": False, "add_final_layer_norm": False, "is_decoder": False, "normalize_before": False,
    "tie_word_embeddings": True,
}  # fmt: skip
_FREE = (
    "_num_labels", "classif_dropout", "classifier_dropout", "decoder_layerdrop", "encoder_layerdrop",
    "extra_pos_embeddings", "num_hidden_layers", "num_labels", "save_step",
)  # fmt: skip
_VERSION = Ignored(r"(model\.)?(encoder|decoder)\.version", "fairseq's mark")
_LM_HEAD = (Rule("final_logits_bias", "head.bias", Reshape((1, -1))),)
_LM = {"kind": "lm", "tied": True, "bias": True, "scale": 1.0}


def _bart(name: str, architecture: str, head: Json, rules: tuple[Rule, ...]) -> Family:
    """BART with one of its heads."""
    prefix = "" if architecture == "BartModel" else "model."
    embedding = {"positions": {"kind": "learned", "offset": 2}, "norm": NORM}
    return Family(
        name=name,
        model_types=("bart",),
        architecture=architecture,
        template=_template(head, embedding, "tokens", Key("vocab_size")),
        rules=(*_bart_rules(prefix), *rules),
        must={**_MUST, "normalize_embedding": True, "static_position_embeddings": False},
        free=_FREE,
        ignored=(_VERSION,),
        tied=(*_copies(prefix), Tied("lm_head.weight", f"{prefix}shared.weight")),
    )


# The classifier reads the decoder's state at the last token, the end of the text.
_CLASSIFIER = {
    "kind": "classifier", "n_classes": Classes(3), "pooling": "last", "hidden": "tanh", "bias": True,
    "dropout": Key("classifier_dropout", 0.0),
}  # fmt: skip
_CLASSIFIER_RULES = (
    *_dense("classification_head.dense", "head.pooler"),
    *_dense("classification_head.out_proj", "head.classifier"),
)


@dataclass(frozen=True)
class _Vocabulary(Agreeing):
    """Marian's vocabulary, whose last entry pads, and starts the decoder: the peer's own defaults lie far outside."""

    def write(self, value: Any, out: Json) -> None:
        super().write(value, out)
        out["pad_token_id"] = out["decoder_start_token_id"] = value - 1


def _marian(name: str, architecture: str, head: Json, rules: tuple[Rule, ...]) -> Family:
    """Marian with or without its head."""
    prefix = "" if architecture == "MarianModel" else "model."
    own_target = "target_embed.tokens.weight"
    sharing = Key("share_encoder_decoder_embeddings", "all", {True: "all", False: "none"})
    embedding = {"positions": {"kind": "sinusoidal", "theta": 10_000.0, "layout": "halves"}}
    return Family(
        name=name,
        model_types=("marian",),
        architecture=architecture,
        template=_template(head, embedding, sharing, _Vocabulary("vocab_size", ("decoder_vocab_size",))),
        rules=(
            Rule(f"{prefix}shared.weight", "embed.tokens.weight", unless=own_target),
            Rule(
                tuple(f"{prefix}{stack}.embed_tokens.weight" for stack in _STACKS),
                ("embed.tokens.weight", own_target),
            ),
            *_layers(prefix),
            *rules,
        ),
        must={**_MUST, "normalize_embedding": False, "static_position_embeddings": True},
        free=_FREE,
        ignored=(
            _VERSION,
            Ignored(r"(model\.)?(encoder|decoder)\.embed_positions\.weight", "sines and cosines, computed from theta"),
        ),
        tied=(*_copies(prefix), Tied("lm_head.weight", f"{prefix}decoder.embed_tokens.weight")),
        spellings=(Fallback(f"{prefix}decoder.embed_tokens.weight", f"{prefix}shared.weight"),),
    )


FAMILIES = (
    _bart("bart", "BartForConditionalGeneration", _LM, _LM_HEAD),
    _bart("bart-model", "BartModel", {"kind": "none"}, ()),
    _bart("bart-classifier", "BartForSequenceClassification", _CLASSIFIER, _CLASSIFIER_RULES),
    _bart("bart-span", "BartForQuestionAnswering", {"kind": "span"}, _dense("qa_outputs", "head.classifier")),
    _marian("marian", "MarianMTModel", _LM, _LM_HEAD),
    _marian("marian-model", "MarianModel", {"kind": "none"}, ()),
)
