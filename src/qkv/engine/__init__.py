"""The native CPU engine: a config and its weights become a flat program, which a small C++ runtime executes. No torch.

    packing     weights in blocks of 16 rows: fp32, bf16, int8, int4
    lower       the config tree to a list of instructions
    program     instructions, buffers, and the builder that names them
    library     the C++ sources compiled once, and called through ctypes
    engine      a program that is ready: rows of tokens in, logits out; keys and values lie in a `qkv.cache`

What it cannot run it refuses with the reason (`why_not`).
"""

from qkv.engine.engine import Engine
from qkv.engine.lower import why_not
from qkv.engine.packing import FORMATS, Format

__all__ = ["FORMATS", "Engine", "Format", "why_not"]
