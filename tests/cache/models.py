"""Models with caches, what the oracle makes of a text, and ways to read it in pieces.

Every test of equality here says the same: a text that a model reads with a cache, in whatever pieces, gives what the
oracle gives that reads it at once without any cache, and passes keys and values through the cache's codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from parity.cases import CASES, attention, block, decoder, encoder_decoder
from parity.test_forward import float32_weights, model_with
from qkv import config as c
from qkv import reference
from qkv.cache.cache import Cache
from qkv.cache.spec import why_not
from qkv.nn import Transformer

EXACT = 1e-10
"""Of float64; and quantised: a number gets another code only if it lies within about 1e-15 of the middle of two."""
CODECS = ("raw", "int8", "int4")
LAYOUTS: dict[str, dict[str, Any]] = {
    "auto": {},
    "page-1": {"layout": "paged", "page": 1},
    "page-3": {"layout": "paged", "page": 3},
    "page-4": {"layout": "paged", "page": 4},
    "page-16": {"layout": "paged", "page": 16},
}
CHANGING = {"rotary-dynamic-ntk": 5, "rotary-qwen-dynamic": 5, "rotary-longrope": 6}
"""Cases whose angles change beyond so many tokens: longer rows are refused in pieces."""


def windowed(window: int = 4, sinks: int = 0, n_layers: int = 2, **changes: Any) -> c.ModelConfig:
    """A decoder of one kind of attention that looks `window` tokens back."""
    pattern = c.SlidingWindow(window=window, sinks=sinks)
    return decoder(block(attention=attention(pattern=pattern, **changes)), n_layers=n_layers)


def gemma() -> c.ModelConfig:
    """Two windows with angles of their own, and every third layer sees everything (Gemma 3)."""
    local = (
        attention(pattern=c.SlidingWindow(window=window), positions=c.Rotary(theta=theta), qk_norm=c.RMSNorm())
        for window, theta in ((3, 100.0), (6, 50.0))
    )
    whole = attention(positions=c.Rotary(theta=1000.0), qk_norm=c.RMSNorm())
    return decoder(*(block(attention=one) for one in (*local, whole)), n_layers=4)


def longformer(projections: bool) -> c.ModelConfig:
    """Causal, local, and some tokens that see everything before them."""
    pattern = c.AllOf(patterns=(c.Causal(), c.Longformer(window=4)))
    looks = attention(pattern=pattern, positions=c.Rotary(theta=100.0), global_projections=projections)
    return decoder(block(attention=looks))


T5 = c.T5Buckets(n_buckets=8, max_distance=10, bidirectional=False)
WINDOW = c.SlidingWindow(window=4)
EXTRA: dict[str, c.ModelConfig] = {
    "window-multi-head": windowed(n_kv_heads=4, positions=c.Rotary()),
    "window-multi-query": windowed(n_kv_heads=1, positions=c.Rotary()),
    "window-sinks-of-attention": windowed(sinks=2, positions=c.Rotary()),
    "window-learned-sinks": decoder(
        block(attention=attention(pattern=WINDOW, sinks=True, positions=c.Rotary(), log_n=4))
    ),
    "window-wide": windowed(window=5, head_dim=40, n_kv_heads=1, n_heads=2, positions=c.Rotary(fraction=0.5)),
    "window-of-one": windowed(window=1, positions=c.Rotary()),
    "window-latent": CASES["latent"].override({"decoder.layers.*.attention.pattern": WINDOW}),
    "window-t5": windowed(positions=T5),
    "window-t5-own": windowed(positions=T5.override({"shared": False})),
    "window-alibi": windowed(sinks=1, n_heads=6, n_kv_heads=3, positions=c.Alibi()),
    "window-shaw": windowed(positions=c.Shaw(max_distance=2)),
    "window-transformer-xl": windowed(sinks=1, positions=c.TransformerXL()),
    "window-learned": windowed().override({"embedding.positions": c.Learned(offset=2)}),
    "t5-shared": decoder(block(attention=attention(positions=T5))),
    "longformer-in-causal": longformer(False),
    "longformer-projections-in-causal": longformer(True),
    "gemma": gemma(),
    "all-of-windows": decoder(
        block(
            attention=attention(
                pattern=c.AllOf(patterns=(c.SlidingWindow(window=5), c.Dilated(window=4, dilation=2))),
                positions=c.Rotary(),
            )
        )
    ),
    "encoder-decoder-window": encoder_decoder().override({"decoder.layers.*.attention.pattern": WINDOW}),
    "encoder-decoder-t5": encoder_decoder().override(
        {
            "encoder.layers.*.attention.positions": c.T5Buckets(n_buckets=8, max_distance=10, bidirectional=True),
            "decoder.layers.*.attention.positions": T5,
        }
    ),
}
MODELS = {name: config for name, config in CASES.items() if why_not(config) is None} | EXTRA


@lru_cache(maxsize=1)
def weights_of(name: str) -> dict[str, np.ndarray]:
    return float32_weights(MODELS[name])


@lru_cache(maxsize=8)
def model_of(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return model_with(MODELS[name], weights_of(name), dtype)


def window_of(config: c.ModelConfig) -> int:
    """How many tokens the widest layer with a bound sees."""
    assert config.decoder is not None
    reaches = [layer.attention.pattern.reach() for layer in config.decoder.blocks]
    return max((r.behind + 1 + r.sinks for r in reaches if r.behind is not None), default=4)


@dataclass(frozen=True)
class Text:
    """Two rows that a model reads, and what belongs to them."""

    tokens: np.ndarray
    globals: np.ndarray | None
    prefix: np.ndarray | None
    source: np.ndarray | None
    source_valid: np.ndarray | None

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def first(self) -> dict[str, torch.Tensor]:
        """What the first call needs beside tokens."""
        given = {"prefix_length": self.prefix, "source": self.source, "source_valid": self.source_valid}
        return {name: torch.from_numpy(value) for name, value in given.items() if value is not None}

    def oracle(self, config: c.ModelConfig, weights: dict[str, np.ndarray], codec: str) -> reference.Output:
        """Read at once, with no cache."""
        return reference.run(
            config,
            weights,
            self.tokens,
            source=self.source,
            source_valid=self.source_valid,
            prefix_length=self.prefix,
            global_tokens=self.globals,
            codec=codec,
        )


def text_for(config: c.ModelConfig, length: int, batch: int = 2, seed: int = 0) -> Text:
    """Random rows; sources of different lengths, and every fifth token global, where the model has such things."""
    rng = np.random.default_rng(seed)
    assert config.decoder is not None
    reads = frozenset().union(*(layer.attention.pattern.fields for layer in config.decoder.blocks))
    both = config.encoder is not None
    kept = np.arange(7)[None] < np.array([7, 4] * batch)[:batch, None]
    return Text(
        rng.integers(0, config.vocab_size, (batch, length)),
        rng.random((batch, length)) < 0.2 if "is_global" in reads else None,
        np.array([3, 0] * batch)[:batch] if "prefix_length" in reads else None,
        rng.integers(0, config.vocab_size, (batch, 7)) if both else None,
        kept if both else None,
    )


def length_for(name: str) -> int:
    """Three windows and one token, where angles allow it."""
    return CHANGING.get(name, 3 * window_of(MODELS[name]) + 1)


@lru_cache(maxsize=6)
def case(name: str, codec: str) -> tuple[Text, reference.Output]:
    """A text for the model of that name, and the oracle's answer."""
    text = text_for(MODELS[name], length_for(name))
    return text, text.oracle(MODELS[name], weights_of(name), codec)


