"""When a function brings its own gradient.

Some formulas have a gradient that is far cheaper than what torch makes of them operation by operation. It is used where
the ordinary autograd will ask for it: a compiler fuses the formula by itself, and torch.func transforms it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def differentiated(x: Tensor) -> bool:
    """Whether the ordinary autograd will ask for the gradient of what is computed from x."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return False
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
