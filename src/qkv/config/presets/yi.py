"""Yi (01.AI 2024, arXiv 2403.04652): Llama's architecture with grouped keys in every size, and 64,000 tokens."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.model import ModelConfig
from qkv.config.presets.llama import heads, llama

# Table 1 of the paper; theta and epsilon from config.json of 01-ai/Yi-6B and Yi-34B. The base models read 4,096 tokens.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "yi-6b": lambda: llama(4096, 32, heads(32, 4, theta=5e6), d_ff=11_008, vocab_size=64_000, max_seq_len=4096),
    "yi-34b": lambda: llama(7168, 60, heads(56, 8, theta=5e6), d_ff=20_480, vocab_size=64_000, max_seq_len=4096),
}
