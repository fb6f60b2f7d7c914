"""Seed 1, "Decoder": the additive causal mask, 0 allowed and -inf forbidden.

Broken: E01 (0 * -inf is NaN, so the allowed triangle is NaN and with it every softmax row; the output printed in the
seed is what the code should give, not what it gives). E30 (elsewhere the seed uses -1e9), E61 (position i sees 0..i
and predicts i+1).
"""

import numpy as np


def create_causal_mask(seq_len):
    # Upper triangular mask: token i may attend to tokens 0..i.
    # On and below the diagonal 0 (allowed), above it -inf (forbidden).
    mask = np.triu(np.ones((seq_len, seq_len)), k=1) * (-np.inf)
    return mask


def demo():
    mask = create_causal_mask(5)
    # Printed in the seed:
    # 0. -inf -inf -inf -inf    token 0 sees itself only
    # 0. 0. -inf -inf -inf      token 1 sees tokens 0,1
    # 0. 0. 0. -inf -inf        token 2 sees tokens 0,1,2
    # 0. 0. 0. 0. -inf          token 3 sees tokens 0,1,2,3
    # 0. 0. 0. 0. 0.            token 4 sees all (0..4)
    return mask
