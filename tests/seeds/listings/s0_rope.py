"""Seed 0, section 3.2: rotary positions on adjacent pairs.

    RoPE(x, m) = R(m) x,  theta_i = 10000^(-2i/d),  <RoPE(q, m), RoPE(k, n)> = <q, R(n-m) k>

Sound: the `pairs` layout. Errata that touch what the text says of it: E23 (no free extrapolation), E24 (same
distance gives the same score, not the same weight), E25 (decay with distance is not automatic), E32 (the model of
section 6 never calls it).
"""

import torch


def apply_rope(x, positions):
    """
    x: (B, n_heads, T, d_k)
    positions: (T,) position indices
    """
    d_k = x.shape[-1]

    # Compute rotation angles
    freqs = 1.0 / (10000.0 ** (torch.arange(0, d_k, 2).float() / d_k))
    angles = positions.unsqueeze(-1) * freqs.unsqueeze(0)  # (T, d_k/2)

    cos = angles.cos()  # (T, d_k/2)
    sin = angles.sin()  # (T, d_k/2)

    # Split into pairs and rotate
    x1 = x[..., ::2]  # Even dimensions
    x2 = x[..., 1::2]  # Odd dimensions

    rotated = torch.stack(
        [
            x1 * cos - x2 * sin,
            x1 * sin + x2 * cos,
        ],
        dim=-1,
    ).flatten(-2)

    return rotated
