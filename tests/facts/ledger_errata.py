"""The errors of the texts, row by row, for `ledger`, which says how to read them."""

# fmt: off

ERRATA: dict[str, str] = {
    "E01": "attention::test_e01_the_mask_is_chosen_and_never_multiplied",
    "E02": "rotary::test_e02_goldens_of_both_layouts",
    "E03": "positions::test_e03_sinusoid_frequencies_fall",
    "E04": "rotary_scaling::test_e04_yarn_keeps_fast_pairs_and_interpolates_slow_ones",
    "E05": "rotary_scaling::test_e05_llama_3_scales_nothing_and_3_1_by_wavelength",
    "E06": "models::test_e06_and_e07_mistral_and_qwen_2_were_trained_without_yarn",
    "E07": "models::test_e06_and_e07_mistral_and_qwen_2_were_trained_without_yarn",
    "E08": "models::test_e08_llama_2_long_has_a_larger_base_and_no_interpolation",
    "E09": "rotary_scaling::test_e09_the_alpha_formula_does_not_give_code_llamas_theta",
    "E10": "rotary::test_e10_the_last_frequency_is_base_to_minus_d_minus_2_over_d",
    "E11": "models::test_e11_heads_are_128_wide_in_every_llama_1_and_2",
    "E12": "rotary::test_e12_frequencies_are_rounded_not_cut",
    "E13": "rotary::test_e13_angles_are_radians",
    "E14": "heads::test_e14_e42_which_llamas_group_their_keys",
    "E15": "models::test_e15_only_llama_3_has_a_larger_vocabulary",
    "E16": "models::test_e16_bert_is_post_norm",
    "E17": "models::test_e17_gpt_1_is_post_norm_and_gpt_2_and_3_are_pre_norm_with_a_final_norm",
    "E18": "models::test_e18_xavier_he_and_the_constant_of_gpt_2",
    "E19": "attention::test_e19_it_finds_itself",
    "E20": """
        attention::test_e20_scores_are_symmetric_only_where_queries_are_keys
        attention::test_e20_attention_is_equivariant_and_not_invariant""",
    "E21": "positions::test_e21_equal_inner_products_are_stationarity_and_hold_for_minus_k",
    "E22": "positions::test_e22_sinusoids_are_defined_at_every_length_and_learned_tables_are_not lab",
    "E23": "lab",
    "E24": "rotary::test_e24_equal_offset_equal_score_but_not_equal_weight",
    "E25": """
        rotary::test_e25_decay_with_distance_is_a_bound_only
        rotary::test_e25_the_score_of_ones_is_the_sum_of_cosines""",
    "E26": "rotary::test_e26_chatglm_turns_half_of_each_head rotary::test_e26_deepseek_turns_a_part_of_its_own",
    "E27": "sizes::test_e27_swiglu_has_three_matrices_of_8_thirds_d_and_untied_models_two_of_v_d",
    "E28": "models::test_e28_gpt_3_small_is_gpt_2_small_with_2048_positions",
    "E29": """
        sizes::test_e29_the_exact_count_of_mini_gpt_and_of_gpt_3
        sizes::test_e29_gradients_by_hand_equal_those_of_the_model""",
    "E30": """
        attention::test_e30_minus_1e9_is_minus_infinity_in_float16_and_our_masks_do_not_use_it
        attention::test_e30_a_row_that_sees_nothing_is_zero_and_not_uniform""",
    "E31": "heads::test_e31_attention_across_two_sequences_exists",
    "E32": """
        stacks::test_e32_rotary_positions_are_really_applied
        stacks::test_e32_the_model_runs_and_every_gradient_is_finite
        stacks::test_e32_positions_follow_the_tokens_device""",
    "E33": """
        attention::test_e33_one_type_of_mask_and_both_of_pytorchs_conventions
        attention::test_e33_an_additive_mask_is_refused_where_a_boolean_one_is_meant""",
    "E34": "norms::test_e34_with_without_and_only_the_residual",
    "E35": """
        attention::test_e35_keys_and_values_depend_on_their_token_alone_in_the_first_layer_only
        attention::test_e35_a_layer_never_depends_on_later_tokens""",
    "E36": "lab/cache::test_n_tokens_take_n_rows_with_a_cache_and_half_n_squared_without",
    "E37": "plan/cache::test_published_models_in_16_bits plan/cache::test_rows_element_size_and_source_multiply",
    "E38": "lab/cache::test_n_tokens_take_n_rows_with_a_cache_and_half_n_squared_without planner",
    "E39": """
        sparse::test_e39_a_causal_window_counts_the_query_and_longformers_has_half_on_each_side
        sparse::test_e39_sparse_patterns_of_a_causal_model_stay_causal""",
    "E40": "flash::test_e40_a_layer_costs_24_n_d2_and_4_n2_d flash::test_e40_scores_are_stored_per_head planner",
    "E41": """
        flash::test_e41_the_backend_depends_on_the_call_and_none_is_taken_in_silence
        flash::test_e41_the_backward_pass_computes_the_scores_again""",
    "E42": "heads::test_e14_e42_which_llamas_group_their_keys",
    "E43": "training",
    "E44": """
        norms::test_e44_post_norm_gradients_do_not_depend_on_depth_and_pre_norm_ones_shrink
        norms::test_e44_post_norm_gradients_are_the_larger_ones""",
    "E45": """
        norms::test_e45_one_layer_norm_jacobian_multiplies_both_branches
        norms::test_e45_pre_norm_leaves_the_residual_path_without_a_jacobian""",
    "E46": "norms::test_e46_rms_norm_does_not_centre",
    "E47": "attention::test_e47_attention_is_linear_in_values_and_not_in_its_input",
    "E48": "attention::test_e48_the_largest_of_ten_weights",
    "E49": "heads::test_e49_products_do_not_depend_on_the_number_of_heads_and_scores_do",
    "E50": "documents",
    "E51": "relative::test_e51_shaw_and_transformer_xl_are_two_methods",
    "E52": "relative::test_e52_alibi_slopes_of_head_counts_that_are_no_power_of_two",
    "E53": "models::test_e53_some_llamas_are_tied",
    "E54": "models::test_e54_who_has_biases",
    "E55": "training",
    "E56": "models::test_claude_gpt_4_and_e56_no_preset_of_unpublished_models",
    "E57": "models::test_e57_the_rounded_65m_depends_on_vocabulary_and_biases",
    "E58": "sizes::test_e58_depth_and_vocabulary_are_habits",
    "E59": """
        rotary::test_e59_rotary_tables_are_not_saved_and_have_no_end
        rotary::test_e59_a_model_trained_on_4_positions_runs_on_40""",
    "E60": """
        stacks::test_e60_token_vectors_are_multiplied_by_the_root_of_d_model
        stacks::test_e60_dropout_stands_after_sublayers_and_embeddings
        generation/beam::test_b113_wide_enough_it_is_exhaustive training""",
    "E61": "attention::test_e61_position_i_sees_0_to_i",
    "E62": "rotary::test_e62_a_larger_base_leaves_the_first_pair_and_slows_the_others",
    "E63": "positions::test_e63_the_index_of_the_pairs_runs_to_255",
    "E64": "documents",
    "E65": "seeds/s1_listings::test_e65_and_e48_distribution_of_the_demo_over_40_000_draws",
    "E66": "stacks::test_e66_the_decoder_embeds_its_own_input",
    "E67": "lens",
    "E68": "documents",
    "E69": "attention::test_e69_two_causal_layers_see_the_order_of_earlier_tokens",
    "E70": "heads::test_e70_heads_need_not_fill_the_model heads::test_e70_a_model_whose_heads_are_wider_runs",
    "E71": "sizes::test_e71_d_ff_is_8_thirds_of_d_only_in_some",
    "E72": "benchmarks",
}
"""What the texts say wrongly."""

