"""The published models: the facts that tell the families apart, and that their descriptions often get wrong."""

import math

import pytest

from config.test_presets import COUNTS, LLAMA_1, LLAMA_2, LLAMA_3, heads_of, stack_of, width_of
from qkv import config as c
from qkv.config.presets import preset

QWEN_2 = ("qwen2-0.5b", "qwen2-1.5b", "qwen2-7b", "qwen2-72b")
BERTS = ("bert-base-uncased", "bert-large-uncased", "bert-base-cased", "minilm-l6", "longformer-base", "bigbird-base")
GPT_2_AND_3 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-3-small", "gpt-3-175b")
T5 = ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b")


def rotary_of(name: str) -> c.Rotary:
    positions = stack_of(name).layers[-1].attention.positions
    assert isinstance(positions, c.Rotary)
    return positions


def biases(name: str) -> set[str]:
    """What has a bias in layer 0 of the last stack."""
    config = preset(name)
    prefix = f"{list(config.stacks)[-1]}.layers.0."
    return {
        p.removeprefix(prefix).removesuffix(".bias") for p in config.shapes() if p.startswith(prefix) and ".bias" in p
    }


# --- positions ---

THETA = {
    **dict.fromkeys((*LLAMA_1, *LLAMA_2, "mistral-7b", "qwen-7b", "chatglm2-6b", "chatglm3-6b", "palm-540b"), 10_000.0),
    **dict.fromkeys(("deepseek-llm-7b", "deepseek-llm-67b", "deepseek-v2", "deepseek-v3", "roformer-base"), 10_000.0),
    **dict.fromkeys((*LLAMA_3, "llama-2-long-70b"), 500_000.0),
    **dict.fromkeys((*QWEN_2, "codellama-7b", "codellama-34b", "mistral-7b-v0.3", "gemma-3-270m"), 1_000_000.0),
    **dict.fromkeys(("yi-6b", "yi-34b"), 5_000_000.0),
    "smollm2-135m": 100_000.0,
}


def test_theta_of_every_rotary_model():
    rotary = [name for name in COUNTS if isinstance(stack_of(name).layers[-1].attention.positions, c.Rotary)]
    assert {name: rotary_of(name).theta for name in rotary} == THETA


CONTEXT = {
    **dict.fromkeys(("gpt-1", "bert-base-uncased", "bert-large-uncased", "bert-base-cased", "minilm-l6", *T5), 512),
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), 1024),
    **dict.fromkeys(("gpt-3-small", "gpt-3-175b", *LLAMA_1, "palm-540b", "bloom-560m", "bloom-176b"), 2048),
    **dict.fromkeys((*LLAMA_2, "longformer-base", "bigbird-base", "deepseek-llm-7b", "yi-6b", "yi-34b"), 4096),
    **dict.fromkeys(("llama-3-8b", "llama-3-70b", "mistral-7b", "qwen-7b", "chatglm3-6b", "smollm2-135m"), 8192),
    **dict.fromkeys(("codellama-7b", "codellama-34b"), 16_384),
    **dict.fromkeys(("llama-2-long-70b", "mistral-7b-v0.3", *QWEN_2, "chatglm2-6b", "gemma-3-270m"), 32_768),
    **dict.fromkeys(("llama-3-405b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b"), 131_072),
    **dict.fromkeys(("deepseek-v2", "deepseek-v3"), 131_072),
}


@pytest.mark.parametrize("name", CONTEXT)
def test_context(name: str):
    assert preset(name).max_seq_len == CONTEXT[name]


SCALED = {
    **dict.fromkeys(("llama-3-405b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b"), c.Llama3Scaling),
    **dict.fromkeys(("deepseek-v2", "deepseek-v3"), c.YarnScaling),
    "qwen-7b": c.QwenDynamicScaling,
}


@pytest.mark.parametrize("name", THETA)
def test_only_these_models_scale_their_angles(name: str):
    # Not Llama 3.0, Mistral or Qwen2 (no YaRN), not Llama 2 Long (no interpolation), not Code Llama (no NTK formula).
    assert type(rotary_of(name).scaling) is SCALED.get(name, c.NoScaling)


def test_code_llama_set_theta_where_the_ntk_formula_would_give_another():
    assert rotary_of("codellama-7b").theta == 1e6
    by_formula = 10_000 * 4 ** (128 / 126)
    assert by_formula == pytest.approx(40_889.94, abs=0.01)


