"""Seed 1, "Why divide by sqrt(d_k)": softmax of raw and of scaled scores of one query and ten keys.

Sound code, wrong figures: E65 (the variance of ten values of one draw is no "60-70": mean 57.6, 5-95 % range 20 to
113), E48 (a scaled row is not nearly flat: the expected top weight of ten is about .32; and the score is a sum of 64
products).
"""

import numpy as np


def softmax(x, axis=-1):
    # softmax: exp(x_i) / sum exp(x_j), a probability distribution out of any real vector
    e_x = np.exp(x - np.max(x, axis=axis, keepdims=True))  # minus the maximum against overflow
    return e_x / np.sum(e_x, axis=axis, keepdims=True)


def demo():
    d_k = 64  # dimension of K
    Q = np.random.randn(1, d_k)  # one query, standard normal
    K = np.random.randn(10, d_k)  # keys of ten tokens
    # Not scaled: the variance of Q K^T is about d_k = 64
    scores_raw = Q @ K.T  # one row of ten; the seed says "prints ~60-70" of its variance
    attn_raw = softmax(scores_raw)  # nearly one-hot
    # Scaled by sqrt(d_k): variance about 1
    scores_scaled = scores_raw / np.sqrt(d_k)  # the seed says "prints ~0.8-1.2" of its variance
    attn_scaled = softmax(scores_scaled)  # the seed shows weights between .06 and .18
    return scores_raw, attn_raw, scores_scaled, attn_scaled
