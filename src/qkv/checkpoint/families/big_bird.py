"""BigBird: BERT whose tokens see blocks near them, the first and last block, and random ones (Zaheer 2020).

The released code draws the random blocks anew for every layer and head; ours are one fixed function of the seed. The
graph is of the same kind, not the same. `original_full` is attention to everybody, and exact.
"""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families import bert_parts as parts
from qkv.checkpoint.families.common import ACTIVATIONS
from qkv.checkpoint.rules import Ignored, Rule, Tied
from qkv.checkpoint.template import Case, Family, Json, Key

_PATTERN = Case(
    "attention_type",
    {
        "block_sparse": {
            "kind": "bigbird",
            "block": Key("block_size", 64),
            "random_blocks": Key("num_random_blocks", 3),
            "seed": 0,
        },
        "original_full": {"kind": "bidirectional"},
    },
    default="block_sparse",
)
_ACTIVATION = Key("hidden_act", "gelu-tanh", ACTIVATIONS)
_POOLER = Ignored(r"bert\.pooler\.(weight|bias)", "this head reads every token, not the pooler's vector")
_NEXT = Ignored(r"cls\.seq_relationship\.(weight|bias)", "the second head of pre-training")
_LM_TIED = (
    Tied("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    Tied("cls.predictions.decoder.bias", "cls.predictions.bias"),
)


def _block() -> Json:
    block = parts.block(parts.attention(pattern=_PATTERN, qkv_bias=Key("use_bias", True)))
    return {**block, "ffn": {**block["ffn"], "activation": _ACTIVATION}}


def _family(
    name: str,
    architecture: str,
    head: Json,
    rules: tuple[Rule, ...],
    ignored: tuple[Ignored, ...] = (),
    tied: tuple[Tied, ...] = (),
    **more: Any,
) -> Family:
    bare = architecture == "BigBirdModel"
    scale = Key("rescale_embeddings", 1.0, {False: 1.0, True: "sqrt_d_model"})
    return Family(
        name=name,
        model_types=("big_bird",),
        architecture=architecture,
        template=parts.model(
            head,
            embed=parts.embedding({"kind": "learned", "offset": 0}, scale=scale),
            layers=[_block()],
        ),
        rules=(*parts.encoder("" if bare else "bert."), *rules),
        must=parts.TIED_MUST if tied else parts.MUST,
        free=(*parts.FREE, "block_size", "num_random_blocks"),
        ignored=(parts.BUFFERS, *ignored),
        tied=tied,
        spellings=parts.unprefixed("bert") if bare else parts.prefixed("bert"),
        **more,
    )


_MASKED = parts.masked(_ACTIVATION)

FAMILIES = (
    _family("big-bird", "BigBirdForMaskedLM", _MASKED, parts.CLS, (_POOLER, _NEXT), _LM_TIED),
    _family("big-bird-pretraining", "BigBirdForPreTraining", _MASKED, parts.CLS, (_POOLER, _NEXT), _LM_TIED),
    _family(
        "big-bird-model", "BigBirdModel", parts.POOLER, parts.dense("pooler", "head.pooler"),
        optional="pooler.weight", instead="big-bird-encoder",
    ),
    _family("big-bird-encoder", "BigBirdModel", parts.NO_HEAD, ()),
    _family(
        "big-bird-classifier", "BigBirdForSequenceClassification", parts.classifier(_ACTIVATION),
        (*parts.dense("classifier.dense", "head.pooler"), *parts.dense("classifier.out_proj", "head.classifier")),
        (_POOLER,),
    ),
    _family(
        "big-bird-token-classifier", "BigBirdForTokenClassification", parts.TOKENS,
        parts.dense("classifier", "head.classifier"), (_POOLER,),
    ),
)  # fmt: skip
