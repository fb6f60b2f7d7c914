"""The demo's experiment: a small Llama on the bytes of a text, beside an n-gram model of the same bytes.

The model is Llama's block (RMS norm first, rotary positions, grouped keys, SwiGLU) at d_model 128, 4 layers, with the
256 bytes as vocabulary: 820,352 parameters, on which two cores train 20,000 bytes a second. Sizes and rates were chosen
by the held-out text for two minutes of training: 2,000 steps reach 1.80 bits per byte; d_model 192 reaches 2.0 in the
same time, since fewer steps fit, and dropout of 0.1 costs 0.02.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qkv.config import (
    Block,
    Causal,
    Gated,
    LanguageModel,
    ModelConfig,
    MultiHead,
    PreNorm,
    RMSNorm,
    Rotary,
    Stack,
)
from qkv.errors import DataError
from qkv.evaluate import NGram
from qkv.text import ByteTokenizer
from qkv.train.data import split

BATCH, CONTEXT = 4, 256
LEARNING_RATE, WARMUP = 3e-3, 100
ORDER = 3
"""Of the n-gram model: it sees two bytes."""
_HELD_OUT = 0.1


def demo_config() -> ModelConfig:
    """A Llama that two cores train in two minutes."""
    heads = MultiHead(n_heads=4, n_kv_heads=2, head_dim=32, pattern=Causal(), positions=Rotary())
    block = Block(attention=heads, ffn=Gated(d_ff=384), norm=RMSNorm(), residual=PreNorm())
    return ModelConfig(
        vocab_size=ByteTokenizer.vocab_size,
        d_model=128,
        max_seq_len=CONTEXT,
        decoder=Stack(n_layers=4, layers=(block,), norm=RMSNorm()),
        head=LanguageModel(tied=True),
    )


@dataclass(frozen=True)
class Texts:
    """A text as bytes: what the models are trained on, and its end, which they are tested on."""

    training: Tensor
    held_out: Tensor

    def baseline(self) -> float:
        """Bits per byte of the n-gram model on the held-out text, its first byte left out as for the Transformer."""
        ngram = NGram(self.training.numpy(), ORDER, ByteTokenizer.vocab_size)
        return float(-np.log2(ngram.probabilities(self.held_out.numpy())[1:]).mean())

    def prompt(self) -> str:
        """The start of the held-out text: a few whole words, or characters where no spaces part words."""
        start = bytes(self.held_out[:80].tolist()).decode(errors="ignore")
        return " ".join(start.split()[1:6]) or start.strip()[:12] or "The"


def prepared(text: str, name: str) -> Texts:
    """The bytes of `text`, split. Raises DataError if there are too few."""
    tokens = torch.tensor(ByteTokenizer().encode(text))
    needed = round((CONTEXT + 1) / _HELD_OUT)
    if len(tokens) < needed:
        raise DataError(
            f"{name}: {len(tokens)} bytes of text, but training needs at least {needed}; give a longer text"
        )
    return Texts(*split(tokens, _HELD_OUT))
