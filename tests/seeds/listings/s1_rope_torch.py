"""Seed 1, "The whole PyTorch implementation" of RoPE.

Broken: E02 (`rotate_half` swaps halves, the tables are repeated for adjacent pairs: the result is no rotation), E59
(the tables are saved with the model; no offset for cached decoding; a length over max_seq_len fails by
broadcasting). The tables themselves are right: E10, E12 (values of theta), E13 (radians), E62 (pair 0 turns at 1
whatever the base).
"""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """RoPE"""

    def __init__(self, dim: int, max_seq_len: int = 2048, base: float = 10000.0):
        """dim: width of a head (d_k), even; max_seq_len: longest sequence; base: theta_base."""
        super().__init__()
        self.dim = dim
        self.max_seq_len = max_seq_len
        self.base = base
        # 1. Frequency of each pair: theta_i = base^(-2i/d), i = 0 .. d/2-1
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))  # shape: [d/2]
        # 2. Outer product of positions and frequencies: freqs[m, i] = m * theta_i
        t = torch.arange(max_seq_len).float()  # [max_seq_len]
        freqs = torch.outer(t, inv_freq)  # [max_seq_len, d/2]
        # 3. Tables of cosines and sines
        self.register_buffer("cos_cached", freqs.cos())  # [max_seq_len, d/2]
        self.register_buffer("sin_cached", freqs.sin())

    def forward(self, x: torch.Tensor, seq_len: int):
        """cos and sin of the positions"""
        return (
            self.cos_cached[:seq_len, :],  # [seq_len, d/2]
            self.sin_cached[:seq_len, :],
        )


def rotate_half(x: torch.Tensor):
    """
    The seed: groups adjacent dimensions in twos and does [x0, x1] -> [-x1, x0]
    input:  [x0, x1, x2, x3, ...]
    output: [-x1, x0, -x3, x2, ...]
    """
    x1 = x[..., : x.shape[-1] // 2]  # first half
    x2 = x[..., x.shape[-1] // 2 :]  # second half
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
):
    """q, k: [batch, num_heads, seq_len, d_k]; cos, sin: [seq_len, d_k/2], repeated to d_k; gives q and k rotated."""
    # tables [seq_len, d/2], each entry repeated once -> [seq_len, d]
    cos = cos.repeat_interleave(2, dim=-1)  # [seq, d]
    sin = sin.repeat_interleave(2, dim=-1)  # [seq, d]
    # x_rotated = x * cos + rotate_half(x) * sin
    # "rotate_half turns [x0, x1] into [-x1, x0], so this is [x0 cos - x1 sin, x1 cos + x0 sin]"
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def demo():
    batch, n_heads, seq_len, d_k = 2, 32, 512, 128
    rope = RotaryEmbedding(dim=d_k, max_seq_len=2048, base=10000.0)
    cos, sin = rope(None, seq_len)  # the first seq_len positions
    q = torch.randn(batch, n_heads, seq_len, d_k)
    k = torch.randn(batch, n_heads, seq_len, d_k)
    q_rope, k_rope = apply_rotary_pos_emb(q, k, cos, sin)
    return q, k, q_rope, k_rope
