"""Memory that one training step frees is kept for the next.

A step frees hundreds of megabytes of activations and gradients, and the next asks for the same again. The C library
hands large pieces back to the system, which must then fill each page with zeros anew: at times a tenth of a step.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_NEVER, _GIGABYTE = -1, 1 << 30


def keep_freed_memory() -> bool:
    """From here on this process gives no memory back before it ends; whether its C library can be told so."""
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(library.mallopt(_MMAP_THRESHOLD, _GIGABYTE))
