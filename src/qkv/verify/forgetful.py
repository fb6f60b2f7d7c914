"""A runner that remembers nothing but tokens: every call reads the whole text again, each row alone.

What a search or a loop makes of it owes nothing to caches, batches or padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from qkv.config import Learned
from qkv.generate.runner import Logits, Tokens
from qkv.nn import Transformer


class Forgetful:
    """A decoder, with or without an encoder before it."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        patterns = [] if model.config.decoder is None else [b.attention.pattern for b in model.config.decoder.blocks]
        self.reads_prefix = any("prefix_length" in pattern.fields for pattern in patterns)

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def max_length(self) -> int | None:
        config = self.model.config
        return config.max_seq_len if isinstance(config.embedding.positions, Learned) else None

    def start(
        self, batch: int, max_len: int, *, sources: Sequence[Tokens] | None = None, slack: int = 0
    ) -> ForgetfulState:
        texts = [_Text([], None if sources is None else sources[row]) for row in range(batch)]
        return ForgetfulState(self, texts)


class _Text:
    def __init__(self, tokens: list[int], source: Tokens | None, prefix: int | None = None) -> None:
        self.tokens, self.source, self.prefix = tokens, source, prefix

    def copy(self) -> _Text:
        return _Text(list(self.tokens), self.source, self.prefix)


class ForgetfulState:
    """The tokens of each row."""

    def __init__(self, runner: Forgetful, texts: list[_Text]) -> None:
        self.runner, self.texts = runner, texts

    @property
    def lengths(self) -> list[int]:
        return [len(text.tokens) for text in self.texts]

    @property
    def nbytes(self) -> int:
        return 0

    def extend(self, tokens: Sequence[Tokens]) -> Logits:
        for text, new in zip(self.texts, tokens, strict=True):
            text.tokens += new
            text.prefix = len(new) if text.prefix is None else text.prefix
        return np.stack([self._last(text) for text in self.texts])

    def extend_all(self, tokens: Sequence[Tokens]) -> list[Logits]:
        found: list[list[Logits]] = [[] for _ in tokens]
        for row, new in enumerate(tokens):
            text = self.texts[row]
            for token in new:
                text.tokens.append(token)
                found[row].append(self._last(text))
        return [np.stack(rows) for rows in found]

    def _last(self, text: _Text) -> Logits:
        given = torch.tensor([text.tokens])
        source = None if text.source is None else torch.tensor([list(text.source)])
        prefix = torch.tensor([text.prefix]) if self.runner.reads_prefix else None
        at = torch.tensor([[given.shape[1] - 1]])
        with torch.no_grad():
            out = self.runner.model(given, source=source, prefix_length=prefix, logits_at=at)
        logits: Logits = out.logits[0, 0].float().numpy()
        return logits

    def truncate(self, lengths: Sequence[int]) -> None:
        for text, length in zip(self.texts, lengths, strict=True):
            del text.tokens[length:]

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row].copy() for row in rows]

    def fork(self) -> ForgetfulState:
        return ForgetfulState(self.runner, [text.copy() for text in self.texts])
