"""Tokenizers whose control tokens an objective needs: a byte-level BPE, learned from texts.

    python recipes/tokenizer.py bert 4096 wiki.txt bert-tokenizer     [PAD] [CLS] [SEP] [MASK]
    python recipes/tokenizer.py t5 4096 wiki.txt t5-tokenizer         </s> <pad> <extra_id_0> to <extra_id_99>
    python recipes/tokenizer.py pairs 8192 deu.txt deu-tokenizer      </s> <pad>

Each is a folder that a recipe's `tokenizer` names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from qkv.text import read_text
from qkv.text.folder import write_folder
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer
from qkv.text.spec import template
from qkv.text.training import train_bpe

BERT = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
PAIRS = ("</s>", "<pad>")
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))


def bert(text: str, vocab_size: int) -> PieceTokenizer:
    """[CLS] text [SEP], and a mask (Devlin 2018, section 3)."""
    learned = train_bpe(text.splitlines(keepends=True), vocab_size, controls=BERT)
    ids = learned.specials.controls
    # None of these ends a generated text.
    pad, first, between, mask = (ids[text] for text in BERT)
    specials = replace(learned.specials, pad=pad, cls=first, sep=between, mask=mask, eos=None, ends=frozenset())
    spec = {**learned.to_dict()["json"], "post_processor": template((["[CLS]"], ["[SEP]"]), ids)}
    return LibraryTokenizer(spec, specials, "BERT's control tokens")


def pairs(text: str, vocab_size: int, more: tuple[str, ...] = ()) -> PieceTokenizer:
    """Source and target end with </s>, and the decoder begins with <pad> (Raffel 2019)."""
    learned = train_bpe(text.splitlines(keepends=True), vocab_size, controls=(*PAIRS, *more))
    ids = learned.specials.controls
    specials = replace(learned.specials, pad=ids["<pad>"], starts=(ids["<pad>"],))
    spec = {**learned.to_dict()["json"], "post_processor": template(([], ["</s>"]), ids)}
    return LibraryTokenizer(spec, specials, "T5's control tokens")


def t5(text: str, vocab_size: int) -> PieceTokenizer:
    """Besides, sentinels for the spans that are hidden (Raffel 2019, section 3.1.4)."""
    return pairs(text, vocab_size, SENTINELS)


KINDS: dict[str, Callable[[str, int], PieceTokenizer]] = {"bert": bert, "pairs": pairs, "t5": t5}


def main(kind: str, vocab_size: str, source: str, target: str) -> None:
    """Learn one and write its folder."""
    tokenizer = KINDS[kind](read_text(Path(source)), int(vocab_size))
    folder = Path(target)
    folder.mkdir(parents=True)
    write_folder(folder, tokenizer)
    print(f"{folder}: {tokenizer.vocab_size} tokens")


if __name__ == "__main__":
    if len(sys.argv) != 5 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    main(*sys.argv[1:])
