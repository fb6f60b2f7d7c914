"""The operation of a norm."""

from __future__ import annotations

from qkv import config as c
from qkv.plan.program import Writer


def norm(config: c.Norm, w: Writer, name: str, read: str, write: str, owned: bool = True) -> str:
    """The norm of `read`; the name of the result, which is `read` itself where there is no norm."""
    if config.kind == "none":
        return read
    width = w.shapes[read][-1].size
    assert width is not None, "only axes of known width are normalised"
    w.op(name, f"{write} = {config.kind}({read})", (read,), write, parameters=config.parameters(width) if owned else {})
    return write
