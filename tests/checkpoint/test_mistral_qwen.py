"""Mistral, Mixtral, Qwen2 and Qwen3 against the peer library, and their released config.json files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as t

import qkv
from checkpoint.as_family import check_as, family
from checkpoint.harness import VOCAB, Peer, logits, our_logits
from qkv.checkpoint.huggingface import read_config, write_config
from qkv.errors import CheckpointError

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": True,
}  # fmt: skip
MISTRAL = SMALL | COMMON | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 10000.0, "sliding_window": None,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rope_theta": 1e6, "num_experts_per_tok": 2,
    "num_local_experts": 5, "output_router_logits": False, "router_aux_loss_coef": 0.02,
}  # fmt: skip
QWEN2 = SMALL | COMMON | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0, "max_window_layers": 3,
    "sliding_window": 64, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
QWEN3 = SMALL | COMMON | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 12,
    "max_window_layers": 3, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


def mistral(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**SMALL, "sliding_window": None, "pad_token_id": None, **changes}
    return Peer(lambda: t.MistralForCausalLM(t.MistralConfig(**settings)), logits, our_logits, {**MISTRAL, **legacy})


def mixtral(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**SMALL, "num_local_experts": 5, **changes}
    return Peer(lambda: t.MixtralForCausalLM(t.MixtralConfig(**settings)), logits, our_logits, {**MIXTRAL, **legacy})


def qwen2(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**SMALL, "rope_parameters": PLAIN, "max_window_layers": 3, **changes}
    return Peer(lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**settings)), logits, our_logits, {**QWEN2, **legacy})


def qwen3(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**SMALL, "rope_parameters": PLAIN, "head_dim": 12, "tie_word_embeddings": True, **changes}
    return Peer(lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**settings)), logits, our_logits, {**QWEN3, **legacy})


MIXED = ["full_attention", "sliding_attention", "full_attention"]
PEERS = {
    "mistral": mistral({}),
    "mistral-window": mistral({"sliding_window": 5}, sliding_window=5),
    "mistral-nemo": mistral({"head_dim": 12, "rope_theta": 1e6}, head_dim=12, rope_parameters=PLAIN),
    "mixtral": mixtral({}),
    "mixtral-window-tied": mixtral(
        {"sliding_window": 4, "tie_word_embeddings": True, "num_experts_per_tok": 3},
        sliding_window=4,
        tie_word_embeddings=True,
        num_experts_per_tok=3,
    ),
    "qwen2": qwen2({}),
    "qwen2-tied": qwen2({"tie_word_embeddings": True}, tie_word_embeddings=True),
    "qwen2-upper-windows": qwen2(
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
    ),
    "qwen2-all-windows": qwen2(
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=0,
    ),
    "qwen2-listed-windows": qwen2(
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED},
        use_sliding_window=True,
        sliding_window=5,
        layer_types=MIXED,
    ),
    "qwen2-yarn": qwen2(
        {"rope_scaling": {"type": "yarn", **YARN}}, rope_parameters={**PLAIN, "rope_type": "yarn", **YARN}
    ),
    "qwen3": qwen3({}),
    "qwen3-untied": qwen3({"tie_word_embeddings": False}, tie_word_embeddings=False),
    "qwen3-biases-windows": qwen3(
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check_as(name.partition("-")[0], PEERS[name], tmp_path)


# What the released files say, shortened by keys of the tokenizer and of generation that other tests hold.
LARGE = COMMON | {"rms_norm_eps": 1e-05, "tie_word_embeddings": False, "vocab_size": 32000}
MISTRAL_7B = LARGE | {
    "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
}  # fmt: skip
QWEN2_7B = LARGE | {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
RELEASED = {
    "mistral-7b": MISTRAL_7B,
    "mistral-7b-v0.3": MISTRAL_7B | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    "qwen2-0.5b": QWEN2_7B | {
        "hidden_size": 896, "intermediate_size": 4864, "max_window_layers": 24, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "qwen2-1.5b": QWEN2_7B | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
        "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "qwen2-7b": QWEN2_7B,
    "qwen2-72b": QWEN2_7B | {
        "hidden_size": 8192, "intermediate_size": 29568, "max_window_layers": 80, "num_attention_heads": 64,
        "num_hidden_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_the_preset(name: str) -> None:
    preset = qkv.preset(name)
    assert read_config(RELEASED[name]).override({"max_seq_len": preset.max_seq_len}) == preset


@pytest.mark.parametrize("name", RELEASED)
def test_a_preset_is_written_and_read(name: str) -> None:
    preset = qkv.preset(name)
    assert read_config(write_config(preset, family(RELEASED[name]["model_type"]))) == preset


def test_a_window_of_qwen2_counts_only_if_it_is_used() -> None:
    unused = read_config(QWEN2 | {"sliding_window": 5, "max_window_layers": 1})
    used = read_config(QWEN2 | {"sliding_window": 5, "max_window_layers": 1, "use_sliding_window": True})
    assert [block.attention.pattern.kind for block in unused.decoder.blocks] == ["causal"] * 3
    assert [block.attention.pattern.kind for block in used.decoder.blocks] == ["causal"] + ["sliding-window"] * 2


def test_the_window_of_mistral_is_absent_null_or_given() -> None:
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert read_config(absent).decoder.block(0).attention.pattern.window == 4096  # as the first releases of the peer
    assert read_config(MISTRAL).decoder.block(0).attention.pattern.kind == "causal"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (QWEN2 | {"layer_types": MIXED}, "layer_types has windows, but use_sliding_window or sliding_window not"),
        (QWEN2 | {"layer_types": MIXED[:2]}, "use_sliding_window"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "speaks of 1 layer types, but of 3 layers"),
        (QWEN2 | {"layer_types": ["linear_attention"] * 3}, "layers of type linear_attention"),
        (QWEN2 | {"use_mrope": True}, "use_mrope is True"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (MISTRAL | {"attention_sinks": 4}, r"attention_sinks \(4\) is not understood"),
    ],
)
def test_what_is_not_understood_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(data)


def test_two_windows_cannot_be_written() -> None:
    config = read_config(QWEN2 | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1})
    first = config.decoder.block(1).to_dict()
    other = config.decoder.block(1).override({"attention.pattern.window": 6}).to_dict()
    changed = config.override({"decoder.first": [], "decoder.layers": [first, other, other]})
    with pytest.raises(CheckpointError, match=r"would lose decoder\.layers"):
        write_config(changed, family("qwen2"))
