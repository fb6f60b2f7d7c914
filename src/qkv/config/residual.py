"""Residuals: where a block's norms stand relative to its sublayers and the addition.

A block runs its sublayers f in order: `attention`, `cross_attention` (if any), `ffn`. The union says how each meets the
residual stream x; its members name the norms that they need.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from qkv.config.base import Variant


class Residual(Variant):
    """The union of norm placements."""

    suffixes: ClassVar[tuple[str, ...]]
    """Each sublayer owns one norm per suffix, called `<sublayer>_<suffix>`."""

    def norms(self, sublayers: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the norms of a block with these sublayers."""
        return tuple(f"{sublayer}_{suffix}" for sublayer in sublayers for suffix in self.suffixes)


class PreNorm(Residual):
    """x + f(norm(x)) (GPT-2 2019; Xiong 2020, arXiv 2002.04745)."""

    kind: Literal["pre"] = "pre"
    suffixes = ("norm",)


class PostNorm(Residual):
    """norm(x + f(x)) (Vaswani 2017; BERT, GPT-1)."""

    kind: Literal["post"] = "post"
    suffixes = ("norm",)


class SandwichNorm(Residual):
    """x + post_norm(f(norm(x))) (Ding 2021, CogView; Gemma 2 and 3)."""

    kind: Literal["sandwich"] = "sandwich"
    suffixes = ("norm", "post_norm")


class Parallel(Residual):
    """x + attention(norm(x)) + ffn(norm(x)) (GPT-J 2021; PaLM); GPT-NeoX gives each its own norm of the same x."""

    kind: Literal["parallel"] = "parallel"
    suffixes = ("norm",)
    shared_norm: bool = True
    """Whether attention and feed-forward read one norm, called `norm`."""

    def norms(self, sublayers: tuple[str, ...]) -> tuple[str, ...]:
        return ("norm",) if self.shared_norm else super().norms(sublayers)


Residual.members = (PreNorm, PostNorm, SandwichNorm, Parallel)
