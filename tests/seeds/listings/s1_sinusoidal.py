"""Seed 1, "Sinusoidal positional encoding": NumPy.

    PE(pos, 2i) = sin(pos / 10000^(2i/d)),  PE(pos, 2i+1) = cos(pos / 10000^(2i/d))

Sound code, wrong comments: E03 (i = 0 is the fastest wave, the last pair the slowest), E21 (equal inner products
hold for -k too and prove no linear map; the printed difference is 7.8e-7, not 0), E22 (defined at every length), E63
(the index runs to 255), E64 (the cosine formula is printed twice).
"""

import numpy as np


def get_sinusoidal_positional_encoding(seq_len, d_model):
    # seq_len: number of tokens; d_model: even, since sine and cosine come in pairs
    PE = np.zeros((seq_len, d_model))
    # pos: a column, for broadcasting
    pos = np.arange(seq_len, dtype=np.float32).reshape(-1, 1)
    # i: the even dimensions (0, 2, 4, ...)
    i = np.arange(0, d_model, 2, dtype=np.float32)
    # Denominator 10000^(2i/d_model); the seed: "the larger i the higher the frequency,
    # i=0: denominator 1, lowest frequency; i=254: 10000^(508/512) about 10000, highest frequency"
    denominator = np.power(10000, i / d_model)  # (d_model/2,)
    # phase of each position at each frequency
    angle = pos / denominator  # (seq_len, d_model/2)
    # sine in the even dimensions, cosine in the odd ones
    PE[:, 0::2] = np.sin(angle)
    PE[:, 1::2] = np.cos(angle)
    return PE


def demo():
    seq_len, d_model = 60, 128
    pe = get_sinusoidal_positional_encoding(seq_len, d_model)
    # "checks the linear property: PE(pos+offset) is a linear map of PE(pos)"
    k = 3
    dot1 = pe[0] @ pe[k]  # PE(0) and PE(3)
    dot2 = pe[5] @ pe[5 + k]  # PE(5) and PE(8)
    # "this proves that positions at the same offset have the same inner product"
    return pe, dot1, dot2
