"""A model in the native engine as generation runs it: the same caches, the same answers, no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkv.cache.cache import Cache, Options
from qkv.cache.spec import GRANULE
from qkv.cache.store import HostStore
from qkv.config import ModelConfig
from qkv.engine import Engine, Format
from qkv.engine.engine import Rows, ragged
from qkv.engine.lower import Precision, Weights, lower
from qkv.errors import GenerationError
from qkv.generate.runner import Logits, Tokens

LENGTH = 32_768
"""The most positions that a program is made for."""


class NativeRunner:
    """A decoder."""

    reads_prefix = False
    """No pattern that it runs has one."""

    def __init__(self, config: ModelConfig, engine: Engine, vocab_size: int, length: int, chunk: int = 512) -> None:
        """length: the positions that the program was made for. chunk: tokens of a prompt that are read at once."""
        self.config, self.engine, self.spelled, self.length, self.chunk = config, engine, vocab_size, length, chunk

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        weights: Weights,
        vocab_size: int,
        form: Format = "fp32",
        *,
        threads: int | None = None,
        chunk: int = 512,
    ) -> NativeRunner:
        """A model, packed. Raises EngineError where the engine cannot run it."""
        length = min(config.max_seq_len, LENGTH)
        engine = Engine(lower(config, weights, Precision.of(form), length), threads=threads)
        return cls(config, engine, vocab_size, length, chunk)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        return self.length

    def start(
        self, batch: int, max_len: int, *, sources: Sequence[Tokens] | None = None, slack: int = 0
    ) -> NativeState:
        if sources is not None:
            raise GenerationError("source: this model has no encoder and takes no source")
        options = Options(max_len, "raw", "auto", max(slack, GRANULE - 1), canonical=True)
        return NativeState(self, Cache(self.config, HostStore("float32"), batch, options))


class NativeState:
    """A cache."""

    def __init__(self, runner: NativeRunner, cache: Cache) -> None:
        self.runner, self.cache = runner, cache

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def extend(self, tokens: Sequence[Tokens]) -> Logits:
        return np.stack([rows[-1] for rows in self._read(tokens, every=False)])

    def extend_all(self, tokens: Sequence[Tokens]) -> list[Logits]:
        return self._read(tokens, every=True)

    def _read(self, tokens: Sequence[Tokens], every: bool) -> list[Logits]:
        """The logits after every new token of each row, or after the last."""
        longest, size = max(map(len, tokens)), self._chunk_size()
        found: list[list[Logits]] = [[] for _ in tokens]
        for start in range(0, longest, size):
            part = [row[start : start + size] for row in tokens]
            ends = [start + len(new) == len(row) and len(new) > 0 for new, row in zip(part, tokens, strict=True)]
            for number, logits in self._forward(part, every, ends):
                found[number].append(logits)
        empty = np.zeros((0, self.runner.vocab_size), np.float32)
        return [np.concatenate(rows) if rows else empty for rows in found]

    def _chunk_size(self) -> int:
        windows = [group.slack + 1 for group in self.cache.groups if group.behind is not None]
        return min([self.runner.chunk, *windows])

    def _forward(self, tokens: Sequence[Tokens], every: bool, ends: Sequence[bool]) -> list[tuple[int, Logits]]:
        """One call of the engine: (row, its logits) of every new token, or of the last of rows that end here."""
        flat, line = ragged(tokens)
        sizes = np.array([len(row) for row in tokens])
        first = np.cumsum(sizes) - sizes
        before = np.array(self.cache.lengths)
        position = (before[line] + np.arange(len(flat)) - first[line]).astype(np.int32)
        if every:
            wanted = np.arange(len(flat), dtype=np.int32)
        else:
            wanted = np.array([first[b] + sizes[b] - 1 for b, end in enumerate(ends) if end], np.int32)
        valid = None if (sizes == sizes[0]).all() else np.arange(sizes.max()) < sizes[:, None]
        step, logits = self.cache.begin(int(sizes.max()), valid), None
        try:
            logits = self.runner.engine.run(Rows(flat, line, position, wanted), self.cache, step)
        finally:
            self.cache.abort(step) if logits is None else self.cache.commit(step)
        logits[:, self.runner.spelled :] = -np.inf
        if every:
            return [(b, logits[first[b] : first[b] + sizes[b]]) for b in range(len(tokens))]
        return [(b, logits[[n]]) for n, b in enumerate(b for b, end in enumerate(ends) if end)]

    def truncate(self, lengths: Sequence[int]) -> None:
        self.cache.truncate(lengths)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)

    def fork(self) -> NativeState:
        return NativeState(self.runner, self.cache.fork())
