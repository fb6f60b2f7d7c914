"""Small models for the oracle's tests: one layer's parts in, a whole configuration out."""

from typing import Any

import numpy as np

import qkv.config as c

EXPERTS = c.MixtureOfExperts(n_experts=4, top_k=2, d_ff=6, shared_d_ff=4)


def attention(**fields: Any) -> c.MultiHead:
    """Causal attention in four heads of width 6, two key-value heads, no positions, unless said otherwise."""
    return c.MultiHead(**{"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "pattern": c.Causal(), **fields})


def block(**fields: Any) -> c.Block:
    """A pre-norm block with a gated network, unless said otherwise."""
    plain = {"attention": attention(), "ffn": c.Gated(d_ff=10), "norm": c.RMSNorm(), "residual": c.PreNorm()}
    return c.Block(**{**plain, **fields})


def stack(*blocks: c.Block, n_layers: int = 2, **fields: Any) -> c.Stack:
    """Two layers of the given blocks and a final norm."""
    return c.Stack(n_layers=n_layers, layers=blocks or (block(),), norm=fields.pop("norm", c.RMSNorm()), **fields)


def model(decoder: c.Stack | None = None, **fields: Any) -> c.ModelConfig:
    """A decoder-only language model over 20 tokens with d_model 16."""
    plain = {"vocab_size": 20, "d_model": 16, "max_seq_len": 12, "head": c.LanguageModel(tied=False)}
    return c.ModelConfig(**{**plain, "decoder": decoder or stack(), **fields})


def encoder(*blocks: c.Block, **fields: Any) -> c.ModelConfig:
    """An encoder-only model; without blocks, its attention is bidirectional."""
    layers = stack(*(blocks or (block(attention=attention(pattern=c.Bidirectional())),)))
    plain = {"vocab_size": 20, "d_model": 16, "max_seq_len": 12, "encoder": layers}
    return c.ModelConfig(**{**plain, **fields})


def encoder_decoder(**fields: Any) -> c.ModelConfig:
    """An encoder-decoder with rotary positions."""
    both = attention(pattern=c.Bidirectional(), positions=c.Rotary())
    cross = attention(pattern=c.Bidirectional(), n_kv_heads=4)
    decoder = block(attention=attention(positions=c.Rotary()), cross_attention=cross)
    return model(stack(decoder), encoder=stack(block(attention=both)), **fields)


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    """Random token ids below 20."""
    return np.random.default_rng(seed).integers(0, 20, shape)


def here(positions: Any, **fields: Any) -> c.Coordinates:
    """Coordinates (T,) of one row in one document without global tokens."""
    position = np.array(positions)
    plain = {
        "document": np.zeros_like(position),
        "is_global": np.zeros(len(position), dtype=bool),
        "prefix_length": np.zeros_like(position),
        "length": np.full_like(position, position.max() + 1),
    }
    return c.Coordinates(position=position, **{**plain, **fields})


def deviation(a: np.ndarray, b: np.ndarray) -> float:
    """Largest absolute deviation over the largest absolute value of b."""
    assert a.shape == b.shape, f"{a.shape} against {b.shape}"
    return float(np.abs(a - b).max() / np.abs(b).max())
