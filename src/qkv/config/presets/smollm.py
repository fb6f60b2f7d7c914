"""SmolLM2 (Hugging Face 2024, arXiv 2502.02737): Llama's architecture, small, tied, with nine heads over three."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.init import LlamaInit
from qkv.config.model import ModelConfig
from qkv.config.presets.llama import heads, llama

# config.json of HuggingFaceTB/SmolLM2-135M; its `initializer_range` is 1/24 = 1/sqrt(576).
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "smollm2-135m": lambda: llama(
        576, 30, heads(9, 3, head_dim=64, theta=1e5), d_ff=1536, vocab_size=49_152, max_seq_len=8192, tied=True
    ).override({"init": LlamaInit(std=576**-0.5)}),
}
