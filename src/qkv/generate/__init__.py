"""Generation: one token after another. No torch: a model is reached through a function from tokens to logits."""

from qkv.generate.loop import Generation, NextLogits, continuation
from qkv.generate.sampling import draw

__all__ = ["Generation", "NextLogits", "continuation", "draw"]
