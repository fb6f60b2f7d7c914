"""Small models, and the two ways to run them: `qkv.nn` in float64, and the oracle.

`both` parametrises a test over the two, so that a fact is shown for each on its own; `same` runs both and compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from qkv import config as c
from qkv import reference
from qkv.nn import Trace, Transformer, capture
from qkv.nn.context import visible
from qkv.reference.attention import View
from qkv.reference.position import scheme

V, D = 23, 16

# --- Equality ---------------------------------------------------------------------------------------------------------


def deviation(found: Any, expected: Any) -> float:
    """Largest deviation over largest absolute value. A NaN gives NaN, which passes no bound."""
    found, expected = array(found), array(expected)
    assert found.shape == expected.shape, f"shapes differ: {found.shape} and {expected.shape}"
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def array(values: Any) -> np.ndarray:
    """As float64 in NumPy."""
    if isinstance(values, torch.Tensor):
        values = values.detach().double().numpy()
    return np.asarray(values, dtype=np.float64)


# --- Configurations ---------------------------------------------------------------------------------------------------


def heads(pattern: c.Pattern | None = None, n_heads: int = 4, head_dim: int = 6, **options: Any) -> c.MultiHead:
    """Causal heads, together wider than the model."""
    return c.MultiHead(n_heads=n_heads, head_dim=head_dim, pattern=pattern or c.Causal(), **options)


def block(**parts: Any) -> c.Block:
    """A pre-norm layer."""
    plain = {"attention": heads(), "ffn": c.Dense(d_ff=20, activation="relu"), "norm": c.LayerNorm()}
    return c.Block(**({**plain, "residual": c.PreNorm()} | parts))


def stack(*blocks: c.Block, n_layers: int = 2, norm: c.Norm | None = None) -> c.Stack:
    """Two layers and a final norm."""
    return c.Stack(n_layers=n_layers, layers=blocks or (block(),), norm=norm or c.LayerNorm())


def decoder(*blocks: c.Block, n_layers: int = 2, norm: c.Norm | None = None, **options: Any) -> c.ModelConfig:
    """A causal language model."""
    plain = {"vocab_size": V, "d_model": D, "max_seq_len": 32, "head": c.LanguageModel(tied=True)}
    return c.ModelConfig(**(plain | {"decoder": stack(*blocks, n_layers=n_layers, norm=norm)} | options))


def encoder(*blocks: c.Block, n_layers: int = 2, norm: c.Norm | None = None, **options: Any) -> c.ModelConfig:
    """An encoder that sees both sides, without positions."""
    layers = stack(*(blocks or (block(attention=heads(c.Bidirectional())),)), n_layers=n_layers, norm=norm)
    return c.ModelConfig(**({"vocab_size": V, "d_model": D, "max_seq_len": 32, "encoder": layers} | options))


def encoder_decoder(**options: Any) -> c.ModelConfig:
    """The plan of 2017: post-norm, sinusoids, one matrix for source, target and output."""
    two_sided = block(attention=heads(c.Bidirectional()), residual=c.PostNorm())
    causal = block(cross_attention=heads(c.Bidirectional()), residual=c.PostNorm())
    embedding = c.Embedding(scale="sqrt_d_model", positions=c.Sinusoidal())
    stacks = {"encoder": stack(two_sided, norm=c.NoNorm()), "decoder": stack(causal, norm=c.NoNorm())}
    return decoder(**(stacks | {"embedding": embedding} | options))


def tokens(*shape: int, seed: int = 0, size: int = V) -> np.ndarray:
    """Random ids."""
    return np.random.default_rng(seed).integers(0, size, shape)


# --- Whole models -----------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a forward pass gives."""

    logits: Any
    hidden: np.ndarray
    pooled: Any


Run = Callable[..., Answer]


def torch_model(cfg: c.ModelConfig, weights: dict[str, np.ndarray], dtype: torch.dtype = torch.float64) -> Transformer:
    """The torch model with these weights, ready to predict."""
    model = Transformer(cfg).to(dtype).eval()
    model.load_state_dict({name: torch.from_numpy(np.asarray(w)) for name, w in weights.items()})
    return model


def tensors(given: dict[str, Any]) -> dict[str, Any]:
    """Arrays as torch tensors; what is no array stays."""
    return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


def nn_in(dtype: torch.dtype) -> Run:
    """The torch model in this precision."""

    def run(cfg: c.ModelConfig, weights: dict[str, np.ndarray], ids: np.ndarray, **given: Any) -> Answer:
        with torch.no_grad():
            out = torch_model(cfg, weights, dtype)(torch.from_numpy(ids), **tensors(given))
        logits, hidden, pooled = (None if x is None else array(x) for x in (out.logits, out.hidden, out.pooled))
        return Answer(logits, hidden, pooled)

    return run


