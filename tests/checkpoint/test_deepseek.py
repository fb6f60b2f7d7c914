"""DeepSeek-V2, V2-Lite and V3 against the peer library, and against the published files' own forms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from safetensors.numpy import load_file, save_file
from torch import nn

import qkv
from checkpoint.harness import VOCAB, Peer, check, logits, our_logits, randomised
from qkv.checkpoint.huggingface import read_config, read_model
from qkv.config import Latent, MixtureOfExperts, ModelConfig, RMSNorm
from qkv.errors import CheckpointError

# config.json as published, with the sizes of deepseek-ai/DeepSeek-V2 and DeepSeek-V3 (in bfloat16).
YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1536,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": YARN, "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 3, "topk_method": "group_limited_greedy",
    "torch_dtype": "bfloat16", "transformers_version": "4.39.3", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 102400,
}  # fmt: skip
LITE = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
V3 = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    "vocab_size": 129280,
}  # fmt: skip

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 20,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
    "max_position_embeddings": 640, "rms_norm_eps": 1e-5,
}  # fmt: skip
SHORT = {"factor": 40.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 16}


def corrected(model: nn.Module) -> nn.Module:
    """The routers' corrections drawn too: they are buffers, which start at zero."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return model


def peer(version: int, mscale: dict[str, float] | None = None, **changes: Any) -> Peer:
    """A tiny model; with `mscale`, extended by YaRN."""
    published = V3 if version == 3 else V2
    legacy = published | SMALL | {"rope_scaling": None} | changes
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if mscale is not None:
        rope |= {"rope_type": "yarn", **SHORT, **mscale}
        legacy["rope_scaling"] = {"type": "yarn", **SHORT, **mscale}
    settings = SMALL | {"rope_parameters": rope} | changes
    if version == 2:
        settings.setdefault("topk_method", "group_limited_greedy")

    def make() -> nn.Module:
        if version == 2:
            return t.DeepseekV2ForCausalLM(t.DeepseekV2Config(**settings))
        return corrected(t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**settings)))

    return Peer(make, logits, our_logits, legacy)


PEERS = {
    "v2": peer(2, {"mscale": 0.707, "mscale_all_dim": 0.707}),
    "v2-unequal-mscales": peer(2, {"mscale": 1.0, "mscale_all_dim": 0.5}),
    "v2-lite": peer(2, {"mscale": 0.707, "mscale_all_dim": 0.707}, **LITE),
    "v2-unscaled": peer(2),
    "v2-no-dense-layers": peer(2, first_k_dense_replace=0),
    "v3": peer(3, {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "v3-unscaled-direct-queries": peer(3, q_lora_rank=None),
    "v3-one-group": peer(3, {"mscale": 1.0, "mscale_all_dim": 1.0}, n_group=1, topk_group=1, n_shared_experts=1),
    "v3-raw-weights-two-dense": peer(3, norm_topk_prob=False, first_k_dense_replace=2),
    "v3-halves": peer(3, rope_interleave=False),
    "v3-yarn-without-mscale": peer(3, {}),
}


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check(PEERS[name], tmp_path)


def test_the_corrections_arrive(tmp_path: Path) -> None:
    # They are buffers, which the peer starts at zero: the cases above show something only if they are not.
    randomised(PEERS["v3"].make()).save_pretrained(tmp_path)
    _, tensors = read_model(tmp_path)
    drawn = [np.abs(array).max() for name, array in tensors.items() if name.endswith("router.correction")]
    assert len(drawn) == 2
    assert min(drawn) > 0.1


def latent(config: ModelConfig) -> Latent:
    assert config.decoder is not None
    attention = config.decoder.block(0).attention
    assert isinstance(attention, Latent)
    return attention


def test_the_scores_take_the_temperature_squared() -> None:
    # 0.1 * 0.707 * ln 40 + 1 = 1.26080; squared over the root of 128 + 64: 0.11472.
    assert latent(read_config(V2)).score_scale == pytest.approx(0.114722, abs=1e-5)
    temperature = 0.1 * math.log(40) + 1
    assert latent(read_config(V3)).score_scale == pytest.approx(temperature**2 / math.sqrt(192), rel=1e-12)
    assert latent(read_config(V3 | {"rope_scaling": None})).scale is None


def test_the_norms_of_the_latents_keep_their_own_epsilon() -> None:
    config = read_config(V3 | {"rms_norm_eps": 1e-5})
    assert latent(config).norm == RMSNorm(eps=1e-6)
    assert config.decoder is not None
    assert config.decoder.norm == RMSNorm(eps=1e-5)


@pytest.mark.parametrize(("published", "preset"), [(V2, "deepseek-v2"), (V3, "deepseek-v3")])
def test_published_configs_are_the_presets(published: dict[str, Any], preset: str) -> None:
    # The presets take the papers' context and initialisation, where config.json has 40 * 4,096 tokens and a default.
    expected = qkv.preset(preset)
    found = read_config(published)
    assert found.max_seq_len == 40 * 4096
    assert found.override({"max_seq_len": expected.max_seq_len, "init": expected.init}) == expected


def test_published_v2_lite() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
             "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16}  # fmt: skip
    config = read_config(V2 | sizes | LITE)
    assert config.decoder is not None
    assert latent(config).q_rank is None
    ffn = config.decoder.block(26).ffn
    assert isinstance(ffn, MixtureOfExperts)
    assert (ffn.n_groups, ffn.shared_d_ff) == (1, 2816)
    assert config.n_parameters == 15_706_484_224  # "15.7B", as the release says


def test_the_layer_that_predicts_a_second_token_is_left_out(tmp_path: Path) -> None:
    randomised(PEERS["v3"].make()).save_pretrained(tmp_path)
    config, expected = read_model(tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {f"model.layers.61.{name}.weight": np.ones((2, 2), np.float32) for name in ("eh_proj", "mlp.up_proj")}
    save_file(load_file(file) | extra, file)
    again, found = read_model(tmp_path)
    assert again == config
    assert set(found) == set(expected)
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": np.ones((2, 2), np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight is not understood"):
        read_model(tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    randomised(PEERS["v2"].make()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    save_file({key: array for key, array in load_file(file).items() if key != name}, file)
    with pytest.raises(CheckpointError) as error:
        read_model(tmp_path)
    assert f"{name} is missing" in str(error.value)


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (V2, {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        (V2, {"num_key_value_heads": 16}, "num_key_value_heads is 16"),
        (V3, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (V3, {"attention_bias": True}, "attention_bias is True"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    published: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        read_config(published | changes)
    assert message in str(error.value)
