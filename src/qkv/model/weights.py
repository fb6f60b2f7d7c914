"""Models with fresh weights, and weights between torch and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qkv.config import ModelConfig
from qkv.config.presets import preset
from qkv.nn import Transformer, initialise


def build(
    config: ModelConfig | str,
    seed: int = 0,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """A model with fresh weights, from a config or the name of a preset.

    The same seed gives the same weights on every machine. The model comes in evaluation mode, so that a forward pass is
    deterministic; call `.train()` before training if the config has dropout.
    """
    config = preset(config) if isinstance(config, str) else config
    model = skeleton(config).to(dtype).to_empty(device=device or "cpu")
    initialise(model, config, seed)
    return model.eval()


def skeleton(config: ModelConfig) -> Transformer:
    """The module tree with shapes and no memory."""
    with torch.device("meta"):
        return Transformer(config)


def arrays(model: Transformer) -> dict[str, npt.NDArray[Any]]:
    return {name: array(tensor) for name, tensor in model.state_dict().items()}


def array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """bfloat16 as its bits in uint16."""
    whole = tensor.detach().cpu().contiguous()
    array: npt.NDArray[Any] = (whole.view(torch.uint16) if whole.dtype == torch.bfloat16 else whole).numpy()
    return array


def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """The same memory where torch can use it."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