def nn(cfg: c.ModelConfig, weights: dict[str, np.ndarray], ids: np.ndarray, **given: Any) -> Answer:
    """The torch model in float64."""
    return nn_in(torch.float64)(cfg, weights, ids, **given)


def oracle(cfg: c.ModelConfig, weights: dict[str, np.ndarray], ids: np.ndarray, **given: Any) -> Answer:
    """The NumPy oracle."""
    out = reference.run(cfg, weights, ids, **given)
    return Answer(out.logits, out.hidden, out.pooled)


both = pytest.mark.parametrize("run", [nn, oracle])


def weights_of(cfg: c.ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights, none of them neutral."""
    return reference.random_weights(cfg, seed)


def same(cfg: c.ModelConfig, ids: np.ndarray, seed: int = 0, **given: Any) -> float:
    """The deviation of the torch model's hidden states from the oracle's, at real tokens."""
    weights = weights_of(cfg, seed)
    valid = given.get("valid", np.ones(ids.shape, dtype=bool))
    return deviation(nn(cfg, weights, ids, **given).hidden[valid], oracle(cfg, weights, ids, **given).hidden[valid])


def watched(cfg: c.ModelConfig, ids: np.ndarray, *points: str, seed: int = 0, **given: Any) -> Trace:
    """What happens at `points` inside the torch model."""
    model = torch_model(cfg, weights_of(cfg, seed))
    with torch.no_grad(), capture(model, *points) as trace:
        model(torch.from_numpy(ids), **tensors(given))
    return trace


# --- Parts: attention -------------------------------------------------------------------------------------------------


def mix(
    run: Run, q: np.ndarray, k: np.ndarray, v: np.ndarray, attention: c.MultiHead, extra: Any = None, **given: Any
) -> np.ndarray:
    """What attention makes of queries (T, H, F) and keys and values (T, G, F): (T, H, F).

    The vectors stand side by side in the token table of a model of one layer, whose projections pick them out and whose
    o_proj writes the result into a slot of zeros. `extra` holds tensors of the attention's positions.
    """
    length, width = len(q), q[0].size
    parts = [x.reshape(length, -1) for x in (q, k, v)] + [np.zeros((length, width))]
    table = np.concatenate(parts, axis=1)
    silent = block(attention=attention, ffn=c.Dense(d_ff=1, activation="relu"), norm=c.NoNorm())
    cfg = encoder(silent, n_layers=1, norm=c.NoNorm(), vocab_size=length, d_model=table.shape[1], max_seq_len=length)
    weights = {name: np.zeros(shape) for name, (shape, _) in cfg.parameters().items()}
    weights["embed.tokens.weight"] = table
    identity, start = np.eye(table.shape[1]), 0
    for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=False):
        weights[f"encoder.layers.0.attention.{name}.weight"] = identity[start : start + part.shape[1]]
        start += part.shape[1]
    weights["encoder.layers.0.attention.o_proj.weight"] = identity[:, start:]
    weights |= {f"encoder.layers.0.attention.positions.{name}": x for name, x in (extra or {}).items()}
    batch = {name: x if isinstance(x, str) else np.asarray(x)[None] for name, x in given.items()}  # backend="..."
    hidden = run(cfg, weights, np.arange(length)[None], **batch).hidden
    return hidden[0, :, start:].reshape(q.shape)


def attention_matrix(run: Run, q: np.ndarray, k: np.ndarray, attention: c.MultiHead, **given: Any) -> np.ndarray:
    """The weights (H, T, T) themselves, since the values are rows of the identity.

    Heads are made as wide as the row is long, by zeros: not for positions that depend on the width of a head.
    """
    length, width = len(q), max(len(q), q.shape[-1])
    q, k = (np.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (q, k))
    v = np.repeat(np.eye(length, width)[:, None], k.shape[1], axis=1)
    wide = attention.override({"head_dim": width, "scale": attention.score_scale})
    return mix(run, q, k, v, wide, **given).transpose(1, 0, 2)[..., :length]


def softmax(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Over the last axis, where seen."""
    power = np.where(seen, np.exp(scores - scores.max()), 0)
    return power / power.sum(axis=-1, keepdims=True)


def slopes(run: Run, n_heads: int) -> np.ndarray:
    """Read off a model whose queries and keys are zero: the weights fall by e^-slope per position."""
    nothing = np.zeros((2, n_heads, 1))
    weights = attention_matrix(run, nothing, nothing, heads(n_heads=n_heads, head_dim=1, positions=c.Alibi()))
    return np.log(weights[:, 1, 1] / weights[:, 1, 0])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def at(positions: Any, **fields: Any) -> c.Coordinates:
    """Where the tokens of one row stand: every field (T,)."""
    position = np.asarray(positions)
    plain = {"document": np.zeros_like(position), "is_global": np.zeros(len(position), dtype=bool)}
    plain |= {"prefix_length": np.zeros_like(position), "length": np.full_like(position, position.max() + 1)}
    return c.Coordinates(**({"position": position} | plain | fields))


def nn_mask(pattern: c.Pattern, query: c.Coordinates, key: c.Coordinates) -> np.ndarray:
    """Who sees whom, by `qkv.nn`: (T, S) booleans."""

    def rows(where: c.Coordinates) -> c.Coordinates:
        values = {field.name: getattr(where, field.name) for field in fields(where)}
        return c.Coordinates(**{name: torch.from_numpy(value)[None] for name, value in values.items()})

    return visible(pattern, rows(query), rows(key))[0].numpy()


def oracle_mask(pattern: c.Pattern, query: c.Coordinates, key: c.Coordinates) -> np.ndarray:
    """Who sees whom, by the oracle."""
    return reference.attention.visible(pattern, View(query, key))


masks = pytest.mark.parametrize("mask", [nn_mask, oracle_mask])


# --- Parts: rotary positions ------------------------------------------------------------------------------------------


def nn_turn(rotary: c.Rotary, x: np.ndarray, positions: np.ndarray, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """x (T, H, F) turned to its positions: the queries of a model whose q_proj is the identity."""
    length, n_heads, width = x.shape
    attention = heads(c.Bidirectional(), n_heads=n_heads, head_dim=width, positions=rotary)
    silent = block(attention=attention, ffn=c.Dense(d_ff=1, activation="relu"), norm=c.NoNorm())
    cfg = encoder(silent, n_layers=1, vocab_size=length, d_model=n_heads * width)
    weights = {name: np.zeros(shape) for name, (shape, _) in cfg.parameters().items()}
    weights["embed.tokens.weight"] = x.reshape(length, -1)
    weights["encoder.layers.0.attention.q_proj.weight"] = np.eye(n_heads * width)
    model = torch_model(cfg, weights, dtype)
    with torch.no_grad(), capture(model, "encoder.layers.0.attention.q") as trace:
        model(torch.arange(length)[None], positions=torch.from_numpy(positions)[None])
    return array(trace["encoder.layers.0.attention.q"][0].transpose(0, 1))


def oracle_turn(rotary: c.Rotary, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The same by the oracle."""
    return scheme(rotary, {}).turn(x, at(positions))


turns = pytest.mark.parametrize("turn", [nn_turn, oracle_turn])
Turn = Callable[[c.Rotary, np.ndarray, np.ndarray], np.ndarray]


def frequencies(turn: Turn, rotary: c.Rotary, width: int, length: int = 2) -> tuple[np.ndarray, float]:
    """The frequency of each pair in a row of `length` positions, and the factor of cosine and sine.

    Read off what position 1 makes of pairs (1, 0): (factor cos w, factor sin w).
    """
    halves = rotary.layout == "halves"
    x = np.zeros((2, 1, width))
    first, second = (slice(width // 2), slice(width // 2, None)) if halves else (slice(0, None, 2), slice(1, None, 2))
    x[:, :, first] = 1.0
    turned = turn(rotary, x, np.array([1, length - 1]))[0, 0]
    sizes = np.hypot(turned[first], turned[second])
    assert np.ptp(sizes) < 1e-14 * sizes[0], "every pair has the same factor"
    return np.arctan2(turned[second], turned[first]), float(sizes[0])


def ratios(
    turn: Turn, scaling: c.RotaryScaling, width: int = 128, base: float = 10_000.0, length: int = 2
) -> np.ndarray:
    """Each pair's frequency over its frequency without scaling."""
    plain, _ = frequencies(turn, c.Rotary(theta=base), width)
    return frequencies(turn, c.Rotary(theta=base, scaling=scaling), width, length)[0] / plain


def effective_base(turn: Turn, scaling: c.RotaryScaling, length: int = 2) -> float:
    """theta' of a rule that changes nothing but theta: pair 1 of 64 has frequency theta'^(-1/64)."""
    found, factor = frequencies(turn, c.Rotary(scaling=scaling), 128, length)
    base = float(found[1] ** -64)
    assert factor == pytest.approx(1, abs=1e-15)
    assert deviation(found, base ** (-np.arange(0, 128, 2) / 128)) < 1e-12
    return base


# --- Memory -----------------------------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], object], folder: Path) -> int:
    """The most memory that torch held at once for `work`, beyond what it held before; the allocator's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        work()
    file = folder / "trace.json"
    measured.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "[memory]"]
    assert events, "the profiler recorded no allocation"
    held = np.cumsum([event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])])
    return int(held.max())
