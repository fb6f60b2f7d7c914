"""Seed 1, "The whole computation of self-attention": NumPy, without learned weights (Q = K = V = X).

Sound code, wrong promise: E19 ("it" does not find "cat": each token finds itself, and "cat" comes third), E20
(equivariant, not invariant; the scores are symmetric only because W_Q = W_K here), E47 (linear in V, not in X).
"""

import numpy as np


def self_attention(X, d_k=64):
    # X: (seq_len, d_model), the vectors of all tokens of one sentence
    seq_len, d_model = X.shape  # noqa: RUF059 -- unused in the seed too
    # In a real Transformer Q = X @ W_Q, K = X @ W_K, V = X @ W_V; the demonstration takes X itself (d_k = d_model).
    Q = X.copy()  # Query: "what I look for"
    K = X.copy()  # Key: "what label I carry"
    V = X.copy()  # Value: "what I bring"
    # Step 1: scores (seq_len, seq_len); (i, j) is how much token i attends to token j
    scores = Q @ K.T
    # Step 2: scale
    scores = scores / np.sqrt(d_k)
    # Step 3: softmax of each row
    attn_weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    attn_weights /= attn_weights.sum(axis=1, keepdims=True)
    # Step 4: weighted sum of V, (seq_len, d_model)
    output = attn_weights @ V
    return output, attn_weights


def demo():
    # "how it finds cat through attention"
    np.random.seed(42)
    tokens = ["The", "cat", "sat", "it", "was", "tired"]
    # eight dimensions for each token
    embeddings = np.random.randn(len(tokens), 8)
    output, weights = self_attention(embeddings, d_k=8)
    # "if the largest weight of the row of it is in the column of cat, attention has worked"
    return tokens, embeddings, output, weights
