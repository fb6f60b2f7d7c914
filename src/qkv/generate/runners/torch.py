"""A torch model as generation runs it: a cache, prompts in chunks, and, on request, bits that do not depend on company.

With `deterministic`, a row's logits are bitwise those that it has alone, for every batch and every chunk schedule:
`nn.invariant` makes each row of a product its own, and a canonical cache keeps each key where it always is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from qkv.cache.cache import Cache, Options
from qkv.cache.spec import GRANULE, rounded_up, stored, why_not
from qkv.config import Learned, Rotary
from qkv.errors import GenerationError
from qkv.generate.runner import Logits, Tokens
from qkv.nn import Transformer
from qkv.nn.invariant import invariant, self_check


@dataclass(frozen=True)
class Runtime:
    """How a model is run."""

    deterministic: bool | None = None
    """Whether a row of a batch is bitwise the row alone. By default on a CPU; off is faster."""
    codec: Literal["raw", "int8", "int4"] = "raw"
    """How the cache stores keys and values."""
    layout: Literal["auto", "paged"] = "auto"
    chunk: int = 512
    """How many tokens of a prompt are read at once."""
    prefix_bytes: int = 0
    """How many bytes of earlier texts' caches are kept, so that a prompt that begins like one of them reads less."""
    engine: Literal["torch", "native", "auto"] = "torch"
    """What computes: torch, the native CPU engine, or that one where it can run the model and torch elsewhere."""
    quantize: Literal["bf16", "int8", "int4"] | None = None
    """In which format the native engine keeps the matrices; None: float32."""
    threads: int | None = None
    """Of the native engine; by default as many as the process may use."""


class TorchRunner:
    """A decoder, with or without an encoder before it."""

    def __init__(self, model: Transformer, vocab_size: int, runtime: Runtime | None = None) -> None:
        config, self.runtime = model.config, runtime or Runtime()
        if self.runtime.quantize is not None:
            raise GenerationError("quantize: torch runs the weights as they are; choose the native engine")
        if self.runtime.threads is not None:
            raise GenerationError("threads: torch has its own setting (OMP_NUM_THREADS); choose the native engine")
        if config.decoder is None or config.head.reads != "past":
            raise GenerationError("generate: needs a decoder with a language-model head, and this model has none")
        reason = why_not(config)
        if reason is not None:
            raise GenerationError(f"generate: {reason}")
        self.model, self.spelled = model, vocab_size
        self.device = next(model.parameters()).device
        wanted = self.runtime.deterministic
        self.deterministic = self.device.type == "cpu" if wanted is None else wanted
        if self.deterministic:
            self._check()
        patterns = [one.pattern for one in stored(config) if not one.cross]
        self.reads_prefix = any("prefix_length" in pattern.fields for pattern in patterns)
        rules = [one.positions.scaling for one in stored(config) if isinstance(one.positions, Rotary)]
        self.one_reading = self.reads_prefix or any(rule.reads_length for rule in rules)
        """Whether a prompt must be read in one piece."""

    def _check(self) -> None:
        if self.device.type != "cpu":
            raise GenerationError("deterministic: only on a CPU; leave it out")
        matrices = [module.weight for module in self.model.modules() if isinstance(module, nn.Linear)]
        widths = {(weight.shape[1], weight.shape[0]) for weight in matrices}
        decoder = self.model.config.decoder
        assert decoder is not None
        head_dim = max(block.attention.query_dim for block in decoder.blocks)
        said = self_check(next(self.model.parameters()).dtype, sorted(widths), head_dim)
        if said is not None:
            warnings.warn(f"deterministic: not kept by this processor's library: {said}", stacklevel=3)

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def max_length(self) -> int | None:
        config = self.model.config
        return config.max_seq_len if isinstance(config.embedding.positions, Learned) else None

    def start(self, batch: int, max_len: int, *, sources: Sequence[Tokens] | None = None, slack: int = 0) -> TorchState:
        if (sources is not None) != (self.model.encoder is not None):
            need = "needs a source" if sources is None else "has no encoder and takes no source"
            raise GenerationError(f"source: this model {need}")
        if self.deterministic:
            slack = max(slack, GRANULE - 1)
        if self.one_reading:
            slack = max(slack, max_len)  # nothing is lost, so that the text can be read again in one piece
        options = Options(max_len, self.runtime.codec, self.runtime.layout, slack, canonical=self.deterministic)
        cache = Cache(self.model.config, self.model.cache_store(), batch, options)
        return TorchState(self, cache, [[] for _ in range(batch)], None if sources is None else list(sources))

    @contextmanager
    def mode(self) -> Iterator[None]:
        """How the model is called."""
        with torch.inference_mode():
            if self.deterministic:
                with invariant():
                    yield
            else:
                yield


