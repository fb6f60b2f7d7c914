"""`harness.check` for a family whose models another family can express too: it is saved as the one it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from checkpoint.harness import Peer, batch, deviation, load_ours
from qkv.checkpoint.families import FAMILIES
from qkv.checkpoint.huggingface import read_config, write_config
from qkv.checkpoint.rules import to_theirs
from qkv.checkpoint.safetensors import File, write
from qkv.checkpoint.template import Family
from qkv.config import ModelConfig


def family(name: str) -> Family:
    """A family by its name."""
    return next(family for family in FAMILIES if family.name == name)


def check_as(name: str, peer: Peer, folder: Path) -> ModelConfig:
    """Equal outputs, identical tensors, the peer computes the same from our folder, old and new config.json agree."""
    theirs = drawn(peer.make())
    theirs.save_pretrained(folder / "theirs")
    config, tensors, ours = load_ours(folder / "theirs")
    with torch.no_grad():
        for padding in ("none", peer.padding):
            tokens, valid = batch(padding)
            expected = peer.run(theirs, tokens, valid)
            assert deviation(expected, peer.ours(ours, tokens, valid), valid) < 1e-4, padding
    save_as(family(name), config, tensors, folder / "ours")
    original, saved = File(folder / "theirs" / "model.safetensors"), File(folder / "ours" / "model.safetensors")
    assert set(saved) == set(original)
    for tensor in original:
        assert np.array_equal(original[tensor], saved[tensor]), tensor
    if peer.legacy:
        assert read_config(peer.legacy) == config
    with torch.no_grad():
        again = type(theirs).from_pretrained(folder / "ours").eval()
        tokens, valid = batch("none")
        assert torch.equal(peer.run(again, tokens, valid), peer.run(theirs, tokens, valid))
    return config


def drawn(model: Any) -> Any:
    """Every parameter drawn anew, in evaluation mode: wide enough that attention is far from uniform.

    With scores near zero no output would tell a softcap, a scale or an angle from another.
    """
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        # Norm weights scatter around one, and so do Gemma's, which the peer adds to one, around zero.
        centre = float(parameter.detach().flatten()[0]) if parameter.ndim == 1 and name.endswith("weight") else 0.0
        nn.init.normal_(parameter, centre, 0.3)
    return model.eval()


def save_as(family: Family, config: ModelConfig, tensors: dict[str, np.ndarray], folder: Path) -> None:
    """Our model as a folder of this family."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_config(config, family)), encoding="utf-8")
    write(folder / "model.safetensors", to_theirs(config, family.rules, tensors), {"format": "pt"})
