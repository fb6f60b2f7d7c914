"""Published families as data: one file per family, each with a config template and tensor rules."""

from qkv.checkpoint.families import gpt2, llama
from qkv.checkpoint.template import Family

FAMILIES: tuple[Family, ...] = (*gpt2.FAMILIES, *llama.FAMILIES)
"""Every family; of several with one model_type the first is the default."""

__all__ = ["FAMILIES"]