class TorchState:
    """A cache, and the tokens that it stands for."""

    def __init__(
        self, runner: TorchRunner, cache: Cache, tokens: list[list[int]], sources: list[Tokens] | None
    ) -> None:
        self.runner, self.cache, self.tokens, self.sources = runner, cache, tokens, sources

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def extend(self, tokens: Sequence[Tokens]) -> Logits:
        last = self._read(tokens, every=False)
        return np.stack([rows[-1] for rows in last])

    def extend_all(self, tokens: Sequence[Tokens]) -> list[Logits]:
        return self._read(tokens, every=True)

    def _read(self, tokens: Sequence[Tokens], every: bool) -> list[Logits]:
        """The logits after every new token of each row, or after the last."""
        wanted = [len(row) for row in tokens]
        if every and self.cache.turns_within(wanted):
            # The angles depend on the length, so that the logits after a token are those of the text up to it.
            steps = [[row[t : t + 1] for row in tokens] for t in range(max(wanted))]
            parts = [self._read(step, every=False) for step in steps]
            return [np.concatenate([part[row] for part in parts]) for row in range(len(tokens))]
        if self.cache.turns_anew(wanted):
            # The angles of what is stored are no longer right: everything is read again.
            whole = [[*old, *new] for old, new in zip(self.tokens, tokens, strict=True)]
            cache = self.cache
            self.cache = Cache(cache.config, cache.store, cache.batch, cache.options)
            logits = [rows[-n:] for rows, n in zip(self._chunks(whole, every), wanted, strict=True)]
        else:
            logits = self._chunks(tokens, every)
        for old, new in zip(self.tokens, tokens, strict=True):
            old.extend(new)
        return logits

    def _chunks(self, tokens: Sequence[Tokens], every: bool) -> list[Logits]:
        longest, size = max(map(len, tokens)), self._chunk_size()
        found: list[list[Logits]] = [[] for _ in tokens]
        for start in range(0, longest, size):
            part = [row[start : start + size] for row in tokens]
            logits = self._forward(part, every)
            for number, row in enumerate(part):
                if every:
                    found[number].append(logits[number, : len(row)])
                elif row and start + len(row) == len(tokens[number]):
                    found[number].append(logits[number])
        empty = np.zeros((0, self.runner.vocab_size), np.float32)
        return [np.concatenate(rows) if rows else empty for rows in found]

    def _chunk_size(self) -> int:
        if self.runner.one_reading:
            return max(1, self.cache.options.max_len or 1)
        windows = [group.slack + 1 for group in self.cache.groups if group.behind is not None]
        chunk = self.runner.runtime.chunk
        return min([chunk, *windows]) if self.cache.options.canonical else chunk

    def _forward(self, tokens: Sequence[Tokens], every: bool) -> Logits:
        """One call of the model: (B, T, V), or (B, 1, V) after each row's last token."""
        runner, widths = self.runner, [len(row) for row in tokens]
        padded, valid = _padded(tokens, max(widths), runner.device)
        first = not any(self.cache.lengths)
        prefix = torch.tensor(widths, device=runner.device) if runner.reads_prefix and first else None
        source = source_valid = None
        if self.sources is not None and not self.cache.has_source:
            width = max(map(len, self.sources))
            width = rounded_up(width, GRANULE) if runner.deterministic else width
            source, source_valid = _padded(self.sources, width, runner.device)
        at = None if every else torch.tensor([[max(n, 1) - 1] for n in widths], device=runner.device)
        with runner.mode():
            output = runner.model(
                padded,
                source=source,
                valid=valid,
                source_valid=source_valid,
                prefix_length=prefix,
                cache=self.cache,
                logits_at=at,
                backend="auto",
            )
            logits: Logits = output.logits.float().cpu().numpy()
        logits[..., runner.spelled :] = -np.inf  # rows that only pad the table spell nothing
        return logits

    def truncate(self, lengths: Sequence[int]) -> None:
        self.cache.truncate(lengths)
        for row, length in zip(self.tokens, lengths, strict=True):
            del row[length:]

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.sources = None if self.sources is None else [self.sources[row] for row in rows]

    def fork(self) -> TorchState:
        return TorchState(self.runner, self.cache.fork(), [list(row) for row in self.tokens], self.sources)


def _padded(rows: Sequence[Tokens], width: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(B, width) ids, and which of them are real; None if all are."""
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    if all(len(row) == width for row in rows):
        return ids, None
    return ids, torch.tensor([[i < len(row) for i in range(width)] for row in rows], device=device)
