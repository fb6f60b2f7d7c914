"""Seed 1, "Feed-Forward Network": NumPy, two matrices with biases and ReLU.

    FFN(x) = ReLU(x W1 + b1) W2 + b2

Sound: 2,099,712 parameters at 512 x 2048.
"""

import numpy as np


class FeedForward:
    def __init__(self, d_model=512, d_ff=2048):
        # d_ff: inner width, usually 4 x d_model
        scale1 = np.sqrt(2.0 / d_model)
        scale2 = np.sqrt(2.0 / d_ff)
        self.W1 = np.random.randn(d_model, d_ff) * scale1  # up: 512 -> 2048
        self.b1 = np.zeros(d_ff)
        self.W2 = np.random.randn(d_ff, d_model) * scale2  # down: 2048 -> 512
        self.b2 = np.zeros(d_model)

    def forward(self, x):
        # x: (batch, seq_len, d_model)
        # Step 1: linear map and ReLU
        hidden = np.maximum(0, x @ self.W1 + self.b1)
        # modern Transformers (GPT) take GELU = about 0.5x(1+tanh(sqrt(2/pi)(x+0.044715x^3)))
        # Step 2: back to the model's width
        output = hidden @ self.W2 + self.b2
        return output


def demo():
    ffn = FeedForward()
    total_ffn = ffn.W1.size + ffn.W2.size + ffn.b1.size + ffn.b2.size
    # about 2 x 512 x 2048, 2.1 million, twice as many as attention
    return ffn, total_ffn
