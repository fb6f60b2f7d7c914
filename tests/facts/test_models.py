"""The models and families that the texts name: their counts, sizes and choices, from the presets."""

import numpy as np
import pytest
import torch

import qkv
from qkv import config as c
from qkv.nn import Transformer, initialise

from .small import Run, both, deviation, nn, oracle, tokens, watched, weights_of


def layer_of(name: str, stack: str = "decoder") -> c.Block:
    """The block of a uniform stack."""
    (layer,) = qkv.preset(name).stacks[stack].layers
    return layer


def sizes(name: str, stack: str = "decoder") -> tuple[int, int, int, int]:
    """d_model, layers, heads, d_ff."""
    cfg, layer = qkv.preset(name), layer_of(name, stack)
    return cfg.d_model, cfg.stacks[stack].n_layers, layer.attention.n_heads, layer.ffn.d_ff


def counts(expected: dict[str, int]) -> None:
    """Each preset has exactly this many parameters."""
    assert {name: qkv.preset(name).n_parameters for name in expected} == expected


def biases(name: str) -> set[str]:
    """Which projections have a bias."""
    return {key.split(".")[-2] for key in qkv.preset(name).shapes() if key.endswith("bias") and "norm" not in key}


def runs(name: str) -> None:
    """At toy size the torch model gives the oracle's hidden states."""
    toy = qkv.preset(name).toy()
    given = {"source": tokens(2, 6, seed=1)} if len(toy.stacks) == 2 else {}
    found, expected = (run(toy, weights_of(toy), tokens(2, 9), **given).hidden for run in (nn, oracle))
    assert deviation(found, expected) < 1e-11


def test_transformer_2017():
    counts({"transformer-base": 63_045_632, "transformer-big": 214_171_648})
    for stack in ("encoder", "decoder"):
        assert sizes("transformer-base", stack) == (512, 6, 8, 2048)
        assert sizes("transformer-big", stack) == (1024, 6, 16, 4096)
    base, big = qkv.preset("transformer-base"), qkv.preset("transformer-big")
    assert (layer_of("transformer-base").dropout, layer_of("transformer-big").dropout) == (0.1, 0.3)
    assert layer_of("transformer-base").attention.head_dim == 64
    assert base.vocab_size == big.vocab_size == 37_000
    assert base.embedding.scale == "sqrt_d_model"
    shared = [key for key in base.shapes() if "embed" in key or key.startswith("head")]
    assert shared == ["embed.tokens.weight"], "source, target and output have one matrix"
    assert biases("transformer-base") == {"up_proj", "down_proj"}
    assert isinstance(layer_of("transformer-base").residual, c.PostNorm)
    runs("transformer-base")


def test_e57_the_rounded_65m_depends_on_vocabulary_and_biases():
    base, big = qkv.preset("transformer-base"), qkv.preset("transformer-big")
    for cfg, rounded in ((base, 65e6), (big, 213e6)):
        assert abs(cfg.n_parameters / rounded - 1) < 0.04
    assert base.n_parameters - base.override({"vocab_size": 32_000}).n_parameters == 5000 * 512
    with_biases = {f"{s}.layers.*.{a}.{b}": True for s, a in
                   (("encoder", "attention"), ("decoder", "attention"), ("decoder", "cross_attention"))
                   for b in ("qkv_bias", "o_bias")}  # fmt: skip
    assert base.override(with_biases).n_parameters - base.n_parameters == 18 * 4 * 512


def test_bert():
    counts({"bert-base-uncased": 109_482_240, "bert-large-uncased": 335_141_888, "bert-base-cased": 108_310_272})
    assert sizes("bert-base-uncased", "encoder") == (768, 12, 12, 3072)
    assert sizes("bert-large-uncased", "encoder") == (1024, 24, 16, 4096)
    cfg, layer = qkv.preset("bert-base-uncased"), layer_of("bert-base-uncased", "encoder")
    assert (cfg.vocab_size, cfg.max_seq_len, cfg.embedding.n_segments) == (30_522, 512, 2)
    assert layer.ffn.activation == "gelu"
    assert layer.norm == cfg.embedding.norm == c.LayerNorm(eps=1e-12)
    assert isinstance(cfg.head, c.Pooler)
    runs("bert-base-uncased")


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-large-uncased", "bert-base-cased"])
@both
def test_e16_bert_is_post_norm(run: Run, name: str):
    """The last thing that happens to its hidden states is a norm, although no final norm exists."""
    assert isinstance(layer_of(name, "encoder").residual, c.PostNorm)
    toy = qkv.preset(name).toy()
    assert "encoder.norm.weight" not in toy.shapes()
    weights = weights_of(toy)
    last = f"encoder.layers.{toy.encoder.n_layers - 1}.ffn_norm."
    weights |= {f"{last}weight": np.ones(toy.d_model), f"{last}bias": np.zeros(toy.d_model)}
    hidden = run(toy, weights, tokens(2, 7)).hidden
    assert np.abs(hidden.mean(-1)).max() < 1e-12
    assert hidden.var(-1) == pytest.approx(np.ones((2, 7)), rel=1e-6)


