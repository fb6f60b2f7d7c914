"""Evaluation: how well a model predicts text that it has not seen.

perplexity_of(lm, texts, Protocol("sliding", 1024, 512))      perplexity and bits per byte, by a named protocol
"""

from qkv.evaluate.bits import Score, disjoint_windows
from qkv.evaluate.ngram import NGram
from qkv.evaluate.perplexity import Perplexity, Protocol, perplexity_of

__all__ = ["NGram", "Perplexity", "Protocol", "Score", "disjoint_windows", "perplexity_of"]
