"""The published models: their names, exact parameter counts, files and sizes."""

import math
import subprocess
import sys
from fractions import Fraction
from importlib import import_module
from pkgutil import iter_modules

import pytest

from qkv.config import Dense, Gated, ModelConfig, MultiHead, Stack
from qkv.config import presets as families
from qkv.config.presets import preset, presets
from qkv.errors import ConfigError

COUNTS = {
    "transformer-base": 63_045_632,  # 37,000 shared tokens, no attention biases; the paper rounds to 65M
    "transformer-big": 214_171_648,  # the paper rounds to 213M
    "bert-base-uncased": 109_482_240,  # with the pooler
    "bert-large-uncased": 335_141_888,
    "bert-base-cased": 108_310_272,
    "minilm-l6": 22_713_216,  # with the pooler
    "roformer-base": 124_099_664,  # roformer_chinese_base with its masked-LM head; derived beside the preset
    "longformer-base": 148_659_456,
    "bigbird-base": 127_468_800,
    "gpt-1": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-3-small": 125_226_240,  # 2,048 positions; with 1,024 it would be GPT-2 small
    "gpt-3-175b": 174_604_259_328,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-base": 247_577_856,
    "transformer-xl-wt103": 285_205_322,  # derived beside the preset
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,  # the architecture of Llama 1
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-2-long-70b": 68_976_648_192,  # theta is no parameter
    "codellama-7b": 6_738_546_688,  # 16 tokens more than Llama 2: 2 * 16 * 4096
    "codellama-34b": 33_743_970_304,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,  # tied
    "llama-3.2-3b": 3_212_749_824,  # tied
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,  # 768 tokens more: 2 * 768 * 4096
    "qwen-7b": 7_721_324_544,
    "qwen2-0.5b": 494_032_768,  # tied
    "qwen2-1.5b": 1_543_714_304,  # tied
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "chatglm2-6b": 6_243_584_000,
    "chatglm3-6b": 6_243_584_000,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-llm-67b": 67_425_001_472,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,  # with the routers' corrections, without the multi-token-prediction layer
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "bloom-560m": 559_214_592,
    "bloom-176b": 176_247_271_424,
    "palm-540b": 540_356_474_880,  # tied, vocabulary 256,000, one norm per parallel block
    "smollm2-135m": 134_515_008,  # tied
    "gemma-3-270m": 268_098_176,  # tied
}

LLAMA_1 = ("llama-7b", "llama-13b", "llama-33b", "llama-65b")
LLAMA_2 = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
LLAMA_3 = ("llama-3-8b", "llama-3-70b", "llama-3-405b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b")


def stack_of(name: str) -> Stack:
    """The stack that a model of one stack has, or the decoder of one with two."""
    return list(preset(name).stacks.values())[-1]


def heads_of(name: str) -> MultiHead:
    """The attention of the last layer of the cycle."""
    attention = stack_of(name).layers[-1].attention
    assert isinstance(attention, MultiHead)
    return attention


def width_of(name: str) -> int:
    """d_ff of the last layer of the cycle."""
    ffn = stack_of(name).layers[-1].ffn
    assert isinstance(ffn, Dense | Gated)
    return ffn.d_ff


# --- the list, the counts, the files ---


def test_every_preset_has_a_published_count():
    assert set(presets()) == set(COUNTS)


def test_every_family_is_listed_and_no_name_stands_in_two():
    modules = [import_module(f"{families.__name__}.{found.name}") for found in iter_modules(families.__path__)]
    assert sorted(name for module in modules for name in module.MODELS) == sorted(presets())


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name: str):
    assert preset(name).n_parameters == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
def test_round_trip_through_json_and_toml(name: str):
    config = preset(name)
    assert ModelConfig.from_json(config.to_json()) == config
    assert ModelConfig.from_toml(config.to_toml()) == config


def test_the_public_names():
    import qkv

    assert qkv.presets() == presets()
    assert qkv.preset("gpt2") == preset("gpt2")


@pytest.mark.parametrize(
    ("wrong", "right"), [("llama-3-8", "llama-3-8b"), ("GPT2-XL", "gpt2-xl"), ("bert-base", "bert-base-cased")]
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, right: str):
    with pytest.raises(ConfigError, match=rf"^unknown preset '{wrong}'; did you mean .*'{right}'") as error:
        preset(wrong)
    assert "\n" not in str(error.value)


def test_an_unknown_name_like_no_other_points_to_the_list():
    with pytest.raises(ConfigError, match=r"^unknown preset 'zebra'; qkv.presets\(\) lists the names$"):
        preset("zebra")


def test_names_need_no_configs(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: ModelConfig, **fields: object) -> None:
        raise AssertionError("a config was built")

    monkeypatch.setattr(ModelConfig, "__init__", refuse)
    assert "llama-3-8b" in presets()
    with pytest.raises(AssertionError, match="a config was built"):
        preset("llama-3-8b")


