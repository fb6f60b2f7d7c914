"""Text: tokenizers, and the texts that come without a download. No torch."""

from qkv.text.bytes import ByteTokenizer
from qkv.text.corpus import language_reference, read_text
from qkv.text.tokenizer import Tokenizer, tokenizer_from

__all__ = ["ByteTokenizer", "Tokenizer", "language_reference", "read_text", "tokenizer_from"]
