"""The listing "a mini Transformer in NumPy from nothing": what holds, and what fails as the errata say (E..)."""

import inspect

import numpy as np
import pytest
import torch

from .listings import s1_mini_gpt, s1_sqrt_dk
from .measure import causal, deviation


@pytest.fixture(autouse=True)
def seeded():
    np.random.seed(0)  # the listing draws from NumPy's global generator


def test_mini_gpt_runs_as_printed():
    _, input_ids, logits, next_token = s1_mini_gpt.demo()
    assert input_ids.tolist() == [[58, 62, 18, 64, 91, 84, 57, 90], [32, 12, 53, 44, 23, 50, 34, 98]]
    assert logits.shape == (2, 8, 100)
    assert logits.dtype == np.float64
    assert next_token.tolist() == [20, 50]
    two_best = np.sort(logits[:, -1], axis=-1)[:, -2:]
    assert (np.diff(two_best) > 0.03).all(), "no near tie, so that every float64 machine picks these tokens"


def test_mini_gpt_is_causal():
    model, input_ids, logits, _ = s1_mini_gpt.demo()
    changed = input_ids.copy()
    changed[:, 5:] = 7
    assert np.array_equal(model.forward(changed)[:, :5], logits[:, :5])
    assert deviation(model.forward(changed)[:, 5:], logits[:, 5:]) > 0.1


def true_count(thing: object) -> int:
    if isinstance(thing, np.ndarray):
        return thing.size
    parts = thing if isinstance(thing, list) else vars(thing).values()
    return sum(true_count(part) for part in parts)


def test_e29_the_counter_misses_the_final_layer_norm():
    model = s1_mini_gpt.MiniGPT()
    assert s1_mini_gpt.count_as_the_seed(model) == 112_640
    assert true_count(model) == 112_768
    assert true_count(model.final_ln) == 112_768 - 112_640
    assert round(174_604_259_328 / true_count(model), -4) == 1_550_000  # GPT-3 is no "1000 times" larger


def test_e29_cross_attention_exists_in_the_class_but_no_block_passes_it():
    attention, x, memory = s1_mini_gpt.MultiHeadAttention(), np.random.randn(2, 3, 64), np.random.randn(2, 5, 64)
    assert attention.forward(x, encoder_output=memory).shape == (2, 3, 64)
    assert deviation(attention.forward(x, encoder_output=memory), attention.forward(x)) > 0.1
    assert list(inspect.signature(s1_mini_gpt.TransformerBlock.forward).parameters) == ["self", "x", "causal_mask"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'encoder_output'"):
        s1_mini_gpt.TransformerBlock().forward(x, encoder_output=memory)


def test_e29_head_is_its_own_matrix_and_nothing_trains():
    model = s1_mini_gpt.MiniGPT()
    assert deviation(model.lm_head, model.token_embed.T) > 0.1
    methods = {name for cls in (type(model), type(model.blocks[0])) for name in vars(cls) if name[0] != "_"}
    assert methods == {"forward"}


def test_e18_every_matrix_has_the_constant_deviation_of_gpt_2():
    block = s1_mini_gpt.MiniGPT().blocks[0]
    for matrix in (block.attn.W_Q, block.attn.W_O, block.ffn.W1, block.ffn.W2):
        assert matrix.std() == pytest.approx(0.02, rel=0.05)  # Xavier: 0.125 for 64 x 64, 0.079 for 64 x 256


def test_e30_minus_1e9_is_minus_infinity_in_float16():
    with np.errstate(over="ignore"):
        mask = causal(4, forbidden=-1e9).astype(np.float16)
    assert np.array_equal(mask, causal(4))
    assert torch.tensor(-1e9).half() == -torch.inf


def test_e30_a_row_masked_altogether_by_minus_1e9_is_uniform_in_float32_and_unmasked_in_float64():
    scores = np.random.randn(5).astype(np.float32)
    assert s1_sqrt_dk.softmax(scores + np.float32(-1e9)).tolist() == pytest.approx([0.2] * 5, abs=1e-7)
    attention, x = s1_mini_gpt.MultiHeadAttention(), np.random.randn(1, 5, 64)
    everything = np.full((5, 5), -1e9)  # float64 keeps the scores beside it, to 1e-7
    assert deviation(attention.forward(x, causal_mask=everything), attention.forward(x)) < 1e-6


def test_e30_the_same_row_is_nan_once_the_mask_is_float16():
    with np.errstate(over="ignore", invalid="ignore"):
        everything = np.full((5, 5), -1e9).astype(np.float16)
        output = s1_mini_gpt.MultiHeadAttention().forward(np.random.randn(1, 5, 64), causal_mask=everything)
    assert np.isnan(output).all()


@pytest.mark.parametrize(("n_blocks", "blind"), [(1, True), (2, False)])
def test_e69_without_positions_only_the_second_layer_sees_the_order_of_earlier_tokens(n_blocks: int, blind: bool):
    model = s1_mini_gpt.MiniGPT()
    model.pos_embed[:] = 0
    for block in model.blocks:
        for matrix in (block.attn.W_Q, block.attn.W_K, block.attn.W_V, block.attn.W_O):
            matrix *= 10  # at 0.02 attention is nearly uniform
    model.blocks = model.blocks[:n_blocks]
    last = model.forward(np.array([[1, 2, 3, 4, 5, 6], [5, 3, 1, 2, 4, 6]]))[:, -1]
    assert (deviation(last[1], last[0]) < 1e-13) is blind
    assert blind or deviation(last[1], last[0]) > 0.01
