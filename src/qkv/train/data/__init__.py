"""The data of a run: files become shards of tokens, once; shards become an endless stream of examples.

shards = prepare(recipe.data, tokenizer, folder)            texts, pairs, chats, labels; `split="valid"` for the rest
stream = Stream(shards, context=1024, batch=32, seed=0)     shuffled, packed, resumable at any example
"""

from qkv.train.data.labels import CLASSES, names_beside
from qkv.train.data.pairs import pairs_apart, split_pairs
from qkv.train.data.preparing import prepare, training_classes, training_texts
from qkv.train.data.records import Chat, Pair, Reading, Text
from qkv.train.data.rows import Coverage
from qkv.train.data.shards import Shards, in_memory, open_shards, tokenizer_hash, verify
from qkv.train.data.stream import Contiguous, Stream, every_row

__all__ = [
    "CLASSES",
    "Chat",
    "Contiguous",
    "Coverage",
    "Pair",
    "Reading",
    "Shards",
    "Stream",
    "Text",
    "every_row",
    "in_memory",
    "names_beside",
    "open_shards",
    "pairs_apart",
    "prepare",
    "split_pairs",
    "tokenizer_hash",
    "training_classes",
    "training_texts",
    "verify",
]