def test_presets_load_neither_torch_nor_numpy():
    code = (
        "import sys, qkv; [qkv.preset(n).n_parameters for n in qkv.presets()]; "
        "print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['pydantic']"


# --- sizes ---


@pytest.mark.parametrize(
    ("name", "d_model", "n_heads", "n_layers", "d_ff"),
    [  # the table of section 7.2 of the lecture on hyperparameters
        ("gpt2", 768, 12, 12, 3072),
        ("gpt2-xl", 1600, 25, 48, 6400),
        ("llama-2-7b", 4096, 32, 32, 11_008),
        ("llama-2-70b", 8192, 64, 80, 28_672),
        ("llama-3-405b", 16_384, 128, 126, 53_248),
    ],
)
def test_the_five_configs_of_the_lecture(name: str, d_model: int, n_heads: int, n_layers: int, d_ff: int):
    config = preset(name)
    assert (config.d_model, heads_of(name).n_heads, stack_of(name).n_layers) == (d_model, n_heads, n_layers)
    assert width_of(name) == d_ff


ONE = Fraction(1)
D_FF_RULE = {
    **dict.fromkeys((*LLAMA_1, "llama-2-7b", "llama-2-13b", "codellama-7b", "codellama-34b"), (ONE, 256)),
    "llama-2-70b": (Fraction(13, 10), 4096),
    "llama-2-long-70b": (Fraction(13, 10), 4096),
    "llama-3-8b": (Fraction(13, 10), 1024),
    "llama-3.1-8b": (Fraction(13, 10), 1024),
    "llama-3-70b": (Fraction(13, 10), 4096),
    "llama-3-405b": (Fraction(12, 10), 4096),
    "deepseek-llm-7b": (ONE, 256),
    "deepseek-llm-67b": (ONE, 256),
}
"""(k, m) of d_ff = m * ceil(floor(k * floor(8 d / 3)) / m)."""


@pytest.mark.parametrize("name", D_FF_RULE)
def test_llama_d_ff_rule(name: str):
    k, m = D_FF_RULE[name]
    assert width_of(name) == m * math.ceil(math.floor(k * (8 * preset(name).d_model // 3)) / m)


def test_d_ff_is_no_fixed_multiple_of_the_width():
    ratios = {name: width_of(name) / preset(name).d_model for name in ("llama-2-70b", "llama-3-405b", "llama-7b")}
    assert ratios == {"llama-2-70b": 3.5, "llama-3-405b": 3.25, "llama-7b": 2.6875}


def test_heads_need_not_fill_the_model():
    together = {name: heads_of(name).n_heads * heads_of(name).head_dim for name in COUNTS if "deepseek-v" not in name}
    other = {name: width for name, width in together.items() if width != preset(name).d_model}
    assert other == {"t5-3b": 4096, "t5-11b": 16_384, "palm-540b": 12_288, "gemma-3-270m": 1024}
    assert [preset(name).d_model for name in other] == [1024, 1024, 18_432, 640]


def test_depth_and_width_follow_no_law():
    ratio = {name: preset(name).d_model / stack_of(name).n_layers for name in COUNTS}
    assert ratio["llama-2-7b"] == 128
    assert ratio["llama-2-70b"] == pytest.approx(102.4)
    assert ratio["llama-3-405b"] == pytest.approx(130.03, abs=0.01)
    assert ratio["gpt2-xl"] == pytest.approx(33.33, abs=0.01)


@pytest.mark.parametrize(
    ("name", "estimate", "exact", "deviation"),
    [  # 12 L d^2 against all parameters but the two vocabulary matrices
        ("llama-2-7b", 6_442_450_944, 6_476_271_616, -0.005),
        ("llama-2-70b", 64_424_509_440, 68_452_360_192, -0.059),
        ("llama-3-405b", 405_874_409_472, 401_650_696_192, +0.0105),
    ],
)
def test_the_estimate_of_twelve_squares(name: str, estimate: int, exact: int, deviation: float):
    config = preset(name)
    assert 12 * stack_of(name).n_layers * config.d_model**2 == estimate
    assert config.n_parameters - 2 * config.vocab_size * config.d_model == exact
    assert estimate / exact - 1 == pytest.approx(deviation, abs=6e-4)


def test_the_estimate_for_gpt_2_misses_positions_norms_and_biases():
    config = preset("gpt2")
    estimate = 12 * 12 * 768**2 + config.vocab_size * 768
    assert estimate == 123_532_032
    positions, norms = 1024 * 768, (2 * 12 + 1) * 2 * 768
    in_biases = 12 * (3 * 768 + 768 + 3072 + 768)
    assert config.n_parameters - estimate == positions + norms + in_biases


def test_a_layer_of_llama_7b_is_a_little_over_twelve_squares():
    matrices = [
        p for n, p in preset("llama-7b").shapes().items() if n.startswith("decoder.layers.0.") and len(p.shape) > 1
    ]
    assert sum(p.size for p in matrices) / 4096**2 == 12.0625
