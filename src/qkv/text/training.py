"""Train a byte-level BPE vocabulary on a text, with the library's trainer.

The most frequent pair of neighbours becomes a token, again and again; it begins with the 256 bytes, so that every text
of every language can be written. Sennrich, Haddow and Birch 2016, arXiv 1508.07909; Radford et al. 2019 (bytes).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from qkv.errors import DataError
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import Specials
from qkv.text.pretokenizers import pre_tokenizer
from qkv.text.spec import byte_level_bpe

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


_EMPTY = json.loads(Tokenizer(models.BPE()).to_str())