SCHEDULES = ("whole", "ones", "3+5", "long", "random", "window-1", "window", "window+1")


def schedule(kind: str, text: Text, window: int, seed: int = 0) -> list[int]:
    """How many tokens each call brings."""
    length, rng = text.length, np.random.default_rng(seed)
    starts = {
        "whole": [length],
        "ones": [],
        "3+5": [3, 5, length],
        "long": [2, 1, window + 2],
        "random": rng.integers(1, window + 3, length).tolist(),
        "window-1": [window - 1],
        "window": [window],
        "window+1": [window + 1],
    }[kind]
    sizes: list[int] = []
    if text.prefix is not None:  # it must come in one piece
        sizes.append(int(text.prefix.max()))
    for size in [*starts, *[1] * length]:
        room = length - sum(sizes)
        if room and size:
            sizes.append(min(size, room))
    return sizes


Piece = tuple[np.ndarray, np.ndarray | None]
"""Indices (B, T) into each row's text, and which of them are meant (B, T), or None for all."""


def even(sizes: Sequence[int], batch: int) -> Iterator[Piece]:
    """All rows the same."""
    start = 0
    for size in sizes:
        yield np.tile(np.arange(start, start + size), (batch, 1)), None
        start += size


def ragged(sizes: Sequence[int], lengths: Sequence[int], seed: int) -> Iterator[Piece]:
    """The first row by these sizes, the others by random ones, zero too; gaps left, right and in the middle."""
    rng = np.random.default_rng(seed)
    done, number = [0] * len(lengths), 0
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        wanted = [sizes[number] if number < len(sizes) else 0]
        wanted += [int(rng.integers(0, max(sizes) + 2)) for _ in lengths[1:]]
        wanted = [min(n, length - at) for n, at, length in zip(wanted, done, lengths, strict=True)]
        number += 1
        if not any(wanted):
            continue
        width = max(wanted) + int(rng.integers(0, 3))
        index, valid = np.zeros((len(lengths), width), np.int64), np.zeros((len(lengths), width), np.bool_)
        for row, n in enumerate(wanted):
            places = np.sort(rng.permutation(width)[:n])
            index[row, places], valid[row, places] = np.arange(done[row], done[row] + n), True
            done[row] += n
        yield index, valid


