"""The byte tokenizer: one token per byte of the UTF-8 text; nothing to train, nothing out of vocabulary.

>>> ByteTokenizer().encode("é!")
[195, 169, 33]
>>> ByteTokenizer().decode([195, 169, 33])
'é!'
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator


class ByteTokenizer:
    """Token i is byte i."""

    kind = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the bytes; a sequence that is no UTF-8 becomes U+FFFD, as does a token beyond 255."""
        return "".join(self.stream(tokens))

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text piece by piece, as tokens arrive: a character is held back until its last byte is there."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            known = 0 <= token < self.vocab_size
            # 0xFF stands in no UTF-8 text, so that it is replaced too.
            if piece := decoder.decode(bytes([token if known else 0xFF])):
                yield piece
        if rest := decoder.decode(b"", final=True):
            yield rest

    def to_dict(self) -> dict[str, str]:
        """What a saved folder says of it."""
        return {"kind": self.kind}