def test_gpt_1():
    counts({"gpt-1": 116_534_784})
    assert sizes("gpt-1") == (768, 12, 12, 3072)
    cfg = qkv.preset("gpt-1")
    assert (cfg.vocab_size, cfg.max_seq_len) == (40_478, 512)
    assert cfg.decoder.norm == c.NoNorm()
    assert cfg.head == c.LanguageModel(tied=True)
    runs("gpt-1")


def test_e17_gpt_1_is_post_norm_and_gpt_2_and_3_are_pre_norm_with_a_final_norm():
    assert isinstance(layer_of("gpt-1").residual, c.PostNorm)
    for name in ("gpt2", "gpt2-xl", "gpt-3-small", "gpt-3-175b"):
        assert isinstance(layer_of(name).residual, c.PreNorm)
        assert isinstance(qkv.preset(name).decoder.norm, c.LayerNorm)


def test_gpt_2():
    expected = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    counts(expected)
    cfg, layer = qkv.preset("gpt2"), layer_of("gpt2")
    assert (cfg.vocab_size, cfg.max_seq_len, cfg.embedding.positions) == (50_257, 1024, c.Learned())
    assert layer.ffn.activation == "gelu-tanh"
    assert layer.norm == cfg.decoder.norm == c.LayerNorm(eps=1e-5)
    assert cfg.head == c.LanguageModel(tied=True)
    runs("gpt2")


def test_gpt_2_initialisation_of_what_joins_the_residual_stream():
    """0.02 / sqrt(2 L) for output projections, 0.02 for every other matrix; measured in a model of four layers."""
    cfg = qkv.preset("gpt2").override({"decoder.n_layers": 4, "d_model": 256, "vocab_size": 500})
    model = Transformer(cfg)
    initialise(model, cfg, seed=0)
    for name, tensor in model.named_parameters():
        if tensor.dim() == 2:
            std = 0.02 / 8**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            error = std / (2 * tensor.numel()) ** 0.5
            assert abs(float(tensor.detach().std()) - std) < 5 * error, name


def test_gpt_3():
    counts({"gpt-3-175b": 174_604_259_328, "gpt-3-small": 125_226_240})
    assert sizes("gpt-3-175b") == (12_288, 96, 96, 49_152)
    assert qkv.preset("gpt-3-175b").max_seq_len == qkv.preset("gpt-3-small").max_seq_len == 2048
    runs("gpt-3-small")


def test_e28_gpt_3_small_is_gpt_2_small_with_2048_positions():
    small, gpt2 = qkv.preset("gpt-3-small"), qkv.preset("gpt2")
    assert small.n_parameters - gpt2.n_parameters == 1024 * 768
    estimate = 50_257 * 768 + 1024 * 768 + 12 * (4 * 768**2 + 8 * 768**2)
    left_out = 12 * (4 * 768 + (3072 + 768) + 4 * 768) + 2 * 768  # biases, norms, final norm
    assert gpt2.n_parameters == estimate + left_out


