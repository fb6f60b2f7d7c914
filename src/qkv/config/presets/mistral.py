"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825): Llama's block with grouped keys and, in v0.1, a sliding window."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.model import ModelConfig
from qkv.config.pattern import SlidingWindow
from qkv.config.presets.llama import heads, llama

# v0.1: table 1 of the paper (context 8,192, window 4,096; its config.json allows 32,768 positions). The window counts
# the query's own position, as the released code does. v0.3: config.json of Mistral-7B-v0.3, without a window, with a
# larger theta and 768 control tokens.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "mistral-7b": lambda: llama(
        4096, 32, heads(32, 8, pattern=SlidingWindow(window=4096)), d_ff=14_336, vocab_size=32_000, max_seq_len=8192
    ),
    "mistral-7b-v0.3": lambda: llama(
        4096, 32, heads(32, 8, theta=1e6), d_ff=14_336, vocab_size=32_768, max_seq_len=32_768
    ),
}
