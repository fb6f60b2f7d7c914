"""Further counts and configuration facts, one test per row."""

import inspect
import re

import qkv
from qkv import config as c
from qkv.config.presets import bert, gpt

from .small import deviation, nn, oracle, tokens, weights_of


def runs(name: str) -> None:
    """At toy size the torch model gives the oracle's hidden states."""
    toy = qkv.preset(name).toy()
    found, expected = (run(toy, weights_of(toy), tokens(2, 9)).hidden for run in (nn, oracle))
    assert deviation(found, expected) < 1e-11


def test_count_of_deepseek_v2():
    assert qkv.preset("deepseek-v2").n_parameters == 235_741_434_880


def test_count_of_deepseek_v3_with_and_without_the_routers_correction():
    cfg = qkv.preset("deepseek-v3")
    assert cfg.n_parameters == 671_026_419_200
    without = cfg.override({"decoder.layers.0.ffn.correction": False})
    assert without.n_parameters == 671_026_404_352
    assert cfg.decoder.n_layers == 61, "no layer that predicts further tokens"


def test_count_of_palm_540b():
    cfg = qkv.preset("palm-540b")
    assert cfg.n_parameters == 540_356_474_880
    assert (cfg.head.tied, cfg.vocab_size) == (True, 256_000)


def test_count_of_gemma_3_270m():
    assert qkv.preset("gemma-3-270m").n_parameters == 268_098_176
    runs("gemma-3-270m")


def test_count_of_minilm_l6_with_its_pooler():
    cfg = qkv.preset("minilm-l6")
    assert cfg.n_parameters == 22_713_216
    assert isinstance(cfg.head, c.Pooler)
    runs("minilm-l6")


def test_count_of_longformer_base():
    assert qkv.preset("longformer-base").n_parameters == 148_659_456
    runs("longformer-base")


def test_count_of_bigbird_base():
    cfg = qkv.preset("bigbird-base")
    assert cfg.n_parameters == 127_468_800
    assert (cfg.vocab_size, cfg.max_seq_len) == (50_358, 4096)
    runs("bigbird-base")


def test_roformer_base_names_the_released_checkpoint():
    assert re.search(r"\b\w+/roformer\w+", inspect.getsource(bert))


def test_count_of_mistral_7b_v0_3():
    cfg = qkv.preset("mistral-7b-v0.3")
    assert (cfg.n_parameters, cfg.vocab_size) == (7_248_023_552, 32_768)


def test_llama_d_ff_in_general():
    """m * ceil(floor(k * floor(8 d / 3)) / m)."""
    rule = {
        "llama-7b": (1, 1, 256), "llama-13b": (1, 1, 256), "llama-33b": (1, 1, 256), "llama-65b": (1, 1, 256),
        "llama-2-7b": (1, 1, 256), "llama-2-13b": (1, 1, 256), "llama-2-70b": (13, 10, 4096),
        "llama-3-8b": (13, 10, 1024), "llama-3.1-8b": (13, 10, 1024), "llama-3-70b": (13, 10, 4096),
        "llama-3-405b": (12, 10, 4096),
    }  # fmt: skip
    for name, (times, over, multiple) in rule.items():
        cfg = qkv.preset(name)
        wide = times * (8 * cfg.d_model // 3) // over
        assert cfg.decoder.layers[0].ffn.d_ff == multiple * -(-wide // multiple), name
    exact = {"llama-7b": 11_008, "llama-2-70b": 28_672, "llama-3-8b": 14_336, "llama-3-405b": 53_248}
    assert {name: qkv.preset(name).decoder.layers[0].ffn.d_ff for name in exact} == exact


def test_yi_theta():
    for name in ("yi-6b", "yi-34b"):
        assert qkv.preset(name).decoder.layers[0].attention.positions == c.Rotary(theta=5e6)


def test_qwen_1_has_its_own_dynamic_ntk_and_log_n_scaling():
    cfg = qkv.preset("qwen-7b")
    attention = cfg.decoder.layers[0].attention
    scaling = c.QwenDynamicScaling(original_max_seq_len=cfg.max_seq_len)
    assert attention.positions == c.Rotary(theta=10_000.0, scaling=scaling)
    assert attention.log_n == cfg.max_seq_len


def test_gpt_3_175b_says_that_it_is_dense():
    (layer,) = qkv.preset("gpt-3-175b").decoder.layers
    assert layer.attention.pattern == c.Causal()
    assert re.search("GPT-3.*every layer here is dense", inspect.getsource(gpt), re.IGNORECASE | re.DOTALL)