def test_t5():
    counts(
        {"t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096, "t5-3b": 2_851_598_336}
        | {"t5-11b": 11_307_321_344, "t5-v1.1-base": 247_577_856}
    )
    cfg = qkv.preset("t5-small")
    encoder, decoder = layer_of("t5-small", "encoder"), layer_of("t5-small")
    assert encoder.norm == decoder.norm == c.RMSNorm(eps=1e-6)
    assert isinstance(encoder.residual, c.PreNorm)
    assert not [key for key in cfg.shapes() if key.endswith("bias")]
    assert encoder.attention.score_scale == decoder.cross_attention.score_scale == 1
    assert encoder.attention.positions == c.T5Buckets(n_buckets=32, max_distance=128, bidirectional=True)
    assert decoder.cross_attention.positions == c.NoPositions()
    tables = [key for key in cfg.shapes() if "positions" in key]
    assert tables == ["encoder.positions.0.weight", "decoder.positions.0.weight"], "shared by the layers of a stack"
    assert cfg.head == c.LanguageModel(tied=True, scale="rsqrt_d_model")
    assert cfg.head.factor(512) == 512**-0.5
    assert encoder.ffn == c.Dense(d_ff=2048, activation="relu", dropout=0.1)
    newer = qkv.preset("t5-v1.1-base")
    assert layer_of("t5-v1.1-base").ffn.activation == "gelu-tanh"
    assert isinstance(layer_of("t5-v1.1-base").ffn, c.Gated)
    assert newer.head == c.LanguageModel(tied=False)
    runs("t5-small")
    runs("t5-v1.1-base")


def test_transformer_xl():
    """The count of the released configuration: 285,205,322 as its parts add up."""
    cfg = qkv.preset("transformer-xl-wt103")
    widths, rows = (1024, 256, 64, 16), (20_000, 20_000, 160_000, 67_735)
    embedding = sum(n * w for n, w in zip(rows, widths, strict=True)) + 1024 * sum(widths)
    layer = 5 * 1024**2 + 2 * 1024 + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    softmax = 3 * 1025 + sum(rows) + 1024**2
    assert cfg.n_parameters == embedding + 18 * layer + softmax == 285_205_322
    assert isinstance(layer_of("transformer-xl-wt103").residual, c.PostNorm)
    assert isinstance(cfg.head, c.AdaptiveSoftmax)
    runs("transformer-xl-wt103")


def test_roformer():
    cfg, layer = qkv.preset("roformer-base"), layer_of("roformer-base", "encoder")
    assert layer.attention.positions == c.Rotary(theta=10_000.0, layout="pairs")
    assert cfg.embedding.positions == c.NoPositions()
    runs("roformer-base")


def test_llama_1():
    counts({"llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320})
    counts({"llama-33b": 32_528_943_616, "llama-65b": 65_285_660_672})
    for name in ("llama-7b", "llama-13b", "llama-33b", "llama-65b"):
        cfg, layer = qkv.preset(name), layer_of(name)
        assert layer.ffn.d_ff == 256 * -(-(8 * cfg.d_model // 3) // 256)
        assert layer.attention.kv_heads == layer.attention.n_heads
        assert (cfg.max_seq_len, cfg.vocab_size, layer.norm.eps) == (2048, 32_000, 1e-6)
        assert cfg.head == c.LanguageModel(tied=False)
    runs("llama-7b")


def test_e11_heads_are_128_wide_in_every_llama_1_and_2():
    for name in ("llama-7b", "llama-13b", "llama-33b", "llama-65b", "llama-2-7b", "llama-2-13b", "llama-2-70b"):
        cfg, attention = qkv.preset(name), layer_of(name).attention
        assert attention.head_dim == cfg.d_model // attention.n_heads == 128
    assert "llama-70b" not in qkv.presets(), "Llama 1's largest has 65B"


def test_llama_2():
    counts({"llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192})
    for name, n_kv_heads in (("llama-2-7b", 32), ("llama-2-13b", 40), ("llama-2-70b", 8)):
        cfg, layer = qkv.preset(name), layer_of(name)
        assert layer.attention.kv_heads == n_kv_heads
        assert (cfg.max_seq_len, cfg.vocab_size, layer.norm.eps) == (4096, 32_000, 1e-5)
    runs("llama-2-70b")


def test_e15_only_llama_3_has_a_larger_vocabulary():
    assert {qkv.preset(n).vocab_size for n in ("llama-7b", "llama-65b", "llama-2-7b", "llama-2-70b")} == {32_000}
    assert {qkv.preset(n).vocab_size for n in ("llama-3-8b", "llama-3-405b", "llama-3.2-1b")} == {128_256}


def test_llama_3():
    counts({"llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3-405b": 405_853_388_800})
    counts({"llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824})
    assert layer_of("llama-3-405b").attention.kv_heads == 8
    assert [qkv.preset(n).max_seq_len for n in ("llama-3-8b", "llama-3.1-8b")] == [8192, 131_072]
    runs("llama-3-8b")
    runs("llama-3.1-8b")


def test_e53_some_llamas_are_tied():
    tied = {name for name in qkv.presets() if name.startswith("llama") and qkv.preset(name).head.tied}
    assert tied == {"llama-3.2-1b", "llama-3.2-3b"}
    untied = qkv.preset("llama-3.2-1b").override({"head.tied": False})
    assert untied.n_parameters == 1_235_814_400 + 128_256 * 2048, "the published count fits the tied model only"


def test_e08_llama_2_long_has_a_larger_base_and_no_interpolation():
    cfg = qkv.preset("llama-2-long-70b")
    assert layer_of("llama-2-long-70b").attention.positions == c.Rotary(theta=500_000.0)
    assert cfg.max_seq_len == 32_768
    assert cfg.n_parameters == qkv.preset("llama-2-70b").n_parameters


def test_codellama():
    counts({"codellama-7b": 6_738_546_688, "codellama-34b": 33_743_970_304})
    assert qkv.preset("codellama-7b").vocab_size == 32_016
    runs("codellama-34b")


def test_mistral():
    counts({"mistral-7b": 7_241_732_096})
    runs("mistral-7b")


def test_e06_and_e07_mistral_and_qwen_2_were_trained_without_yarn():
    for name in ("mistral-7b", "mistral-7b-v0.3", "qwen2-0.5b", "qwen2-1.5b", "qwen2-7b", "qwen2-72b"):
        assert layer_of(name).attention.positions.scaling == c.NoScaling(), name
    assert layer_of("qwen2-7b").attention.positions.theta == 1e6
    assert qkv.preset("qwen2-7b").max_seq_len == 32_768


def test_qwen():
    counts({"qwen-7b": 7_721_324_544, "qwen2-0.5b": 494_032_768, "qwen2-1.5b": 1_543_714_304})
    counts({"qwen2-7b": 7_615_616_512, "qwen2-72b": 72_706_203_648})
    for name in ("qwen-7b", "qwen2-0.5b", "qwen2-7b"):
        assert biases(name) == {"q_proj", "k_proj", "v_proj"}
    assert qkv.preset("qwen2-0.5b").head.tied
    runs("qwen-7b")
    runs("qwen2-7b")


def test_chatglm():
    counts({"chatglm2-6b": 6_243_584_000, "chatglm3-6b": 6_243_584_000})
    attention = layer_of("chatglm2-6b").attention
    assert (attention.kv_heads, attention.positions.fraction, attention.positions.layout) == (2, 0.5, "pairs")
    runs("chatglm2-6b")


def test_deepseek():
    counts({"deepseek-llm-7b": 6_910_365_696, "deepseek-llm-67b": 67_425_001_472})
    for name in ("deepseek-v2", "deepseek-v3"):
        attention = layer_of(name).attention
        assert (attention.kv_rank, attention.rope_dim) == (512, 64)
        runs(name)


def test_yi():
    counts({"yi-6b": 6_061_035_520, "yi-34b": 34_388_917_248})
    assert layer_of("yi-6b").attention.kv_heads == 4
    runs("yi-6b")


def test_bloom():
    counts({"bloom-176b": 176_247_271_424, "bloom-560m": 559_214_592})
    cfg = qkv.preset("bloom-176b")
    assert layer_of("bloom-176b").attention.n_heads == 112
    assert isinstance(cfg.embedding.norm, c.LayerNorm)
    assert cfg.head.tied
    assert cfg.vocab_size == 250_880
    runs("bloom-176b")


def test_palm():
    cfg, layer = qkv.preset("palm-540b"), layer_of("palm-540b")
    assert (cfg.decoder.n_layers, cfg.d_model) == (118, 18_432)
    assert (layer.attention.n_heads, layer.attention.head_dim, layer.attention.kv_heads) == (48, 256, 1)
    assert layer.residual == c.Parallel(shared_norm=True)
    assert (layer.ffn.kind, layer.ffn.activation) == ("gated", "silu")
    runs("palm-540b")


def test_claude_gpt_4_and_e56_no_preset_of_unpublished_models():
    assert not [n for n in qkv.presets() if "gpt-4" in n or "gpt4" in n or "claude" in n]


def test_e54_who_has_biases():
    """2017 writes its projections without; Qwen has them on queries, keys and values; Llama nowhere."""
    assert biases("transformer-base") == {"up_proj", "down_proj"}
    assert biases("gpt2") == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    assert biases("qwen2-7b") == {"q_proj", "k_proj", "v_proj"}
    assert biases("llama-7b") == set()


def test_e18_xavier_he_and_the_constant_of_gpt_2():
    """Square matrices of 512: Xavier has the deviation 1/sqrt(512) = 0.0442, He 0.0625, GPT-2 0.02."""
    cfg = qkv.preset("transformer-base").override({"encoder.n_layers": 1, "decoder.n_layers": 1, "vocab_size": 100})
    for init, std in ((c.XavierInit(), (2 / (512 + 512)) ** 0.5), (c.GPT2Init(), 0.02)):
        model = Transformer(cfg)
        initialise(model, cfg.override({"init": init}), seed=0)
        q_proj = model.encoder.layers[0].attention.q_proj.weight.detach()
        assert float(q_proj.std()) == pytest.approx(std, rel=0.01)
        assert abs(float(q_proj.std()) - (2 / 512) ** 0.5) > 0.015
    assert (2 / 512) ** 0.5 == 0.0625
    assert round(512**-0.5, 4) == 0.0442


def test_bert_and_gpt_differ_in_what_a_token_sees():
    """The same five tokens: BERT's first looks at all of them, GPT's at itself."""
    for name, stack, expected in (("bert-base-uncased", "encoder", 5), ("gpt2", "decoder", 1)):
        point = f"{stack}.layers.0.attention.weights"
        weights = watched(qkv.preset(name).toy(), tokens(1, 5), point)[point]
        assert int((weights[0, 0, 0] > 0).sum()) == expected
        assert torch.allclose(weights.sum(-1), torch.ones((), dtype=torch.float64))
