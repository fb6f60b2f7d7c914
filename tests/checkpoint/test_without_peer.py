"""Qwen (2023) and ChatGLM2/3, which the pinned peer library no longer has.

Their source here is a transcription: `Qwen` and `ChatGlm` below are minimal forward passes in plain torch, written for
this test after the modelling code that was published beside the weights (Qwen/Qwen-7B, THUDM/chatglm2-6b), with that
code's tensor names and its order of axes. They share nothing with qkv. The published weights themselves are not read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qkv
from checkpoint.as_family import check_as
from checkpoint.harness import VOCAB, Peer, batch, check, deviation, load_ours, our_logits, randomised
from qkv.checkpoint.huggingface import read_config, read_model
from qkv.config import LinearScaling, NoScaling
from qkv.errors import CheckpointError

Settings = dict[str, Any]


class Published(nn.Module):
    """A model whose parameters have the published names, saved and loaded as a folder."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        for name, shape in self.shapes(config).items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))

    @staticmethod
    def shapes(config: Settings) -> dict[str, tuple[int, ...]]:
        """Every tensor of a model with these settings."""
        raise NotImplementedError

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A dense layer by its name, with its bias if it has one."""
        named = dict(self.named_parameters())
        return F.linear(x, named[f"{name}.weight"], named.get(f"{name}.bias"))

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file({name: p.detach() for name, p in self.named_parameters()}, folder / "model.safetensors")

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        model = cls(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Both models' norm, in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def visible(valid: Tensor) -> Tensor:
    """(B, 1, T, T): keys up to the query that are not padding."""
    length = valid.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril() & valid[:, None, None, :]


class Qwen(Published):
    """QWenLMHeadModel: queries, keys and values as (batch, position, head, element)."""

    @staticmethod
    def shapes(config: Settings) -> dict[str, tuple[int, ...]]:
        d, inner = config["hidden_size"], config["intermediate_size"] // 2
        heads = config["num_attention_heads"] * config["kv_channels"]
        shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (config["vocab_size"], d)}
        for i in range(config["num_hidden_layers"]):
            block = {"ln_1": (d,), "ln_2": (d,), "attn.c_attn": (3 * heads, d), "attn.c_proj": (d, heads),
                     "mlp.w1": (inner, d), "mlp.w2": (inner, d), "mlp.c_proj": (d, inner)}  # fmt: skip
            shapes |= {f"transformer.h.{i}.{name}.weight": shape for name, shape in block.items()}
            shapes[f"transformer.h.{i}.attn.c_attn.bias"] = (3 * heads,)
        return shapes | {"transformer.ln_f.weight": (d,), "lm_head.weight": (config["vocab_size"], d)}

    def alphas(self, valid: Tensor) -> list[float]:
        """By how much each row's rotary base grows; rows of a short batch are not looked at one by one."""
        trained, padded = self.config["seq_length"], valid.shape[1]
        if not self.config["use_dynamic_ntk"]:
            return [1.0] * len(valid)
        lengths = valid.sum(1).tolist() if padded > trained else [padded] * len(valid)
        return [max(2 ** math.ceil(math.log(n / trained, 2) + 1) - 1, 1) for n in lengths]

    def rotate(self, x: Tensor, alphas: list[float]) -> Tensor:
        """Each row with its own base; element e and e + F/2 of a head form a pair."""
        width, rows = x.shape[-1], []
        for row, alpha in zip(x, alphas, strict=True):
            base = self.config["rotary_emb_base"] * alpha ** (width / (width - 2))
            frequency = 1.0 / base ** (torch.arange(0, width, 2).float() / width)
            angle = torch.outer(torch.arange(len(row)).float(), frequency)[:, None, :]
            one, two = row[..., : width // 2], row[..., width // 2 :]
            turned = (one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin())
            rows.append(torch.cat(turned, -1))
        return torch.stack(rows)

    def attention(self, x: Tensor, name: str, valid: Tensor) -> Tensor:
        heads, width = self.config["num_attention_heads"], self.config["kv_channels"]
        q, k, v = (part.unflatten(-1, (heads, width)) for part in self.linear(x, f"{name}.c_attn").chunk(3, -1))
        alphas = self.alphas(valid)
        q, k = self.rotate(q, alphas), self.rotate(k, alphas)
        trained = self.config["seq_length"]
        if self.config["use_logn_attn"]:
            factors = [math.log(p, trained) if p > trained else 1.0 for p in range(1, x.shape[1] + 1)]
            q = q * torch.tensor(factors)[None, :, None, None]
        scores = torch.einsum("bqhf,bkhf->bhqk", q, k) / width**0.5
        weights = scores.masked_fill(~visible(valid), torch.finfo(torch.float32).min).softmax(-1)
        return self.linear(torch.einsum("bhqk,bkhf->bqhf", weights, v).flatten(-2), f"{name}.c_proj")

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        named, eps = dict(self.named_parameters()), self.config["layer_norm_epsilon"]
        x = named["transformer.wte.weight"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            block = f"transformer.h.{i}"
            x = x + self.attention(rms(x, named[f"{block}.ln_1.weight"], eps), f"{block}.attn", valid)
            y = rms(x, named[f"{block}.ln_2.weight"], eps)
            gated = self.linear(y, f"{block}.mlp.w1") * F.silu(self.linear(y, f"{block}.mlp.w2"))
            x = x + self.linear(gated, f"{block}.mlp.c_proj")
        return self.linear(rms(x, named["transformer.ln_f.weight"], eps), "lm_head")


class ChatGlm(Published):
    """ChatGLMForConditionalGeneration: queries, keys and values as (position, batch, head, element)."""

    @staticmethod
    def shapes(config: Settings) -> dict[str, tuple[int, ...]]:
        d, inner, width = config["hidden_size"], config["ffn_hidden_size"], config["kv_channels"]
        heads = config["num_attention_heads"] * width
        fused = heads + 2 * config["multi_query_group_num"] * width
        vocab = (config["padded_vocab_size"], d)
        shapes: dict[str, tuple[int, ...]] = {"transformer.embedding.word_embeddings.weight": vocab}
        for i in range(config["num_layers"]):
            layer = {"input_layernorm": (d,), "post_attention_layernorm": (d,),
                     "self_attention.query_key_value": (fused, d), "self_attention.dense": (d, heads),
                     "mlp.dense_h_to_4h": (2 * inner, d), "mlp.dense_4h_to_h": (d, inner)}  # fmt: skip
            shapes |= {f"transformer.encoder.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
            if config["add_qkv_bias"]:
                shapes[f"transformer.encoder.layers.{i}.self_attention.query_key_value.bias"] = (fused,)
        shapes["transformer.encoder.final_layernorm.weight"] = (d,)
        return shapes | {"transformer.output_layer.weight": vocab}

    def rotate(self, x: Tensor) -> Tensor:
        """The first half of each head, elements 2i and 2i + 1 as a pair.

        The ratio divides positions in the code beside chatglm2-6b-32k, and multiplies the base in that beside
        chatglm3-6b-32k and glm-4-9b.
        """
        half, ratio = x.shape[-1] // 2, self.config.get("rope_ratio", 1)
        divides = "chatglm2" in self.config.get("_name_or_path", "")
        base, positions = (10_000, torch.arange(len(x)) / ratio) if divides else (10_000 * ratio, torch.arange(len(x)))
        frequency = 1.0 / base ** (torch.arange(0, half, 2).float() / half)
        angle = torch.outer(positions.float(), frequency)[:, None, None, :]
        turned, kept = x[..., :half], x[..., half:]
        even, odd = turned[..., 0::2], turned[..., 1::2]
        pairs = (even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin())
        return torch.cat((torch.stack(pairs, -1).flatten(-2), kept), -1)

    def attention(self, x: Tensor, layer: int, name: str, valid: Tensor) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["multi_query_group_num"]
        width = self.config["kv_channels"]
        fused = self.linear(x, f"{name}.query_key_value").transpose(0, 1)
        q, k, v = fused.split([heads * width, groups * width, groups * width], -1)
        q = self.rotate(q.unflatten(-1, (heads, width)))
        k, v = self.rotate(k.unflatten(-1, (groups, width))), v.unflatten(-1, (groups, width))
        k, v = (part.repeat_interleave(heads // groups, 2) for part in (k, v))
        # Scores are divided by the layer's number, and multiplied by it again before the softmax.
        coefficient = layer + 1 if self.config.get("apply_query_key_layer_scaling", True) else 1
        scores = torch.einsum("qbhf,kbhf->bhqk", q, k) / (width**0.5 * coefficient) * coefficient
        weights = scores.masked_fill(~visible(valid), -torch.inf).softmax(-1)
        return self.linear(torch.einsum("bhqk,kbhf->bqhf", weights, v).flatten(-2), f"{name}.dense")

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        named, eps = dict(self.named_parameters()), self.config["layernorm_epsilon"]
        x = named["transformer.embedding.word_embeddings.weight"][tokens]
        for i in range(self.config["num_layers"]):
            layer = f"transformer.encoder.layers.{i}"
            y = rms(x, named[f"{layer}.input_layernorm.weight"], eps)
            x = x + self.attention(y, i, f"{layer}.self_attention", valid)
            y = rms(x, named[f"{layer}.post_attention_layernorm.weight"], eps)
            gate, up = self.linear(y, f"{layer}.mlp.dense_h_to_4h").chunk(2, -1)
            x = x + self.linear(F.silu(gate) * up, f"{layer}.mlp.dense_4h_to_h")
        x = rms(x, named["transformer.encoder.final_layernorm.weight"], eps)
        return self.linear(x, "transformer.output_layer")


# config.json as published, with the sizes of Qwen/Qwen-7B (and its first form) and THUDM/chatglm2-6b.
QWEN = {
    "architectures": ["QWenLMHeadModel"], "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    "attn_dropout_prob": 0.0, "bf16": False, "emb_dropout_prob": 0.0, "fp16": False, "fp32": False,
    "hidden_size": 4096, "intermediate_size": 22016, "initializer_range": 0.02, "kv_channels": 128,
    "layer_norm_epsilon": 1e-06, "max_position_embeddings": 32768, "model_type": "qwen", "no_bias": True,
    "num_attention_heads": 32, "num_hidden_layers": 32, "onnx_safe": None, "rotary_emb_base": 10000,
    "rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 8192, "tie_word_embeddings": False,
    "tokenizer_class": "QWenTokenizer", "transformers_version": "4.32.0", "use_cache": True, "use_dynamic_ntk": True,
    "use_flash_attn": "auto", "use_logn_attn": True, "vocab_size": 151936,
}  # fmt: skip
FIRST_QWEN = {
    "architectures": ["QWenLMHeadModel"], "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    "attn_pdrop": 0.0, "bf16": False, "bias_dropout_fusion": True, "bos_token_id": 151643, "embd_pdrop": 0.0,
    "eos_token_id": 151643, "ffn_hidden_size": 22016, "fp16": False, "fp32": False, "initializer_range": 0.02,
    "kv_channels": 128, "layer_norm_epsilon": 1e-06, "model_type": "qwen", "n_embd": 4096, "n_head": 32,
    "n_layer": 32, "n_positions": 8192, "no_bias": True, "onnx_safe": None, "padded_vocab_size": 151936,
    "params_dtype": "torch.bfloat16", "pos_emb": "rotary", "resid_pdrop": 0.1, "rotary_emb_base": 10000,
    "rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 2048, "tie_word_embeddings": False,
    "tokenizer_type": "QWenTokenizer", "transformers_version": "4.31.0", "use_cache": True, "use_flash_attn": "auto",
    "vocab_size": 151936, "use_dynamic_ntk": True, "use_logn_attn": True,
}  # fmt: skip
CHATGLM = {
    "_name_or_path": "THUDM/chatglm2-6b", "model_type": "chatglm", "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}, "add_bias_linear": False,
    "add_qkv_bias": True, "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True,
    "ffn_hidden_size": 13696, "fp32_residual_connection": False, "hidden_dropout": 0.0, "hidden_size": 4096,
    "kv_channels": 128, "layernorm_epsilon": 1e-05, "multi_query_attention": True, "multi_query_group_num": 2,
    "num_attention_heads": 32, "num_layers": 28, "original_rope": True, "padded_vocab_size": 65024,
    "post_layer_norm": True, "rmsnorm": True, "seq_length": 32768, "use_cache": True, "torch_dtype": "float16",
    "transformers_version": "4.27.1", "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Ten trained tokens: of the two rows of the padded batch one is longer (13), the other is not (9).
SMALL_QWEN = QWEN | {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 96, "kv_channels": 8, "num_attention_heads": 4,
    "num_hidden_layers": 3, "seq_length": 10,
}  # fmt: skip
SMALL_CHATGLM = CHATGLM | {
    "padded_vocab_size": VOCAB, "hidden_size": 32, "ffn_hidden_size": 48, "kv_channels": 8, "num_attention_heads": 4,
    "multi_query_group_num": 2, "num_layers": 3, "seq_length": 64,
}  # fmt: skip


def transcribed(model: type[Published], settings: Settings, **changes: Any) -> Peer:
    """A tiny model of this kind. Its own config.json has the published form already."""
    return Peer(lambda: model(settings | changes), lambda peer, tokens, valid: peer(tokens, valid), our_logits)


PEERS = {
    "qwen": transcribed(Qwen, SMALL_QWEN),
    "qwen-wide-heads": transcribed(Qwen, SMALL_QWEN, kv_channels=12, rotary_emb_base=1000, layer_norm_epsilon=1e-3),
    "qwen-log-n-only": transcribed(Qwen, SMALL_QWEN, use_dynamic_ntk=False),
    "qwen-dynamic-only": transcribed(Qwen, SMALL_QWEN, use_logn_attn=False),
    "chatglm": transcribed(ChatGlm, SMALL_CHATGLM),
    "chatglm-one-group": transcribed(ChatGlm, SMALL_CHATGLM, multi_query_group_num=1, layernorm_epsilon=1e-3),
    "chatglm2-32k": transcribed(ChatGlm, SMALL_CHATGLM, rope_ratio=16),
    "chatglm3-32k": transcribed(ChatGlm, SMALL_CHATGLM, rope_ratio=50, _name_or_path="THUDM/chatglm3-6b-32k"),
    "glm-4": transcribed(ChatGlm, SMALL_CHATGLM, rope_ratio=500, _name_or_path="THUDM/glm-4-9b-chat"),
    "chatglm-no-bias-wide-heads": transcribed(ChatGlm, SMALL_CHATGLM, add_qkv_bias=False, kv_channels=12),
}


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_transcription_both_ways(name: str, tmp_path: Path) -> None:
    check(PEERS[name], tmp_path)


def test_qwen_without_rules_for_length(tmp_path: Path) -> None:
    # Qwen-72B. Qwen2 can say the same, so that it must be asked to stay Qwen.
    plain = transcribed(Qwen, SMALL_QWEN, use_dynamic_ntk=False, use_logn_attn=False)
    config = check_as("qwen", plain, tmp_path)
    assert config == read_config(SMALL_QWEN | {"use_dynamic_ntk": False, "use_logn_attn": False})


def worst(theirs: Published, folder: Path) -> float:
    """How far our model, loaded from their folder, is from theirs on whole rows."""
    theirs.save_pretrained(folder)
    _, _, ours = load_ours(folder)
    tokens, valid = batch("none")
    with torch.no_grad():
        return deviation(theirs(tokens, valid), our_logits(ours, tokens, valid), valid)


@pytest.mark.parametrize(
    "change", [{"use_dynamic_ntk": False}, {"use_logn_attn": False}, {"seq_length": 5}, {"rotary_emb_base": 100}]
)
def test_each_rule_of_qwen_is_seen(change: Settings, tmp_path: Path) -> None:
    # The transcription runs with the change, our model without it: equal, and the cases above would show nothing.
    theirs = Qwen(SMALL_QWEN)
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    assert worst(theirs, tmp_path / "same") < 1e-4
    theirs.save_pretrained(tmp_path)
    _, _, ours = load_ours(tmp_path)
    theirs.config = SMALL_QWEN | change
    tokens, valid = batch("none")
    with torch.no_grad():
        assert deviation(theirs(tokens, valid), our_logits(ours, tokens, valid), valid) > 1e-2


def test_scaling_scores_by_layer_changes_nothing(tmp_path: Path) -> None:
    theirs = randomised(ChatGlm(SMALL_CHATGLM | {"apply_query_key_layer_scaling": False}))
    assert isinstance(theirs, ChatGlm)
    assert worst(theirs, tmp_path) < 1e-4
    assert read_config(theirs.config) == read_config(SMALL_CHATGLM)


def test_the_ratio_means_what_the_release_named_makes_of_it() -> None:
    of = {name: read_config(CHATGLM | {"rope_ratio": 50, "_name_or_path": name}) for name in ("chatglm2", "chatglm3")}
    divided, multiplied = (of[name].decoder.block(0).attention.positions for name in ("chatglm2", "chatglm3"))  # type: ignore[union-attr]
    assert (divided.theta, divided.scaling) == (10_000.0, LinearScaling(factor=50))
    assert (multiplied.theta, multiplied.scaling) == (500_000.0, NoScaling())
    assert read_config(CHATGLM | {"rope_ratio": 1, "_name_or_path": "anything"}) == read_config(CHATGLM)


def test_stored_frequencies_are_ignored_by_name(tmp_path: Path) -> None:
    # THUDM/chatglm2-6b and chatglm3-6b hold `transformer.rotary_pos_emb.inv_freq`.
    randomised(ChatGlm(SMALL_CHATGLM)).save_pretrained(tmp_path)
    _, expected = read_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"transformer.rotary_pos_emb.inv_freq": torch.ones(2)}, file)
    _, found = read_model(tmp_path)
    assert set(found) == set(expected)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    save_file(load_file(file) | {"transformer.rotary_pos_emb.other": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match=r"rotary_pos_emb\.other is not understood"):
        read_model(tmp_path)


def test_published_qwen_configs_are_the_preset() -> None:
    expected = qkv.preset("qwen-7b")
    assert read_config(QWEN).override({"init": expected.init}) == expected
    # The first release was trained on 2,048 tokens and is the same otherwise.
    assert read_config(FIRST_QWEN) == read_config(QWEN | {"seq_length": 2048})


@pytest.mark.parametrize(("preset", "length"), [("chatglm2-6b", 32_768), ("chatglm3-6b", 8192)])
def test_published_chatglm_configs_are_the_presets(preset: str, length: int) -> None:
    # In float32 the norm's order of rounding is nothing; the published code rounds after the weight multiplies.
    expected = qkv.preset(preset)
    after = {"decoder.norm.cast": "after", "decoder.layers.*.norm.cast": "after"}
    found = read_config(CHATGLM | {"seq_length": length})
    assert found.override({"init": expected.init}) == expected.override(after)


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (QWEN, {"no_bias": False}, "no_bias is False"),
        (QWEN, {"intermediate_size": 11007}, "must be even"),
        (QWEN, {"visual": {"layers": 48}}, "visual"),
        (QWEN, {"hidden_size": 4096, "n_embd": 2048}, "must be equal"),
        (CHATGLM, {"rope_ratio": 50, "_name_or_path": "my-model"}, "set _name_or_path to 'THUDM/chatglm2-6b-32k' or"),
        (CHATGLM, {"multi_query_attention": False}, "multi_query_attention is False"),
        (CHATGLM, {"rmsnorm": False}, "rmsnorm is False"),
        (CHATGLM, {"quantization_bit": 4}, "quantization_bit is 4"),
        (CHATGLM, {"add_bias_linear": True}, "add_bias_linear is True"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(published: Settings, changes: Settings, message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_config(published | changes)
    assert message in str(error.value)