@pytest.mark.parametrize(
    ("name", "factor", "unchanged", "blended", "divided"),
    [("llama-3.1-8b", 8.0, 29, 6, 29), ("llama-3.2-1b", 32.0, 15, 3, 14)],
)
def test_llama_3_scales_by_wavelength(name: str, factor: float, unchanged: int, blended: int, divided: int):
    rotary, width = rotary_of(name), heads_of(name).head_dim
    scaling = rotary.scaling
    assert isinstance(scaling, c.Llama3Scaling)
    assert scaling.factor == factor
    waves = [2 * math.pi * rotary.theta ** (2 * i / width) for i in range(width // 2)]
    short = sum(w < scaling.original_max_seq_len / scaling.high_freq_factor for w in waves)
    long = sum(w > scaling.original_max_seq_len / scaling.low_freq_factor for w in waves)
    assert (short, len(waves) - short - long, long) == (unchanged, blended, divided)


def test_mistral_has_a_window_in_its_first_version_only():
    assert heads_of("mistral-7b").pattern == c.SlidingWindow(window=4096)
    assert heads_of("mistral-7b-v0.3").pattern == c.Causal()


def test_qwen_7b_stretches_with_the_row_and_scales_its_queries():
    attention = heads_of("qwen-7b")
    assert rotary_of("qwen-7b").scaling == c.QwenDynamicScaling(original_max_seq_len=8192)
    assert attention.log_n == preset("qwen-7b").max_seq_len == 8192


def test_chatglm_turns_half_of_each_head_as_pairs():
    for name in ("chatglm2-6b", "chatglm3-6b"):
        rotary, attention = rotary_of(name), heads_of(name)
        assert (rotary.width(attention.head_dim), attention.head_dim, rotary.layout) == (64, 128, "pairs")
        assert (attention.n_heads, attention.kv_heads) == (32, 2)


def test_only_these_models_turn_neighbours():
    pairs = {name for name in THETA if rotary_of(name).layout == "pairs"}
    assert pairs == {"roformer-base", "chatglm2-6b", "chatglm3-6b", "deepseek-v2", "deepseek-v3"}


@pytest.mark.parametrize("name", [*LLAMA_1, *LLAMA_2])
def test_llama_1_and_2_have_heads_of_128(name: str):
    assert heads_of(name).head_dim == 128


def test_bloom_has_alibi_over_112_heads_and_a_norm_after_the_embedding():
    for name, n_heads in (("bloom-560m", 16), ("bloom-176b", 112)):
        assert heads_of(name).positions == c.Alibi()
        assert heads_of(name).n_heads == n_heads
        assert preset(name).embedding.norm == c.LayerNorm(eps=1e-5)
        assert preset(name).vocab_size == 250_880


@pytest.mark.parametrize("name", [*T5, "t5-v1.1-base"])
def test_t5_has_shared_buckets_unscaled_scores_and_no_bias(name: str):
    config = preset(name)
    assert config.encoder is not None
    assert config.decoder is not None
    encoder, decoder = config.encoder.layers[0], config.decoder.layers[0]
    assert encoder.attention.positions == c.T5Buckets(n_buckets=32, max_distance=128, bidirectional=True)
    assert decoder.attention.positions == c.T5Buckets(n_buckets=32, max_distance=128, bidirectional=False)
    assert decoder.cross_attention is not None
    assert decoder.cross_attention.positions == c.NoPositions()
    assert [a.positions.shared for a in (encoder.attention, decoder.attention)] == [True, True]
    tables = [name for name in config.shapes() if "positions" in name]
    assert tables == ["encoder.positions.0.weight", "decoder.positions.0.weight"]
    assert {a.score_scale for a in (encoder.attention, decoder.attention, decoder.cross_attention)} == {1.0}
    assert not [name for name in config.shapes() if "bias" in name]
    assert isinstance(encoder.norm, c.RMSNorm)


def test_t5_versions():
    old, new = preset("t5-base"), preset("t5-v1.1-base")
    assert isinstance(old.head, c.LanguageModel)
    assert old.head.tied
    assert old.head.factor(768) == 768**-0.5
    assert isinstance(stack_of("t5-base").layers[0].ffn, c.Dense)
    assert new.head == c.LanguageModel(tied=False)
    assert stack_of("t5-v1.1-base").layers[0].ffn == c.Gated(d_ff=2048, activation="gelu-tanh", dropout=0.1)


# --- heads ---

GROUPED = {
    "llama-2-70b": (64, 8), "llama-2-long-70b": (64, 8), "codellama-34b": (64, 8),
    "llama-3-8b": (32, 8), "llama-3-70b": (64, 8), "llama-3-405b": (128, 8),
    "llama-3.1-8b": (32, 8), "llama-3.2-1b": (32, 8), "llama-3.2-3b": (24, 8),
    "mistral-7b": (32, 8), "mistral-7b-v0.3": (32, 8),
    "qwen2-0.5b": (14, 2), "qwen2-1.5b": (12, 2), "qwen2-7b": (28, 4), "qwen2-72b": (64, 8),
    "chatglm2-6b": (32, 2), "chatglm3-6b": (32, 2),
    "deepseek-llm-67b": (64, 8), "yi-6b": (32, 4), "yi-34b": (56, 8), "smollm2-135m": (9, 3),
}  # fmt: skip


def test_which_models_group_their_keys():
    """Not Llama 1, nor Llama 2 7B and 13B; Llama 3 in every size; PaLM and Gemma 3 270M have a single key head."""
    multi = [name for name in COUNTS if "deepseek-v" not in name]
    grouped = {n: (heads_of(n).n_heads, heads_of(n).kv_heads) for n in multi}
    single = {n for n, (_, kv) in grouped.items() if kv == 1}
    assert single == {"palm-540b", "gemma-3-270m"}
    assert {n: pair for n, pair in grouped.items() if pair[0] != pair[1] and n not in single} == GROUPED


def test_vocabularies_of_llama():
    assert {preset(name).vocab_size for name in (*LLAMA_1, *LLAMA_2, "codellama-34b")} == {32_000}
    assert preset("codellama-7b").vocab_size == 32_016
    assert {preset(name).vocab_size for name in LLAMA_3} == {128_256}


def test_which_models_tie_their_head():
    tied = {name for name in COUNTS if isinstance(head := preset(name).head, c.LanguageModel) and head.tied}
    assert tied == {
        "transformer-base", "transformer-big", "gpt-1", *GPT_2_AND_3, *T5, "bloom-560m", "bloom-176b", "palm-540b",
        "llama-3.2-1b", "llama-3.2-3b", "qwen2-0.5b", "qwen2-1.5b", "smollm2-135m", "gemma-3-270m",
    }  # fmt: skip


def test_biases():
    projections = {f"attention.{p}_proj" for p in "qkvo"}
    networks = {"ffn.up_proj", "ffn.down_proj"}
    norms = {"attention_norm", "ffn_norm"}
    assert biases("gpt2") == biases("bert-base-uncased") == biases("bloom-560m") == projections | networks | norms
    # The paper of 2017 writes projections without biases, and networks with them.
    assert biases("transformer-base") == networks | norms | {"cross_attention_norm"}
    assert biases("transformer-xl-wt103") == networks | norms
    # Not every modern model is without: Qwen and ChatGLM have biases in q, k and v.
    for name in ("qwen-7b", *QWEN_2, "chatglm2-6b", "chatglm3-6b"):
        assert biases(name) == {f"attention.{p}_proj" for p in "qkv"}
    for name in (*LLAMA_1, *LLAMA_2, *LLAMA_3, "mistral-7b", "yi-34b", "palm-540b", "gemma-3-270m", "deepseek-v3"):
        assert biases(name) == set()


# --- norms and blocks ---


def test_where_the_norms_stand():
    post = {name for name in COUNTS if isinstance(stack_of(name).layers[-1].residual, c.PostNorm)}
    # All of BERT is post-norm, and so is GPT-1; GPT-2 and GPT-3 are not.
    assert post == {"transformer-base", "transformer-big", *BERTS, "roformer-base", "gpt-1", "transformer-xl-wt103"}
    for name in COUNTS:
        final = [stack.norm for stack in preset(name).stacks.values()]
        assert all(isinstance(norm, c.NoNorm) for norm in final) is (name in post), name
    other = {n: type(stack_of(n).layers[-1].residual) for n in COUNTS if n not in post}
    assert {n: kind for n, kind in other.items() if kind is not c.PreNorm} == {
        "palm-540b": c.Parallel,
        "gemma-3-270m": c.SandwichNorm,
    }


EPSILON = {
    **dict.fromkeys(("bert-base-uncased", "bert-large-uncased", "bert-base-cased", "minilm-l6"), 1e-12),
    **dict.fromkeys(("bigbird-base", "roformer-base"), 1e-12),
    **dict.fromkeys(("longformer-base", "gpt-1", *GPT_2_AND_3, "bloom-176b", "transformer-xl-wt103"), 1e-5),
    **dict.fromkeys((*LLAMA_1, *T5, "qwen-7b", "qwen2-0.5b", "qwen2-1.5b", "qwen2-7b", "gemma-3-270m"), 1e-6),
    **dict.fromkeys((*LLAMA_2, *LLAMA_3, "mistral-7b", "chatglm2-6b", "yi-6b", "yi-34b", "qwen2-72b"), 1e-5),
    **dict.fromkeys(("deepseek-llm-7b", "deepseek-v2", "deepseek-v3"), 1e-6),
}


@pytest.mark.parametrize("name", EPSILON)
def test_epsilon_is_the_same_in_all_norms_of_a_model(name: str):
    stack = stack_of(name)
    norms = [stack.norm, *(block.norm for block in (*stack.first, *stack.layers)), preset(name).embedding.norm]
    assert {norm.eps for norm in norms if isinstance(norm, c.LayerNorm | c.RMSNorm)} == {EPSILON[name]}


def test_the_transformer_of_2017():
    for name, n_heads, d_ff, dropout in (("transformer-base", 8, 2048, 0.1), ("transformer-big", 16, 4096, 0.3)):
        config = preset(name)
        assert [stack.n_layers for stack in config.stacks.values()] == [6, 6]
        assert config.embedding.factor(config.d_model) == config.d_model**0.5
        assert config.embedding.positions == c.Sinusoidal()
        assert config.sharing == "all"  # with the tied head: one matrix for source, target and pre-softmax
        assert [n for n in config.shapes() if 37_000 in config.shapes()[n].shape] == ["embed.tokens.weight"]
        assert (heads_of(name).n_heads, heads_of(name).head_dim, width_of(name)) == (n_heads, 64, d_ff)
        assert {block.dropout for stack in config.stacks.values() for block in stack.layers} == {dropout}


def test_bert():
    for name in BERTS:
        config = preset(name)
        assert config.head == c.Pooler()
        assert isinstance(config.embedding.norm, c.LayerNorm)
        assert config.decoder is None
    assert preset("bert-base-uncased").embedding.n_segments == 2
    assert heads_of("bert-base-uncased").pattern == c.Bidirectional()
    ffn = stack_of("bert-base-uncased").layers[0].ffn
    assert isinstance(ffn, c.Dense)
    assert ffn.activation == "gelu"  # with erf


def test_longformer_and_bigbird():
    longformer, shapes = heads_of("longformer-base"), preset("longformer-base").shapes()
    assert longformer.pattern == c.Longformer(window=512)
    assert longformer.global_projections
    assert preset("longformer-base").embedding.positions == c.Learned(offset=2)
    assert shapes["embed.positions.weight"].shape == (4098, 768)
    assert heads_of("bigbird-base").pattern == c.BigBird(block=64, random_blocks=3)


def test_roformer_is_bert_with_rotary_positions_and_no_table():
    config = preset("roformer-base")
    assert config.embedding.positions == c.NoPositions()
    assert isinstance(config.head, c.MaskedLanguageModel)
    assert config.head.tied


def test_transformer_xl():
    config, attention = preset("transformer-xl-wt103"), heads_of("transformer-xl-wt103")
    shapes = {name: parameter.shape for name, parameter in config.shapes().items()}
    assert attention.positions == c.TransformerXL(clamp=1000)
    tables = [shapes[f"embed.tokens.clusters.{k}.weight"] for k in range(4)]
    assert tables == [(20_000, 1024), (20_000, 256), (160_000, 64), (67_735, 16)]
    assert isinstance(config.embedding.tokens, c.AdaptiveTable)
    # Only the first projection of the softmax is its own, and no matrix of a cluster.
    assert [n for n in shapes if n.startswith("head.") and "bias" not in n] == [
        "head.cluster_weight",
        "head.projections.0.weight",
    ]
    layers = [name for name in shapes if name.startswith("decoder.layers.") and name.endswith(".positions.u")]
    assert len(layers) == 18  # untied: u and v in every layer


def test_gpt_1_and_its_successors():
    assert preset("gpt-1").vocab_size == 40_478
    assert preset("gpt2").vocab_size == preset("gpt-3-175b").vocab_size == 50_257
    for name in ("gpt-1", *GPT_2_AND_3):
        assert preset(name).embedding.positions == c.Learned()
        assert heads_of(name).pattern == c.Causal()  # GPT-3 too: every layer dense
        ffn = stack_of(name).layers[0].ffn
        assert isinstance(ffn, c.Dense)
        assert ffn.activation == "gelu-tanh"


def test_palm():
    block = stack_of("palm-540b").layers[0]
    assert block.residual == c.Parallel(shared_norm=True)
    assert isinstance(block.ffn, c.Gated)
    assert (stack_of("palm-540b").n_layers, block.ffn.d_ff) == (118, 4 * 18_432)
    assert heads_of("palm-540b").head_dim == 256


def test_gemma_3_has_five_local_layers_then_a_global_one():
    blocks = stack_of("gemma-3-270m").blocks
    patterns = [block.attention.pattern for block in blocks]
    assert [isinstance(pattern, c.SlidingWindow) for pattern in patterns] == [True, True, True, True, True, False] * 3
    assert {p.window for p in patterns if isinstance(p, c.SlidingWindow)} == {512}
    thetas = [block.attention.positions.theta for block in blocks if isinstance(block.attention.positions, c.Rotary)]
    assert thetas == [1e4, 1e4, 1e4, 1e4, 1e4, 1e6] * 3
    norm = c.RMSNorm(eps=1e-6, unit_offset=True, cast="after")
    assert all(block.norm == norm for block in blocks)
    assert heads_of("gemma-3-270m").qk_norm == norm
    assert preset("gemma-3-270m").embedding.factor(640) == 640**0.5


# --- DeepSeek ---


def experts_of(name: str) -> c.MixtureOfExperts:
    ffn = stack_of(name).layers[0].ffn
    assert isinstance(ffn, c.MixtureOfExperts)
    return ffn


@pytest.mark.parametrize(
    ("name", "n_layers", "dense", "mscale", "scale"),
    [("deepseek-v2", 60, [12_288], 0.707, 0.11472), ("deepseek-v3", 61, [18_432] * 3, 1.0, 0.13523)],
)
def test_deepseek_attention(name: str, n_layers: int, dense: list[int], mscale: float, scale: float):
    stack = stack_of(name)
    assert stack.n_layers == n_layers
    assert [block.ffn.d_ff for block in stack.first if isinstance(block.ffn, c.Gated)] == dense
    for block in stack.blocks:
        attention = block.attention
        assert isinstance(attention, c.Latent)
        assert (attention.n_heads, attention.q_rank, attention.kv_rank) == (128, 1536, 512)
        assert (attention.nope_dim, attention.rope_dim, attention.v_head_dim) == (128, 64, 128)
        assert isinstance(attention.positions, c.Rotary)
        yarn = attention.positions.scaling
        assert isinstance(yarn, c.YarnScaling)
        assert (yarn.factor, yarn.original_max_seq_len, yarn.beta_fast, yarn.beta_slow) == (40, 4096, 32, 1)
        assert yarn.mscale == yarn.mscale_all_dim == mscale  # so that cos and sin are not scaled
        assert attention.score_scale == pytest.approx(scale, abs=5e-6)
        assert attention.score_scale == pytest.approx((0.1 * mscale * math.log(40) + 1) ** 2 * 192**-0.5, rel=1e-12)
    # 576 numbers per layer and token in two bytes each: what a cache of latents holds.
    assert 2 * n_layers * (512 + 64) == {"deepseek-v2": 69_120, "deepseek-v3": 70_272}[name]


def test_deepseek_experts():
    two, three = experts_of("deepseek-v2"), experts_of("deepseek-v3")
    assert (two.n_experts, two.top_k, two.d_ff, two.shared_d_ff) == (160, 6, 1536, 2 * 1536)
    assert (two.n_groups, two.top_groups, two.group_score) == (8, 3, "max")
    assert (two.score, two.normalize, two.scale, two.correction) == ("softmax", False, 16.0, False)
    assert (three.n_experts, three.top_k, three.d_ff, three.shared_d_ff) == (256, 8, 2048, 2048)
    assert (three.n_groups, three.top_groups, three.group_score) == (8, 4, "top2")
    assert (three.score, three.normalize, three.scale, three.correction) == ("sigmoid", True, 2.5, True)


def test_deepseek_v3_without_the_corrections_of_its_routers():
    without = preset("deepseek-v3").override({"decoder.layers.0.ffn.correction": False})
    assert without.n_parameters == 671_026_404_352
