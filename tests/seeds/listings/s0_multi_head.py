"""Seed 0, section 2: multi-head attention in PyTorch with one fused QKV projection.

Broken as it stands: E32 (`causal_mask` is a global that nobody defines, so every call is a NameError; `apply_rope`
is never called, so that no position reaches the scores; `forward` takes x only). With a causal mask put into the
module's globals the listing is sound. E70: n_heads x d_k = d_model is a habit, not a law.
"""

from torch import nn

from .s0_attention import scaled_dot_product_attention


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.d_k = d_model // n_heads

        # Combined QKV projection for efficiency
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        B, T, d = x.shape

        # Project to Q, K, V
        qkv = self.qkv_proj(x)  # (B, T, 3*d)
        Q, K, V = qkv.chunk(3, dim=-1)  # each (B, T, d)

        # Reshape for multi-head: (B, T, d) -> (B, n_heads, T, d_k)
        Q = Q.view(B, T, self.n_heads, self.d_k).transpose(1, 2)
        K = K.view(B, T, self.n_heads, self.d_k).transpose(1, 2)
        V = V.view(B, T, self.n_heads, self.d_k).transpose(1, 2)

        # Scaled dot-product attention; the undefined name is the seed's own fault (E32)
        attn = scaled_dot_product_attention(Q, K, V, causal_mask)

        # Reshape back: (B, n_heads, T, d_k) -> (B, T, d)
        attn = attn.transpose(1, 2).contiguous().view(B, T, d)

        return self.out_proj(attn)