def read(
    model: Transformer, cache: Cache, text: Text, pieces: Iterator[Piece], rows: Sequence[int] | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
    """Call the model for each piece: which tokens it brought (row, index), and its output."""
    chosen = np.arange(len(text.tokens)) if rows is None else np.asarray(rows)
    for index, valid in pieces:
        given = {} if any(cache.lengths) or cache.has_source else text.first()
        if text.prefix is not None and any(cache.lengths):
            given.pop("prefix_length", None)
        if text.globals is not None:
            given["global_tokens"] = torch.from_numpy(np.take_along_axis(text.globals[chosen], index, 1))
        if valid is not None:
            given["valid"] = torch.from_numpy(valid)
        tokens = torch.from_numpy(np.take_along_axis(text.tokens[chosen], index, 1))
        out = model(tokens, cache=cache, **given)
        yield index, np.ones(index.shape, np.bool_) if valid is None else valid, out


def deviations(
    found: Iterator[tuple[np.ndarray, np.ndarray, Any]], expected: reference.Output, rows: Sequence[int] | None = None
) -> float:
    """The largest of hidden states and logits, over the largest absolute value of the oracle's."""
    worst, chosen = 0.0, np.arange(len(expected.hidden)) if rows is None else np.asarray(rows)
    for index, meant, out in found:
        at, token = np.nonzero(meant)
        stands = chosen[at], index[at, token]
        worst = max(worst, deviation(expected.hidden, out.hidden, stands, (at, token)))
        if expected.logits is not None and expected.logits.ndim == 3:
            worst = max(worst, deviation(expected.logits, out.logits, stands, (at, token)))
    return worst


def deviation(oracle: np.ndarray, ours: torch.Tensor, stands: Any, at: Any) -> float:
    found = ours.double().numpy()[at]
    assert np.isfinite(found).all()
    return float(np.abs(oracle[stands] - found).max() / np.abs(oracle).max())
