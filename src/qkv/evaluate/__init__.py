"""Evaluation: how well a model predicts text that it has not seen."""

from qkv.evaluate.bits import Score, disjoint_windows
from qkv.evaluate.ngram import NGram

__all__ = ["NGram", "Score", "disjoint_windows"]
