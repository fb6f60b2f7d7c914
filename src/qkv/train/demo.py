"""The demo's experiment: a small Llama on the bytes of a text, beside an n-gram model of the same bytes.

The model is Llama's block (RMS norm first, rotary positions, grouped keys, SwiGLU) at d_model 128, 4 layers, with the
256 bytes as vocabulary: 820,352 parameters, on which two cores train 20,000 bytes a second. Sizes and rates were chosen
by the held-out text for two minutes of training: 2,000 steps reach 1.80 bits per byte; d_model 192 reaches 2.0 in the
same time, since fewer steps fit, and dropout of 0.1 costs 0.02.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

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
from qkv.config.recipe import DataSource, ModelSource, Recipe, Run
from qkv.config.training import Cosine
from qkv.errors import DataError
from qkv.evaluate import NGram
from qkv.text import ByteTokenizer
from qkv.train.trainer import Trainer

BATCH, CONTEXT = 4, 256
PEAK, WARMUP = 3e-3, 100
ORDER = 3
"""Of the n-gram model: it sees two bytes."""
_HELD_OUT = 0.1
_TRIAL = 12  # steps, by which a machine's pace is judged


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
    """The bytes of `text`, split between two characters. Raises DataError if there are too few."""
    content = text.encode()
    needed = round((CONTEXT + 1) / _HELD_OUT)
    if len(content) < needed:
        raise DataError(
            f"{name}: {len(content)} bytes of text, but training needs at least {needed}; give a longer text"
        )
    edge = len(content) - round(len(content) * _HELD_OUT)
    while content[edge] & 0xC0 == 0x80:  # inside a character
        edge -= 1
    training, held_out = (torch.tensor(list(part)) for part in (content[:edge], content[edge:]))
    return Texts(training, held_out)


def demo_recipe(texts: Texts, steps: int, seed: int, folder: Path) -> Recipe:
    """The run, with its texts in `folder`."""
    files = []
    for name, tokens in (("train", texts.training), ("valid", texts.held_out)):
        files.append(folder / f"{name}.txt")
        files[-1].write_bytes(bytes(tokens.tolist()))
    train, valid = map(str, files)
    return Recipe(
        model=ModelSource(config=demo_config(), seed=seed, overrides={}),
        data=DataSource(train=(train,), valid=(valid,), context=CONTEXT),
        schedule=Cosine(peak=PEAK, warmup=min(WARMUP, steps)),
        run=Run(steps=steps, batch=BATCH, seed=seed, folder=str(folder / "run")),
    )


def steps_within(seconds: float, recipe: Recipe) -> int:
    """How many of the recipe's steps this machine can make in so many seconds, by a short trial; one at least."""
    with TemporaryDirectory() as folder:
        trial = Trainer.start(recipe.override({"run.folder": folder}))
        times = [time.monotonic() for _ in islice(trial.run(), min(_TRIAL, recipe.run.steps - 1))]
    if len(times) < 3:
        return recipe.run.steps
    pace = (times[-1] - times[0]) / (len(times) - 1)  # without the first step: memory is taken and libraries start
    return max(1, min(recipe.run.steps, int(seconds / pace)))
