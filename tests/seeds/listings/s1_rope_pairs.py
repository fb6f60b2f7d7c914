"""Seed 1, "Do not really multiply by the matrix": the pseudo code of RoPE pair by pair.

Sound: with x, m, d and the two tables as arguments it runs, and it is the block-diagonal rotation in O(d).
"""


def rotate(x, m, d, cos_table, sin_table):
    # Pseudo code: RoPE on the vector x at position m
    x_rotated = x.clone()
    for i in range(d // 2):
        cos_val = cos_table[m, i]  # cos(m * theta_i)
        sin_val = sin_table[m, i]  # sin(m * theta_i)
        x_rotated[2 * i] = x[2 * i] * cos_val - x[2 * i + 1] * sin_val
        x_rotated[2 * i + 1] = x[2 * i] * sin_val + x[2 * i + 1] * cos_val
    return x_rotated
