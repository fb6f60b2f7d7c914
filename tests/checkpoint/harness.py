"""What every family must show against its peer in `transformers`, on a tiny random model.

- Our model, loaded from the peer's folder, gives the peer's outputs (1e-4 of the largest), padded rows included.
- Saved back, every tensor is bit-identical, and the peer loads the folder and computes the same.
- A config.json as older releases wrote it gives the same config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkv.checkpoint.huggingface import read_config, read_model, write_folder
from qkv.checkpoint.safetensors import File
from qkv.config import ModelConfig
from qkv.nn import Output, Transformer

VOCAB = 96


@dataclass
class Peer:
    """One peer model to compare with."""

    make: Callable[[], nn.Module]
    """A tiny `transformers` model (its class, from its config)."""
    run: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """The peer's output for tokens (B, T) and a boolean mask of real tokens."""
    ours: Callable[[Transformer, Tensor, Tensor], Tensor]
    """Our output for the same."""
    legacy: dict[str, Any] = field(default_factory=dict)
    """A config.json of the same model as an older release wrote it; empty where the form did not change."""
    padding: str = "right"


def logits(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    """The peer's logits."""
    return model(input_ids=tokens, attention_mask=valid.long()).logits  # type: ignore[no-any-return]


def our_logits(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    """Ours."""
    out: Output = model(tokens, valid=valid)
    assert out.logits is not None
    return out.logits


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter drawn anew, so that no tensor is one or zero by default; in evaluation mode."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        # Norm weights scatter around what they start from: one, or zero where the peer adds one (Gemma). The width
        # keeps attention far from uniform: with scores near zero no output would tell a scale or an angle from another.
        centre = float(parameter.detach().flatten()[0]) if parameter.ndim == 1 and name.endswith("weight") else 0.0
        nn.init.normal_(parameter, centre, 0.3)
    return model.eval()


def load_ours(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray], Transformer]:
    """Our config, tensors and model of a peer's folder."""
    config, tensors = read_model(folder)
    model = Transformer(config).eval()
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    return config, tensors, model


def batch(padding: str) -> tuple[Tensor, Tensor]:
    """Tokens (2, 13), the second row with four of padding."""
    tokens = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(1))
    valid = torch.ones(2, 13, dtype=torch.bool)
    if padding == "right":
        valid[1, -4:] = False
    elif padding == "left":
        valid[1, :4] = False
    return tokens, valid


def deviation(expected: Tensor, found: Tensor, valid: Tensor) -> float:
    """Largest deviation over largest absolute value, on real tokens."""
    if expected.shape[:2] == valid.shape:
        expected, found = expected[valid], found[valid]
    return float((expected - found).abs().max() / expected.abs().max())


def check(peer: Peer, folder: Path) -> ModelConfig:
    """Everything above; returns our config."""
    theirs = randomised(peer.make())
    theirs.save_pretrained(folder / "theirs")  # type: ignore[operator]
    config, tensors, ours = load_ours(folder / "theirs")
    with torch.no_grad():
        for padding in ("none", peer.padding):
            tokens, valid = batch(padding)
            expected = peer.run(theirs, tokens, valid)
            assert deviation(expected, peer.ours(ours, tokens, valid), valid) < 1e-4, padding
    check_saving(theirs, config, tensors, folder)
    if peer.legacy:
        assert read_config(peer.legacy) == config
    with torch.no_grad():
        again = type(theirs).from_pretrained(folder / "ours").eval()  # type: ignore[attr-defined]
        tokens, valid = batch("none")
        assert torch.equal(peer.run(again, tokens, valid), peer.run(theirs, tokens, valid))
    return config


def check_saving(theirs: nn.Module, config: ModelConfig, tensors: dict[str, np.ndarray], folder: Path) -> None:
    """Our folder holds the peer's tensors, to the bit."""
    write_folder(folder / "ours", config, tensors)
    original, saved = File(folder / "theirs" / "model.safetensors"), File(folder / "ours" / "model.safetensors")
    assert set(saved) == set(original)
    for name in original:
        assert np.array_equal(original[name], saved[name]), name
