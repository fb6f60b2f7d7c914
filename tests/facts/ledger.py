"""The ledger: every row of the facts, errata and bugs, the tests that show it, and the parts that owe the rest.

A row's words are tests (`file::test`, where `positions` is this folder's test_positions.py, and `seeds/s1_listings` is
test_s1_listings.py of the folder seeds) and parts of qkv that do not exist yet or do not show it yet. A row that has
tests and parts is shown in part. `test_ledger` holds all this against the tests that exist, and against the lists
themselves where they are at hand.
"""

from __future__ import annotations

from typing import NamedTuple

from .ledger_bugs import BUGS
from .ledger_errata import ERRATA, VERIFIED

PARTS = {
    "checkpoints": "checkpoint",
    "planner": "plan",
    "training": "train",
    "evaluation": "evaluate",
    "generation": "generate",
    "tokenizers": "text",
    "server": "serve",
    "lab": "lab",
    "lens": "lens",
    "documents": "docs",
    "benchmarks": "benchmarks",
}
"""Each part that may owe something, and the folder of its tests."""

# fmt: off

MODELS: dict[str, str] = {
    "Transformer 2017": "models::test_transformer_2017 training generation evaluation",
    "BERT": "models::test_bert training evaluation",
    "GPT-1": "models::test_gpt_1",
    "GPT-2": """
        models::test_gpt_2 models::test_gpt_2_initialisation_of_what_joins_the_residual_stream checkpoints
        evaluation""",
    "GPT-3": "models::test_gpt_3 planner",
    "T5": "models::test_t5 relative::test_t5_buckets training",
    "Transformer-XL": """
        models::test_transformer_xl relative::test_transformer_xl_rel_shift_equals_the_direct_gather
        cache/bugs::test_b23_transformer_xl_memories_stand_before_the_segment evaluation""",
    "Shaw relative": """
        relative::test_shaw_relative_equals_brute_force relative::test_shaw_relative_has_2k_plus_1_rows evaluation""",
    "RoFormer/RoPE": """
        models::test_roformer rotary::test_rope_property_1_the_score_depends_on_the_offset_alone
        rotary::test_rope_layouts_give_one_model_after_the_permutation rotary::test_rope_is_what_brings_positions
        evaluation""",
    "LLaMA 1": "models::test_llama_1",
    "Llama 2": "models::test_llama_2",
    "Llama 3 / 3.1 / 3.2": "models::test_llama_3 rotary_scaling::test_rope_scaling_llama3_keeps_blends_and_divides",
    "Llama 2 Long": "models::test_e08_llama_2_long_has_a_larger_base_and_no_interpolation",
    "CodeLlama": "models::test_codellama rotary_scaling::test_e09_the_alpha_formula_does_not_give_code_llamas_theta",
    "Mistral 7B": """
        models::test_mistral sparse::test_mistral_window_equals_the_masked_full_attention
        sparse::test_mistral_window_is_that_of_v0_1_only cache/bugs::test_b06_a_window_is_a_window_in_the_cache""",
    "Qwen 1 / 2": "models::test_qwen models::test_e06_and_e07_mistral_and_qwen_2_were_trained_without_yarn",
    "ChatGLM 2/3": "models::test_chatglm rotary::test_e26_chatglm_turns_half_of_each_head",
    "DeepSeek": """
        models::test_deepseek plan/cache::test_published_models_in_16_bits
        cache/bytes::test_the_bytes_are_those_that_the_planner_predicts""",
    "Yi": "models::test_yi",
    "BLOOM + ALiBi": """
        models::test_bloom relative::test_bloom_alibi_slopes_of_112_heads
        relative::test_e52_alibi_slopes_of_head_counts_that_are_no_power_of_two
        relative::test_bloom_alibi_bias_is_minus_slope_times_distance""",
    "PaLM / MQA": "models::test_palm planner",
    "Longformer": """
        sparse::test_longformer_equals_dense_attention_under_the_mask
        sparse::test_longformer_global_tokens_have_projections_of_their_own
        sparse::test_longformer_cost_is_linear_in_scores sparse::test_longformer_cost_is_linear_in_memory
        sparse::test_longformer_window_backend_equals_eager benchmarks""",
    "BigBird": """
        sparse::test_bigbird_graph_is_window_global_and_random_blocks sparse::test_bigbird_seed_fixes_the_graph
        sparse::test_bigbird_equals_dense_attention_under_the_mask
        sparse::test_bigbird_short_rows_are_attended_densely_and_the_pattern_says_so
        sparse::test_bigbird_preset_has_the_papers_blocks""",
    "FlashAttention": """
        flash::test_flash_attention_in_tiles_equals_the_dense_formula_forward_and_backward
        flash::test_flash_attention_of_the_model_equals_the_oracle
        flash::test_flash_attention_gradients_equal_those_of_the_eager_formula
        flash::test_flash_attention_memory_grows_with_the_length
        flash::test_flash_attention_gives_zero_to_rows_that_see_nothing
        flash::test_flash_attention_memory_of_the_tiles_grows_with_the_length""",
    "Ring Attention": "flash::test_ring_attention_equals_one_rank training",
    "PI / NTK-aware / dynamic NTK / YaRN / llama3 / LongRoPE": """
        rotary_scaling::test_rope_scaling_position_interpolation_divides_every_frequency
        rotary_scaling::test_rope_scaling_ntk_aware_base bugs::test_b51_dynamic_ntk_base
        rotary_scaling::test_rope_scaling_yarn_goldens
        rotary_scaling::test_rope_scaling_llama3_keeps_blends_and_divides
        rotary_scaling::test_rope_scaling_longrope_has_a_factor_per_pair_and_two_lists
        rotary_scaling::test_rope_scaling_model_beyond_its_length_has_a_finite_loss
        rotary_scaling::test_rope_scaling_qwen_dynamic_base_grows_in_steps""",
    "Modern block (S0 §6)": """
        stacks::test_modern_block_is_causal stacks::test_e32_rotary_positions_are_really_applied
        stacks::test_e32_the_model_runs_and_every_gradient_is_finite
        stacks::test_modern_block_is_that_of_the_llama_presets""",
    "RNN/LSTM baseline (S1 Q1)": "lab",
    "Claude, GPT-4": "models::test_claude_gpt_4_and_e56_no_preset_of_unpublished_models",
}
"""Section 1.1: models and families that the texts name."""

