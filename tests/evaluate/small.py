"""Small models whose opinions differ from place to place, and tokenizers with and without tokens around a text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import qkv
from qkv import config as c
from qkv.nn import Transformer
from qkv.text import ByteTokenizer
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer
from qkv.text.spec import template
from qkv.text.training import train_bpe

TEXT = "The quick brown fox jumps over the lazy dog; Zoë's naïve café: 東京 — and the well-known end. "


def opinionated(config: c.ModelConfig, seed: int = 0) -> Transformer:
    """A model with weights so large that every token it reads counts."""
    model = qkv.build(config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def of_bytes(**changes: Any) -> qkv.TextModel:
    """A decoder of bytes."""
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 256, **changes})
    return qkv.TextModel(opinionated(config), ByteTokenizer())


@cache
def led() -> PieceTokenizer:
    """A byte-level BPE that puts <s> before every text."""
    return _framed(("</s>", "<s>"), ["<s>"], [], bos="<s>")


@cache
def framed() -> PieceTokenizer:
    """BERT's control tokens."""
    return _framed(("[SEP]", "[CLS]", "[MASK]", "[PAD]"), ["[CLS]"], ["[SEP]"], cls="[CLS]", sep="[SEP]", mask="[MASK]")


def _framed(controls: tuple[str, ...], before: list[str], after: list[str], **roles: str) -> PieceTokenizer:
    learned = train_bpe([TEXT] * 4, 290, controls=controls)
    ids = learned.specials.controls
    specials = replace(learned.specials, **{role: ids[text] for role, text in roles.items()})
    spec = {**learned.to_dict()["json"], "post_processor": template((before, after), ids)}
    return LibraryTokenizer(spec, specials)


def of_pieces() -> qkv.TextModel:
    """A decoder whose texts begin with <s>."""
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": led().vocab_size})
    return qkv.TextModel(opinionated(config), led())


def masked() -> qkv.TextModel:
    """A small BERT."""
    config = (
        qkv.preset("bert-base-uncased")
        .toy()
        .override({"vocab_size": framed().vocab_size, "head": c.MaskedLanguageModel()})
    )
    return qkv.TextModel(opinionated(config), framed())
