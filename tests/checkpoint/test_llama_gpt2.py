"""Llama and GPT-2 against the peer library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as t

from checkpoint.harness import VOCAB, Peer, check, logits, our_logits, randomised
from qkv.checkpoint.huggingface import read_model
from qkv.checkpoint.safetensors import File, write

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
LEGACY = {
    **SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "torch_dtype": "float16", "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
# As openai-community/gpt2 has them.
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "resid_pdrop": 0.1,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": VOCAB,
}  # fmt: skip
ROPE3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def llama(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**SMALL, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, **changes}
    return Peer(lambda: t.LlamaForCausalLM(t.LlamaConfig(**settings)), logits, our_logits, {**LEGACY, **legacy})


def gpt2(**changes: Any) -> Peer:
    settings = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **changes}
    # The peer gives left-padded rows positions that count the padding, unless told otherwise.
    return Peer(lambda: t.GPT2LMHeadModel(t.GPT2Config(**settings)), logits, our_logits, GPT2 | changes)


PEERS = {
    "llama": llama({}),
    "llama-grouped-tied": llama(
        {"num_key_value_heads": 2, "tie_word_embeddings": True}, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "llama-3.1": llama(
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **ROPE3}},
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **ROPE3},
    ),
    "llama-linear": llama(
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama-yarn": llama(
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "llama-biases-wide-heads": llama(
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12}, attention_bias=True, mlp_bias=True, head_dim=12
    ),
    "gpt2": gpt2(),
    "gpt2-inner": gpt2(n_inner=40, activation_function="relu"),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check(PEERS[name], tmp_path)


def test_the_published_gpt2_files_lack_the_prefix_and_hold_masks(tmp_path: Path) -> None:
    randomised(gpt2().make()).save_pretrained(tmp_path)  # type: ignore[operator]
    config, tensors = read_model(tmp_path)
    expected = {name: np.array(value) for name, value in tensors.items()}
    file = tmp_path / "model.safetensors"
    held = {name.removeprefix("transformer."): np.array(value) for name, value in File(file).items()}
    write(file, held | {"h.0.attn.bias": np.tril(np.ones((1, 1, 64, 64), np.float32))})
    again, found = read_model(tmp_path)
    assert again == config
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