VERIFIED: dict[str, str] = {
    "√d_k argument": "attention::test_why_sqrt_d_k_variance",
    "d_ff 11008/28672/53248 and all five S0 config rows": """
        counts::test_llama_d_ff_in_general sizes::test_hyperparameter_rules_config_table""",
    "GELU-tanh": "sizes::test_feed_forward_gelu_by_tanh_and_by_erf",
    "MHA 1,048,576": "heads::test_multi_head_attention_has_1048576_parameters",
    "FFN ≈ 2.1M": "sizes::test_feed_forward_of_512_and_2048_has_2099712_parameters",
    "PI and NTK formulas": """
        rotary_scaling::test_rope_scaling_position_interpolation_divides_every_frequency
        rotary_scaling::test_rope_scaling_ntk_aware_base""",
    "Llama 3 θ=500k, Qwen2 θ=1e6": "rotary::test_rope_base_table",
    "2·FFN:1·attention split 67 %": "sizes::test_parameter_split_two_thirds_are_feed_forward",
    "4K→16K = 16×": "flash::test_complexity_four_times_the_context_is_sixteen_times_the_scores",
    "PaLM MQA": "models::test_palm",
    "BLOOM ALiBi": "models::test_bloom relative::test_bloom_alibi_bias_is_minus_slope_times_distance",
    "RoPE 2-D, block-diagonal, complex derivations": "rotary::test_rope_five_forms_agree",
    "SwiGLU and RMSNorm formulas": """
        sizes::test_feed_forward_swiglu_has_three_matrices norms::test_layer_norm_and_rms_norm_are_their_formulas""",
    "2.0 GiB KV": "plan/cache::test_published_models_in_16_bits",
}
"""What they have right, and nobody should mend."""
