"""Seed 0, section 4.1: the SwiGLU feed-forward network.

    SwiGLU(x) = W2 (W1 x * silu(W_gate x))

Sound. E27: it has three matrices, 3 d d_ff parameters, so that a layer is 12 d^2 only when d_ff = 8d/3. E71: that
width is a habit (Llama 2 70B takes 3.5d).
"""

import torch.nn.functional as F
from torch import nn


class SwiGLUFFN(nn.Module):
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.w1 = nn.Linear(d_model, d_ff, bias=False)
        self.w_gate = nn.Linear(d_model, d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        # Gate branch with Swish activation
        gate = F.silu(self.w_gate(x))  # silu = swish = x * sigmoid(x)
        # Up projection
        up = self.w1(x)
        # Element-wise product and down projection
        return self.w2(gate * up)
