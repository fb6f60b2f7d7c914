"""DistilBERT: BERT without segments and pooler, under names of its own (Sanh 2019, arXiv 1910.01108)."""

from __future__ import annotations

from qkv.checkpoint.families import bert_parts as parts
from qkv.checkpoint.families.common import ACTIVATIONS
from qkv.checkpoint.families.leaves_encoders import Classes
from qkv.checkpoint.rules import Rule, Tied
from qkv.checkpoint.template import Family, Json, Key, Quotient

NORM = {"kind": "layernorm", "eps": 1e-12}  # no key says it
DROPOUT = Key("dropout", 0.1)
ACTIVATION = Key("activation", "gelu", ACTIVATIONS)


def _template(head: Json) -> Json:
    return {
        "vocab_size": Key("vocab_size"),
        "d_model": Key("dim"),
        "max_seq_len": Key("max_position_embeddings", 512),
        # `sinusoidal_pos_embds` only says how the table started: it is stored either way.
        "embedding": {"positions": {"kind": "learned", "offset": 0}, "norm": NORM, "dropout": DROPOUT},
        "encoder": {
            "n_layers": Key("n_layers"),
            "layers": [
                {
                    "attention": {
                        "kind": "multi-head",
                        "n_heads": Key("n_heads"),
                        "head_dim": Quotient("dim", "n_heads"),
                        "qkv_bias": True,
                        "o_bias": True,
                        "dropout": Key("attention_dropout", 0.1),
                        "pattern": {"kind": "bidirectional"},
                    },
                    "ffn": {"kind": "dense", "d_ff": Key("hidden_dim"), "activation": ACTIVATION, "bias": True},
                    "norm": NORM,
                    "residual": {"kind": "post"},
                    "dropout": DROPOUT,
                }
            ],
        },
        "head": head,
        "init": {"kind": "bert", "std": Key("initializer_range", 0.02)},
    }


_LAYER = {
    "attention.q_lin": "attention.q_proj",
    "attention.k_lin": "attention.k_proj",
    "attention.v_lin": "attention.v_proj",
    "attention.out_lin": "attention.o_proj",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "ffn.up_proj",
    "ffn.lin2": "ffn.down_proj",
    "output_layer_norm": "ffn_norm",
}


def _encoder(prefix: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{prefix}embeddings.word_embeddings.weight", "embed.tokens.weight"),
        Rule(f"{prefix}embeddings.position_embeddings.weight", "embed.positions.weight"),
        *parts.dense(f"{prefix}embeddings.LayerNorm", "embed.norm"),
        *(
            rule
            for theirs, ours in _LAYER.items()
            for rule in parts.dense(f"{prefix}transformer.layer.{{i}}.{theirs}", f"encoder.layers.{{i}}.{ours}")
        ),
    )


def _family(name: str, architecture: str, head: Json, rules: tuple[Rule, ...], tied: tuple[Tied, ...] = ()) -> Family:
    bare = architecture == "DistilBertModel"
    return Family(
        name=name,
        model_types=("distilbert",),
        architecture=architecture,
        template=_template(head),
        rules=(*_encoder("" if bare else "distilbert."), *rules),
        must={"is_decoder": False},
        free=("_num_labels", "num_labels", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds",
              "tie_weights_", "tie_word_embeddings"),
        ignored=(parts.BUFFERS,),
        tied=tied,
        spellings=parts.unprefixed("distilbert") if bare else parts.prefixed("distilbert"),
    )  # fmt: skip


FAMILIES = (
    _family(
        "distilbert", "DistilBertForMaskedLM",
        {"kind": "masked-lm", "tied": Key("tie_word_embeddings", True), "activation": ACTIVATION, "norm": NORM},
        (
            *parts.dense("vocab_transform", "head.transform"),
            *parts.dense("vocab_layer_norm", "head.norm"),
            Rule("vocab_projector.weight", "head.weight"),
            Rule("vocab_projector.bias", "head.bias"),
        ),
        (Tied("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),),
    ),
    _family("distilbert-model", "DistilBertModel", parts.NO_HEAD, ()),
    _family(
        "distilbert-classifier", "DistilBertForSequenceClassification",
        {
            "kind": "classifier", "n_classes": Classes(), "pooling": "first", "hidden": "relu", "bias": True,
            "dropout": Key("seq_classif_dropout", 0.2),
        },
        (*parts.dense("pre_classifier", "head.pooler"), *parts.dense("classifier", "head.classifier")),
    ),
    _family(
        "distilbert-token-classifier", "DistilBertForTokenClassification",
        {"kind": "token-classifier", "n_classes": Classes(), "dropout": DROPOUT},
        parts.dense("classifier", "head.classifier"),
    ),
    _family(
        "distilbert-span", "DistilBertForQuestionAnswering", parts.SPAN, parts.dense("qa_outputs", "head.classifier")
    ),
)  # fmt: skip
