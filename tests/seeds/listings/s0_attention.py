"""Seed 0, sections 1.1 and 1.2: the three projections, and scaled dot-product attention.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

Sound. Errata: E33 (here mask == 0 forbids; seed 1 adds its mask), E30 (a row without any allowed key is NaN, not
zero).
"""

import torch.nn.functional as F


def project(X, W_Q, W_K, W_V):
    # Linear projections
    Q = X @ W_Q  # (T, d) @ (d, d_k) = (T, d_k)
    K = X @ W_K  # (T, d) @ (d, d_k) = (T, d_k)
    V = X @ W_V  # (T, d) @ (d, d_v) = (T, d_v)
    return Q, K, V


def scaled_dot_product_attention(Q, K, V, mask=None):
    """
    Q: (B, T, d_k)
    K: (B, T, d_k)
    V: (B, T, d_v)
    mask: (T, T) causal mask
    """
    d_k = Q.shape[-1]

    # Step 1-2: Compute scaled attention scores
    scores = (Q @ K.transpose(-2, -1)) / (d_k**0.5)  # (B, T, T)

    # Step 3: Apply causal mask
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))

    # Step 4: Softmax
    attn_weights = F.softmax(scores, dim=-1)  # (B, T, T)

    # Step 5: Weighted sum
    output = attn_weights @ V  # (B, T, d_v)

    return output
