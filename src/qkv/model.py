"""Where the parts meet: a config becomes a model, a model with a tokenizer a `TextModel`; to disk and back.

model = build(cfg, seed=0)           a torch module with fresh weights
lm = load("runs/demo")               a saved model with its tokenizer
lm.generate("The with statement").text
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qkv.checkpoint import native
from qkv.config import Learned, ModelConfig
from qkv.config.presets import preset
from qkv.errors import CheckpointError, GenerationError
from qkv.generate import Generation, continuation
from qkv.nn import Transformer, initialise
from qkv.text import Tokenizer, tokenizer_from


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
    model = _skeleton(config).to(dtype).to_empty(device=device or "cpu")
    initialise(model, config, seed)
    return model.eval()


def save(model: Transformer, folder: str | PathLike[str], tokenizer: Tokenizer | None = None) -> None:
    """Write `model` as a folder that `load` reads; an older save there is replaced, anything else is refused."""
    arrays = {name: _array(name, tensor) for name, tensor in model.state_dict().items()}
    native.write(Path(folder), model.config, arrays, None if tokenizer is None else tokenizer.to_dict())


def load(
    path: str | PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> TextModel:
    """A saved model, in evaluation mode. Its weights are mapped from disk, and read when they are first used."""
    saved = native.read(Path(path))
    model = _skeleton(saved.config)
    weights = {name: torch.from_numpy(array) for name, array in saved.tensors.items()}
    model.load_state_dict(weights, assign=True)
    tokenizer = None if saved.tokenizer is None else tokenizer_from(saved.tokenizer)
    return TextModel(model.to(device=device, dtype=dtype).eval(), tokenizer)


class TextModel:
    """A model together with its tokenizer."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config

    def generate(self, prompt: str, max_new_tokens: int = 64, *, temperature: float = 0.8, seed: int = 0) -> Generation:
        """Continue `prompt`. Temperature 0 takes the likeliest token each time; else the seed fixes the draws."""
        tokens = list(self._tokens(prompt, max_new_tokens, temperature, seed))
        return Generation(self._tokenizer.decode(tokens), tokens, "length")

    def stream(
        self, prompt: str, max_new_tokens: int = 64, *, temperature: float = 0.8, seed: int = 0
    ) -> Iterator[str]:
        """The text of `generate`, piece by piece as it is generated."""
        return self._tokenizer.stream(self._tokens(prompt, max_new_tokens, temperature, seed))

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the model and its tokenizer as a folder that `load` reads."""
        save(self.model, folder, self.tokenizer)

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise GenerationError("tokenizer: this model was saved without one; give TextModel(model, tokenizer) one")
        return self.tokenizer

    def _tokens(self, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        tokens, config = self._tokenizer.encode(prompt), self.config
        if config.decoder is None or config.encoder is not None or config.head.reads != "past":
            raise GenerationError("generate: needs a decoder-only model with a language-model head")
        wanted, limit = len(tokens) + max_new_tokens, config.max_seq_len
        if isinstance(config.embedding.positions, Learned) and wanted > limit:
            raise GenerationError(
                f"max_new_tokens: {wanted} tokens with the prompt, but the model has {limit} positions"
            )
        reads_prefix = any("prefix_length" in b.attention.pattern.fields for b in config.decoder.blocks)
        device = next(self.model.parameters()).device
        prefix = torch.tensor([len(tokens)], device=device) if reads_prefix else None

        def next_logits(so_far: list[int]) -> npt.NDArray[np.floating]:
            # Without a cache every step reads the whole text again: O(T^2) steps of work, the same result.
            with torch.inference_mode():
                logits = self.model(torch.tensor([so_far], device=device), prefix_length=prefix).logits
            last: npt.NDArray[np.floating] = logits[0, -1].float().cpu().numpy()
            return last

        return continuation(next_logits, tokens, max_new_tokens, temperature=temperature, seed=seed)


def _skeleton(config: ModelConfig) -> Transformer:
    """The module tree with shapes and no memory."""
    with torch.device("meta"):
        return Transformer(config)


def _array(name: str, tensor: torch.Tensor) -> npt.NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        raise CheckpointError(f"{name}: bfloat16 cannot be saved; call model.float() first, which loses nothing")
    array: npt.NDArray[Any] = tensor.detach().cpu().contiguous().numpy()
    return array
