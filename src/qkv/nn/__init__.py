"""The model in torch: one file per union of the config tree, one class per member.

Read in this order: `model`, `block`, `attention`, `position`, `ffn`, `norm`, `embedding`, `head`, `context`, and then
`backends`.
"""

from qkv.nn import attention, block, embedding, ffn, head, norm, position, rotary
from qkv.nn.capture import Trace, capture
from qkv.nn.init import initialise
from qkv.nn.model import Output, Transformer
from qkv.nn.registry import implementation, implements

__all__ = [
    "Output",
    "Trace",
    "Transformer",
    "attention",
    "block",
    "capture",
    "embedding",
    "ffn",
    "head",
    "implementation",
    "implements",
    "initialise",
    "norm",
    "position",
    "rotary",
]
