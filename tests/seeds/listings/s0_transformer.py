"""Seed 0, section 6: the modern block and the whole model.

Broken as it stands: E32 (the block calls `attention(h, positions)` but attention takes one argument: TypeError;
`positions` is made on the CPU wherever the tokens are; even repaired, no position reaches the scores). The
parameters are right: built with the numbers of section 7.2 the model has the exact count of LLaMA 7B. E53: later
members of the family do tie.
"""

import torch
from torch import nn

from .s0_multi_head import MultiHeadAttention
from .s0_norm import RMSNorm
from .s0_swiglu import SwiGLUFFN


class TransformerBlock(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attn_norm = RMSNorm(d_model)
        self.attention = MultiHeadAttention(d_model, n_heads)
        self.ffn_norm = RMSNorm(d_model)
        self.ffn = SwiGLUFFN(d_model, d_ff)

    def forward(self, x, positions):
        # Self-attention with pre-norm and residual
        h = self.attn_norm(x)
        h = self.attention(h, positions)
        x = x + h

        # FFN with pre-norm and residual
        h = self.ffn_norm(x)
        h = self.ffn(h)
        x = x + h

        return x


class Transformer(nn.Module):
    def __init__(self, vocab_size, d_model, n_heads, n_layers, d_ff):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList([TransformerBlock(d_model, n_heads, d_ff) for _ in range(n_layers)])
        self.norm = RMSNorm(d_model)
        self.output = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, token_ids):
        x = self.embedding(token_ids)
        positions = torch.arange(token_ids.shape[1])

        for layer in self.layers:
            x = layer(x, positions)

        x = self.norm(x)
        logits = self.output(x)
        return logits
