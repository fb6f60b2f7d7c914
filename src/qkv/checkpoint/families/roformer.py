"""RoFormer: BERT with rotary queries and keys, elements 2i and 2i + 1 in a pair, and no pooler (Su 2021)."""

from __future__ import annotations

from qkv.checkpoint.families import bert_parts as parts
from qkv.checkpoint.families.leaves_encoders import Agreeing
from qkv.checkpoint.rules import Ignored, Rule, Tied
from qkv.checkpoint.template import Family, Json

_ROTARY = {"kind": "rotary", "theta": 10_000.0, "fraction": 1.0, "layout": "pairs", "scaling": {"kind": "none"}}
_TABLE = Ignored(r".*encoder\.embed_positions\.weight", "sines and cosines, computed from theta")


def _family(name: str, architecture: str, head: Json, rules: tuple[Rule, ...], tied: tuple[Tied, ...] = ()) -> Family:
    bare = architecture == "RoFormerModel"
    return Family(
        name=name,
        model_types=("roformer",),
        architecture=architecture,
        template=parts.model(
            head,
            d_model=Agreeing("hidden_size", ("embedding_size",)),
            embed=parts.embedding({"kind": "none"}),
            layers=[parts.block(parts.attention(positions=_ROTARY))],
        ),
        rules=(*parts.encoder("" if bare else "roformer."), *rules),
        must={**(parts.TIED_MUST if tied else parts.MUST), "rotary_value": False},
        free=parts.FREE,
        ignored=(parts.BUFFERS, _TABLE),
        tied=tied,
        spellings=parts.unprefixed("roformer") if bare else parts.prefixed("roformer"),
    )


FAMILIES = (
    _family(
        "roformer", "RoFormerForMaskedLM", parts.masked(), parts.CLS,
        (
            Tied("cls.predictions.decoder.weight", "roformer.embeddings.word_embeddings.weight"),
            Tied("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ),
    ),
    _family("roformer-model", "RoFormerModel", parts.NO_HEAD, ()),
    _family(
        "roformer-classifier", "RoFormerForSequenceClassification", parts.classifier(parts.ACTIVATION),
        (*parts.dense("classifier.dense", "head.pooler"), *parts.dense("classifier.out_proj", "head.classifier")),
    ),
    _family(
        "roformer-token-classifier", "RoFormerForTokenClassification", parts.TOKENS,
        parts.dense("classifier", "head.classifier"),
    ),
    _family(
        "roformer-span", "RoFormerForQuestionAnswering", parts.SPAN, parts.dense("qa_outputs", "head.classifier")
    ),
)  # fmt: skip
