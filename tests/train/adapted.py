"""Small models with adapters, and what is compared of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import qkv
from qkv.config.presets import preset
from qkv.config.toy import toy
from qkv.nn import Transformer
from qkv.train.adapters import adapter_of, add_adapter

ALL = ("*attention.?_proj", "ffn.*")
TOKENS = torch.arange(24).view(2, 12) % 90


def llama(dtype: torch.dtype | None = None) -> Transformer:
    return qkv.build(toy(preset("llama-2-7b")), seed=3, dtype=dtype)


def learned(model: Transformer, name: str = "default", seed: int = 7, **options: Any) -> Transformer:
    """With an adapter whose B is no longer zero."""
    add_adapter(model, name=name, **{"targets": ALL, "rank": 4, "alpha": 8.0, **options})
    generator = torch.Generator().manual_seed(seed)
    for part in adapter_of(model, name).values():
        part.B.weight.data.normal_(0.0, 0.1, generator=generator)
    return model


def logits(model: Transformer, tokens: Tensor = TOKENS) -> Tensor:
    with torch.inference_mode():
        found = model(tokens).logits
    assert found is not None
    return found.double()


@torch.no_grad()
def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def bits(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}
