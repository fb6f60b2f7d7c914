"""Train a byte-level BPE vocabulary on a text, with the library's trainer.

The most frequent pair of neighbours becomes a token, again and again; it begins with the 256 bytes, so that every text
of every language can be written. Sennrich, Haddow and Birch 2016, arXiv 1508.07909; Radford et al. 2019 (bytes).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from qkv.errors import DataError
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import Specials
from qkv.text.pretokenizers import pre_tokenizer
from qkv.text.spec import byte_level_bpe, template

END = "<|endoftext|>"


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, controls: Sequence[str] = (END,), pre: str = "gpt-2"
) -> LibraryTokenizer:
    """A vocabulary of at most `vocab_size` tokens, bytes and control tokens included.

    controls: the first of them ends a text.
    pre: how words are cut, by a name of `pretokenizers`.
    """
    least = 256 + len(controls)
    if vocab_size < least:
        raise DataError(f"vocab_size is {vocab_size}; the bytes and control tokens alone take {least}")
    cut = json.dumps({**_EMPTY, "pre_tokenizer": byte_level_bpe(pre_tokenizer(pre, "pre").patterns)})
    library = Tokenizer.from_str(cut)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(controls),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    vocab = library.get_vocab()
    ids = {text: vocab[text] for text in controls}
    end = ids[controls[0]] if controls else None
    specials = Specials(ids, eos=end, ends=frozenset() if end is None else frozenset({end}))
    return LibraryTokenizer(json.loads(library.to_str()), specials, "trained BPE")


# With the control tokens of a kind of model

Purpose = Literal["texts", "frames", "pairs", "spans"]
"""What a vocabulary is for:

    texts     <|endoftext|> ends a text                                    GPT-2
    frames    [CLS] text [SEP], [MASK], [PAD]                              BERT
    pairs     source and target end with </s>; decoders begin with <pad>   T5
    spans     besides, <extra_id_0> to <extra_id_99> for hidden spans      T5
"""
_FRAMES = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
_PAIRS = ("</s>", "<pad>")
_SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))


def train_bpe_for(purpose: Purpose, texts: Iterable[str], vocab_size: int) -> LibraryTokenizer:
    """`train_bpe` with the control tokens that models of this kind need, which count."""
    if purpose == "texts":
        return train_bpe(texts, vocab_size)
    if purpose == "frames":
        learned = train_bpe(texts, vocab_size, controls=_FRAMES)
        pad, first, between, mask = (learned.specials.controls[text] for text in _FRAMES)
        # None of these ends a generated text.
        roles = {"pad": pad, "cls": first, "sep": between, "mask": mask, "eos": None, "ends": frozenset[int]()}
        return _framed(learned, ("[CLS]",), ("[SEP]",), roles)
    learned = train_bpe(texts, vocab_size, controls=_PAIRS + (_SENTINELS if purpose == "spans" else ()))
    pad = learned.specials.controls["<pad>"]
    return _framed(learned, (), ("</s>",), {"pad": pad, "starts": (pad,)})


def _framed(
    learned: LibraryTokenizer, before: Sequence[str], after: Sequence[str], roles: Mapping[str, Any]
) -> LibraryTokenizer:
    """The tokenizer with tokens around each text, and with roles for its control tokens."""
    frame = template((list(before), list(after)), learned.specials.controls)
    spec = {**learned.to_dict()["json"], "post_processor": frame}
    return LibraryTokenizer(spec, replace(learned.specials, **roles), "trained BPE")


_EMPTY = json.loads(Tokenizer(models.BPE()).to_str())