COUNTS: dict[str, str] = {
    "deepseek-v2": "counts::test_count_of_deepseek_v2",
    "deepseek-v3": "counts::test_count_of_deepseek_v3_with_and_without_the_routers_correction",
    "palm-540b": "counts::test_count_of_palm_540b",
    "gemma-3-270m": "counts::test_count_of_gemma_3_270m",
    "minilm-l6": "counts::test_count_of_minilm_l6_with_its_pooler",
    "longformer-base-4096": "counts::test_count_of_longformer_base",
    "bigbird-base": "counts::test_count_of_bigbird_base",
    "roformer-base": "counts::test_roformer_base_names_the_released_checkpoint",
    "mistral-7b-v0.3": "counts::test_count_of_mistral_7b_v0_3",
    "Llama d_ff in general": "counts::test_llama_d_ff_in_general",
    "Yi": "counts::test_yi_theta",
    "Qwen 1": "counts::test_qwen_1_has_its_own_dynamic_ntk_and_log_n_scaling",
    "gpt-3-175b": "counts::test_gpt_3_175b_says_that_it_is_dense",
}
"""Further counts and configuration facts."""

METHODS: dict[str, str] = {
    "Scaled dot-product attention, additive and boolean masks": """
        attention::test_scaled_dot_product_attention
        attention::test_scaled_dot_product_attention_rows_sum_to_one_or_zero
        attention::test_e33_one_type_of_mask_and_both_of_pytorchs_conventions""",
    "Why √d_k": "attention::test_why_sqrt_d_k_variance attention::test_e48_the_largest_of_ten_weights",
    "Causal mask demo": """
        attention::test_causal_mask_demo_prints_what_the_text_prints
        attention::test_causal_mask_demo_is_safe_in_half_precision""",
    'self_attention "it→cat" demo': "attention::test_e19_it_finds_itself",
    "Multi-head attention; parameter count": """
        heads::test_multi_head_attention_has_1048576_parameters heads::test_multi_head_attention_equals_head_by_head
        heads::test_e49_products_do_not_depend_on_the_number_of_heads_and_scores_do""",
    "Encoder, decoder, cross-attention, enc-dec panorama": """
        stacks::test_encoder_decoder_panorama_shapes stacks::test_encoder_padding_does_not_change_the_result
        stacks::test_encoder_sees_both_sides stacks::test_decoder_position_does_not_know_later_targets
        stacks::test_cross_attention_sees_every_real_source_token_from_every_target
        stacks::test_cross_attention_takes_keys_and_values_from_the_last_encoder_layer""",
    "MHA / GQA / MQA": """
        heads::test_grouped_query_attention_head_j_reads_key_value_head_j_g_over_h
        heads::test_grouped_query_attention_with_all_heads_is_multi_head_to_the_bit
        heads::test_grouped_query_attention_is_multi_head_with_repeated_keys_to_the_bit
        heads::test_grouped_query_attention_in_every_backend
        heads::test_grouped_query_attention_saves_keys_and_values""",
    "Sinusoidal PE + heat map": """
        positions::test_sinusoidal_position_encoding
        positions::test_sinusoidal_position_encoding_shifts_by_a_linear_map
        positions::test_sinusoidal_position_encoding_heat_map_is_an_image_file
        positions::test_e03_sinusoid_frequencies_fall
        positions::test_e21_equal_inner_products_are_stationarity_and_hold_for_minus_k""",
    "Learned PE": """
        positions::test_learned_position_encoding_beyond_the_table_is_a_named_error
        positions::test_learned_position_encoding_adds_the_row_of_the_position
        positions::test_learned_position_encoding_counts_real_tokens_only""",
    "RoPE: 2-D, d-dim, complex, per-pair, table, both layouts": """
        rotary::test_rope_five_forms_agree rotary::test_rope_layouts_give_one_model_after_the_permutation
        rotary::test_rope_frequencies_of_width_128 rotary::test_rope_at_position_0_is_the_identity
        rotary::test_rope_of_a_quarter_of_each_head_in_a_whole_model""",
    "RoPE properties 1-3": """
        rotary::test_rope_property_1_the_score_depends_on_the_offset_alone
        rotary::test_rope_property_1_positions_shifted_together_change_nothing
        rotary::test_e25_decay_with_distance_is_a_bound_only lab""",
    "Position-scheme comparison table": "relative::test_position_schemes_inside_attention_are_relative lab documents",
    "RoPE base table": "rotary::test_rope_base_table",
    "FFN (ReLU/GELU tanh/erf), SwiGLU": """
        sizes::test_feed_forward_of_512_and_2048_has_2099712_parameters sizes::test_feed_forward_is_its_formula
        sizes::test_feed_forward_gelu_by_tanh_and_by_erf sizes::test_feed_forward_swiglu_has_three_matrices""",
    "LayerNorm, RMSNorm": """
        norms::test_layer_norm_and_rms_norm_are_their_formulas
        norms::test_layer_norm_and_rms_norm_have_eps_inside_the_root
        norms::test_layer_norm_and_rms_norm_use_the_population_variance
        norms::test_layer_norm_and_rms_norm_accumulate_in_float32""",
    "Add & Norm / residual demo": """
        norms::test_e34_with_without_and_only_the_residual norms::test_add_and_norm_places""",
    "Pre-LN vs Post-LN gradient flow":
        "norms::test_e44_post_norm_gradients_do_not_depend_on_depth_and_pre_norm_ones_shrink",
    "MiniGPT (NumPy)": """
        sizes::test_mini_gpt_is_a_model_of_the_tree sizes::test_mini_gpt_learns
        sizes::test_e29_the_exact_count_of_mini_gpt_and_of_gpt_3""",
    "Weight tying": """
        sizes::test_weight_tying_is_one_storage_and_one_saved_tensor sizes::test_weight_tying_adds_both_gradients
        sizes::test_weight_tying_uses_one_matrix_at_both_ends""",
    "Hyper-parameter rules & config table (S0 §7)": """
        sizes::test_hyperparameter_rules_config_table
        sizes::test_hyperparameter_rules_heads_are_64_or_128_wide_in_the_table planner""",
    "Parameter estimate 12Ld²": """
        sizes::test_parameter_estimate_beside_the_exact_count
        sizes::test_parameter_estimate_with_the_embedding_of_gpt_2
        sizes::test_e27_swiglu_has_three_matrices_of_8_thirds_d_and_untied_models_two_of_v_d""",
    "MLM / next-token / seq2seq": "training",
    "KV cache": """
        plan/cache::test_published_models_in_16_bits cache/equal::test_every_model_in_two_ways
        cache/bytes::test_the_bytes_are_those_that_the_planner_predicts""",
    "Complexity table (and Vaswani Table 1)": """
        flash::test_e40_a_layer_costs_24_n_d2_and_4_n2_d
        flash::test_complexity_four_times_the_context_is_sixteen_times_the_scores planner lab""",
    "RNN vs Transformer, BERT vs GPT, three paradigms, variant family, evolution chain, modern-vs-original tables": """
        stacks::test_three_paradigms_are_three_choices_of_stacks
        models::test_bert_and_gpt_differ_in_what_a_token_sees documents""",
    "Order blindness (狗咬人 / 人咬狗)": """
        attention::test_order_blindness_of_the_dog_and_the_man
        attention::test_e69_two_causal_layers_see_the_order_of_earlier_tokens""",
}
"""Section 1.2: methods, formulas, tables and demonstrations."""

# fmt: on


class Row(NamedTuple):
    """One row: its table, its name, the tests that show it as (path below tests/, function), and who owes the rest."""

    table: str
    name: str
    shown: tuple[tuple[str, str], ...]
    owed: tuple[str, ...]


TABLES = {
    "models": MODELS,
    "counts": COUNTS,
    "methods": METHODS,
    "errata": ERRATA,
    "verified": VERIFIED,
    "bugs": BUGS,
}


def rows() -> list[Row]:
    """All rows of all tables."""
    return [_row(table, name, words.split()) for table, names in TABLES.items() for name, words in names.items()]


def _row(table: str, name: str, words: list[str]) -> Row:
    shown = tuple(_node(word) for word in words if "::" in word)
    return Row(table, name, shown, tuple(word for word in words if "::" not in word))


def _node(word: str) -> tuple[str, str]:
    place, function = word.split("::")
    folder, _, file = place.rpartition("/") if "/" in place else ("facts", "", place)
    return f"{folder}/test_{file}.py", function
