"""RoBERTa, XLM-RoBERTa and CamemBERT (one model under three names), and Longformer, which is RoBERTa with windows.

Position p reads row p + pad_token_id + 1. The masked-LM head's activation is GELU whatever the layers have. Classifiers
have a dense layer of their own in place of the pooler.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv.checkpoint.families import bert_parts as parts
from qkv.checkpoint.families.leaves_encoders import PaddedLength, PaddedOffset, Windows
from qkv.checkpoint.rules import Ignored, Tied
from qkv.checkpoint.template import Family, Json


@dataclass(frozen=True)
class _Kind:
    """One of the names."""

    name: str
    model_type: str
    classes: str
    """How their classes' names begin."""
    prefix: str
    template: Json
    """Without its head."""
    must: Json
    free: tuple[str, ...] = ()


def _families(kind: _Kind) -> tuple[Family, ...]:
    """The kind with each head."""
    pooler = Ignored(rf"{kind.prefix}\.pooler\.dense\.(weight|bias)", "this head has no use of the pooler's vector")
    tied = (
        Tied("lm_head.decoder.weight", f"{kind.prefix}.embeddings.word_embeddings.weight"),
        Tied("lm_head.decoder.bias", "lm_head.bias"),
    )
    classifier = parts.dense("classifier", "head.classifier")
    own = (*parts.dense("classifier.dense", "head.pooler"), *parts.dense("classifier.out_proj", "head.classifier"))
    heads = (
        ("", "ForMaskedLM", parts.masked("gelu"), parts.LM_HEAD),
        ("-model", "Model", parts.POOLER, parts.dense("pooler.dense", "head.pooler")),
        ("-encoder", "Model", parts.NO_HEAD, ()),
        ("-classifier", "ForSequenceClassification", parts.SEQUENCE, own),
        ("-token-classifier", "ForTokenClassification", parts.TOKENS, classifier),
        ("-span", "ForQuestionAnswering", parts.SPAN, parts.dense("qa_outputs", "head.classifier")),
    )
    return tuple(
        Family(
            name=f"{kind.name}{suffix}",
            model_types=(kind.model_type,),
            architecture=f"{kind.classes}{ending}",
            template={**kind.template, "head": head},
            rules=(*parts.encoder("" if ending == "Model" else f"{kind.prefix}."), *rules),
            must={**kind.must, **({"tie_word_embeddings": True} if ending == "ForMaskedLM" else {})},
            free=(*parts.FREE, *kind.free),
            ignored=(parts.BUFFERS,) if ending == "Model" else (parts.BUFFERS, pooler),
            tied=tied if ending == "ForMaskedLM" else (),
            spellings=parts.unprefixed(kind.prefix) if ending == "Model" else parts.prefixed(kind.prefix),
            optional="pooler.dense.weight" if suffix == "-model" else None,
            instead=f"{kind.name}-encoder" if suffix == "-model" else None,
        )
        for suffix, ending, head, rules in heads
    )


_EMBEDDING = parts.embedding({"kind": "learned", "offset": PaddedOffset()})
_ROBERTA = parts.model({}, embed=_EMBEDDING, layers=[parts.block(parts.attention())], length=PaddedLength())
_LONGFORMER = parts.model(
    {},
    embed=_EMBEDDING,
    layers=Windows(parts.block(parts.attention(pattern={"kind": "longformer"}, global_projections=True))),
    length=PaddedLength(),
)
# Longformer's first releases say these two; both have been idle since.
_LONGFORMER_MUST = {"attention_mode": "longformer", "ignore_attention_mask": False}

FAMILIES = (
    *_families(_Kind("roberta", "roberta", "Roberta", "roberta", _ROBERTA, parts.MUST)),
    *_families(_Kind("xlm-roberta", "xlm-roberta", "XLMRoberta", "roberta", _ROBERTA, parts.MUST, ("output_past",))),
    *_families(_Kind("camembert", "camembert", "Camembert", "roberta", _ROBERTA, parts.MUST, ("output_past",))),
    *_families(
        _Kind("longformer", "longformer", "Longformer", "longformer", _LONGFORMER, _LONGFORMER_MUST, ("onnx_export",))
    ),
)
