"""BERT with each of its heads; sentence encoders such as MiniLM are the bare model with its pooler.

`BertForPreTraining` is a masked LM with the next-sentence head beside it, where its file has one. What such a file
holds beyond the head that `architectures` names is ignored by a rule that says so: BERT's released files name
`BertForMaskedLM`; their next-sentence head alone is read with `BertForNextSentencePrediction`.
"""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families import bert_parts as parts
from qkv.checkpoint.rules import Ignored, Rule, Tied
from qkv.checkpoint.template import Family, Json

_POOLER = Ignored(r"bert\.pooler\.dense\.(weight|bias)", "this head reads every token, not the pooler's vector")
_NEXT = Ignored(r"cls\.seq_relationship\.(weight|bias)", "the second head of pre-training")
_MASKED = Ignored(r"cls\.predictions\..*", "the first head of pre-training")
_LM_TIED = (
    Tied("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    Tied("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
_BERT_POOLER = parts.dense("bert.pooler.dense", "head.pooler")


def _family(
    name: str,
    architecture: str,
    head: Json,
    rules: tuple[Rule, ...],
    ignored: tuple[Ignored, ...] = (),
    tied: tuple[Tied, ...] = (),
    **more: Any,
) -> Family:
    """One head; without tied tensors, what the config says of tying is idle."""
    bare = architecture == "BertModel"
    return Family(
        name=name,
        model_types=("bert",),
        architecture=architecture,
        template=parts.model(
            head,
            embed=parts.embedding({"kind": "learned", "offset": 0}),
            layers=[parts.block(parts.attention())],
        ),
        rules=(*parts.encoder("" if bare else "bert."), *rules),
        must=parts.TIED_MUST if tied else parts.MUST,
        free=parts.FREE,
        ignored=(parts.BUFFERS, *ignored),
        tied=tied,
        spellings=parts.unprefixed("bert") if bare else parts.prefixed("bert"),
        **more,
    )


FAMILIES = (
    _family("bert", "BertForMaskedLM", parts.masked(), parts.CLS, (_POOLER, _NEXT), _LM_TIED),
    _family(
        "bert-pretraining", "BertForPreTraining", {**parts.masked(), "next_sentence": True},
        (*parts.CLS, *parts.dense("bert.pooler.dense", "head.next_sentence.pooler"),
         *parts.dense("cls.seq_relationship", "head.next_sentence.classifier")),
        (), _LM_TIED, optional="cls.seq_relationship.weight", instead="bert",
    ),
    _family(
        "bert-model", "BertModel", parts.POOLER, parts.dense("pooler.dense", "head.pooler"),
        optional="pooler.dense.weight", instead="bert-encoder",
    ),
    _family("bert-encoder", "BertModel", parts.NO_HEAD, ()),
    _family(
        "bert-next-sentence", "BertForNextSentencePrediction", parts.NEXT_SENTENCE,
        (*_BERT_POOLER, *parts.dense("cls.seq_relationship", "head.classifier")), (_MASKED,),
    ),
    _family(
        "bert-classifier", "BertForSequenceClassification", parts.SEQUENCE,
        (*_BERT_POOLER, *parts.dense("classifier", "head.classifier")),
    ),
    _family(
        "bert-token-classifier", "BertForTokenClassification", parts.TOKENS,
        parts.dense("classifier", "head.classifier"), (_POOLER,),
    ),
    _family(
        "bert-span", "BertForQuestionAnswering", parts.SPAN,
        parts.dense("qa_outputs", "head.classifier"), (_POOLER,),
    ),
)  # fmt: skip
