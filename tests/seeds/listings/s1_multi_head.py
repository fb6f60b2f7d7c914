"""Seed 1, "The whole implementation of multi-head attention": NumPy, batch first.

Sound code. Errata: E31 (the comment promises a cross-attention mode; forward takes one x), E18 (sqrt(2/d) is He's
scale, not Xavier's), E49 (a single head has 4 d^2 parameters as well, not 3 d^2).
"""

import numpy as np


class MultiHeadAttention:
    def __init__(self, d_model=512, num_heads=8):
        # d_model: width of the model (512 in the paper); num_heads: 8 in the paper
        # d_k = d_model // num_heads, the width of one head (64)
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        assert d_model % num_heads == 0, "d_model must be divisible by num_heads"
        # Projection matrices, drawn at random in place of training
        scale = np.sqrt(2.0 / d_model)  # the seed calls this factor Xavier's
        self.W_Q = np.random.randn(d_model, d_model) * scale
        self.W_K = np.random.randn(d_model, d_model) * scale
        self.W_V = np.random.randn(d_model, d_model) * scale
        self.W_O = np.random.randn(d_model, d_model) * scale

    def _split_heads(self, x):
        # (batch, seq_len, d_model) -> (batch, num_heads, seq_len, d_k)
        batch, seq_len, _ = x.shape
        x = x.reshape(batch, seq_len, self.num_heads, self.d_k)
        return x.transpose(0, 2, 1, 3)  # (batch, heads, seq, d_k)

    def _combine_heads(self, x):
        # The reverse: heads joined to d_model
        x = x.transpose(0, 2, 1, 3)  # (batch, seq, heads, d_k)
        batch, seq_len, _, _ = x.shape
        return x.reshape(batch, seq_len, self.d_model)

    def forward(self, x, mask=None):
        # Self-attention mode: Q, K, V come from the same x
        # Cross-attention mode: Q from the decoder, K/V from the encoder
        # Step 1: projections
        Q = x @ self.W_Q  # (batch, seq, d_model)
        K = x @ self.W_K
        V = x @ self.W_V
        # Step 2: heads
        Q = self._split_heads(Q)  # (batch, 8, seq, 64)
        K = self._split_heads(K)
        V = self._split_heads(V)
        # Step 3: scaled dot-product attention inside each head, (batch, 8, seq, seq)
        scores = Q @ K.transpose(0, 1, 3, 2) / np.sqrt(self.d_k)
        # causal mask: -inf above the diagonal
        if mask is not None:
            scores = scores + mask  # 0 after softmax where -inf
        # softmax
        scores = scores - scores.max(axis=-1, keepdims=True)
        attn_weights = np.exp(scores)
        attn_weights /= attn_weights.sum(axis=-1, keepdims=True)
        # Step 4: weighted sum of V
        context = attn_weights @ V  # (batch, 8, seq, 64)
        # Step 5: join the heads, output projection
        context = self._combine_heads(context)  # (batch, seq, 512)
        output = context @ self.W_O
        return output, attn_weights


def demo():
    mha = MultiHeadAttention(d_model=512, num_heads=8)
    total_params = 0
    for name, param in [("W_Q", mha.W_Q), ("W_K", mha.W_K), ("W_V", mha.W_V), ("W_O", mha.W_O)]:  # noqa: B007 -- the seed prints it
        n = param.size
        total_params += n
    # 4 x (512 x 512) = 1,048,576; as many if each of 8 heads has its own 512 x 64 matrices
    return total_params
