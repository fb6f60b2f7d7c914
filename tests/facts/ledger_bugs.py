"""The bugs of other implementations, row by row, for `ledger`, which says how to read them."""

# fmt: off

BUGS: dict[str, str] = {
    "B02": "cache/bugs::test_b02_a_continuation_does_not_depend_on_its_batch_mates",
    "B03": """
        bugs::test_b03_positions_belong_to_the_row cache/bugs::test_b03_positions_belong_to_the_row_in_a_cache_too""",
    "B06": "cache/bugs::test_b06_a_window_is_a_window_in_the_cache",
    "B07": "cache/bugs::test_b07_a_prompt_may_end_near_the_window_or_beyond_it",
    "B09": """
        bugs::test_b09_every_backend_sees_the_same_keys
        bugs::test_b09_the_window_backend_sees_the_same_keys_of_interleaved_documents
        bugs::test_b09_the_window_backend_sees_sinks_beside_global_tokens
        bugs::test_b09_the_compiled_backend_sees_the_same_keys""",
    "B10": "bugs::test_b10_a_window_as_long_as_the_row_is_causal",
    "B12": """
        cache/bugs::test_b12_the_same_prompt_from_a_kept_cache_gives_the_same_four_times
        generation/prefix::test_b12_the_same_prompt_four_times_gives_the_same_four_times""",
    "B13": """
        cache/bugs::test_b13_what_comes_from_a_kept_prefix_is_what_comes_without
        generation/prefix::test_b13_a_hit_is_a_miss""",
    "B14": "cache/bugs::test_b14_pages_of_interleaved_requests_are_read_by_their_tables",
    "B16": """
        cache/bugs::test_b16_beams_take_their_cache_along
        generation/beam::test_b16_b17_a_memory_that_follows_the_beams_changes_nothing""",
    "B17": """
        cache/bugs::test_b17_the_source_goes_along_when_a_row_ends_as_another_splits
        generation/beam::test_b16_b17_a_memory_that_follows_the_beams_changes_nothing""",
    "B18": """
        bugs::test_b18_padding_the_source_further_changes_nothing
        cache/bugs::test_b18_padding_the_source_further_changes_nothing_that_is_stored""",
    "B19": "cache/bugs::test_b19_alibi_of_two_queries_among_twenty_keys",
    "B21": "cache/verbs::test_b21_keys_and_values_are_moved_alike",
    "B22": "cache/bugs::test_b22_shaw_step_by_step_and_several_at_once",
    "B23": "cache/bugs::test_b23_transformer_xl_memories_stand_before_the_segment",
    "B24": """
        bugs::test_b24_a_row_longer_than_the_table_of_positions_is_refused_by_name
        cache/bugs::test_b24_tokens_beyond_the_learned_positions_are_refused_in_a_cache
        generation/loop::test_b24_impossible_requests_are_refused_before_anything_is_computed
        generation/loop::test_b24_the_length_is_what_the_model_has_room_for_and_says_so""",
    "B25": "cache/bugs::test_b25_a_prompt_longer_than_the_window_of_some_layers",
    "B27": "cache/bugs::test_b27_a_prompt_in_two_pieces_is_the_prompt",
    "B29": """
        bugs::test_b29_a_row_that_sees_nothing_gives_zero_and_no_nan_backwards
        bugs::test_b29_the_oracle_and_the_tiled_form_give_zero_too""",
    "B31": "bugs::test_b31_the_future_does_not_leak_by_a_single_bit bugs::test_b31_nor_in_the_oracle",
    "B32": """
        bugs::test_b32_a_query_at_the_end_sees_the_last_keys
        cache/bugs::test_b32_the_newest_query_sees_the_last_keys_of_the_cache""",
    "B33": """
        bugs::test_b33_a_window_longer_than_the_row_stays_causal
        bugs::test_b33_the_mask_of_a_window_longer_than_the_row_is_causal""",
    "B35": "train/parallel/ring::test_b35_five_packed_documents_in_a_ring_of_two",
    "B36": "train/parallel/ring::test_b36_2999_tokens_in_a_ring_of_four",
    "B37": """
        bugs::test_b37_two_blocks_of_keys_merged_by_their_denominators_are_one
        train/parallel/ring::test_b37_causal_across_the_blocks_of_two""",
    "B39": "bugs::test_b39_keys_are_repeated_over_heads_and_not_over_time",
    "B40": "bugs::test_b40_28_heads_over_4_map_7_to_1_and_7_over_2_are_refused",
    "B41": """
        bugs::test_b41_any_length_and_any_number_of_global_tokens bugs::test_b41_the_window_backend_takes_any_length""",
    "B44": "checkpoint/meta::test_becomes_the_hugging_face_folder_to_the_bit",
    "B45": """
        checkpoint/gguf::test_reads_what_a_converter_writes
        checkpoint/gguf::test_writes_what_a_converter_writes""",
    "B46": """
        checkpoint/meta::test_becomes_the_hugging_face_folder_to_the_bit
        checkpoint/gguf::test_heads_in_pairs_are_written_as_they_are""",
    "B48": "bugs::test_b48_positions_stay_exact bugs::test_b48_positions_stay_exact_in_a_bfloat16_model",
    "B50": """
        bugs::test_b50_a_long_row_does_not_change_a_short_one_after_it
        generation/torch_runner::test_b50_a_long_text_does_not_change_a_short_one_after_it""",
    "B51": "bugs::test_b51_dynamic_ntk_base bugs::test_b51_positions_beyond_the_trained_length_need_no_table",
    "B52": "bugs::test_b52_without_scaling_the_scale_is_one",
    "B54": """
        bugs::test_b54_yarn_without_rounding_the_ends_of_the_ramp
        bugs::test_b54_the_attention_factor_multiplies_cosines_and_not_the_exponent""",
    "B58": "bugs::test_b58_alibi_slopes_of_8_heads_start_at_one_half",
    "B59": "bugs::test_b59_a_bias_of_slope_times_key_position_is_the_same_where_attention_is_causal_only",
    "B60": "training",
    "B62": "bugs::test_b62_the_first_real_token_reads_row_2_of_a_table_with_two_rows_more checkpoints",
    "B63": "lens",
    "B64": "lens",
    "B65": """
        train/balance::test_b65_a_uniform_router_costs_the_coefficient
        train/balance::test_b65_an_uneven_router_costs_more_and_has_a_gradient
        train/balance::test_b65_scores_are_summed_over_tokens_not_experts""",
    "B66": "train/balance::test_b66_padding_is_not_counted",
    "B67": "checkpoint/strict::test_b67_a_copy_of_the_tied_head_is_accepted_if_equal",
    "B69": "checkpoint/strict::test_b69_a_tied_tensor_stays_one_storage training",
    "B71": "checkpoint/strict::test_b71_a_file_cut_short_is_refused_when_it_is_opened",
    "B72": """
        checkpoint/strict::test_b72_a_stray_file_is_not_looked_at
        checkpoint/strict::test_b72_a_stale_index_is_refused""",
    "B73": "checkpoint/strict::test_b73_computed_buffers_are_ignored_by_a_named_rule_and_nothing_else_is",
    "B75": "cli/models::test_b75_rows_that_pad_the_table_are_never_drawn",
    "B76": "checkpoint/resize::test_five_tokens_more",
    "B78": "checkpoint/gguf::test_a_head_is_tied_where_it_is_missing_or_a_copy",
    "B80": "checkpoint/gguf_blocks::test_a_row_that_is_not_whole_blocks_is_refused",
    "B81": "checkpoints",
    "B83": "training",
    "B84": """
        text/bugs::test_b84_whitespace_without_a_piece_becomes_byte_tokens
        text/bugs::test_b84_in_the_vocabulary_of_llama_2""",
    "B85": """
        text/bugs::test_b85_a_leading_space_survives text/bugs::test_b85_no_spaces_appear_around_control_tokens""",
    "B87": """
        text/bugs::test_b87_no_space_is_put_before_a_text_whose_file_says_so
        text/bugs::test_b87_in_the_files_of_gpt_2""",
    "B89": """
        text/bugs::test_b89_a_newline_is_a_byte_and_the_name_of_a_byte_is_text
        text/bugs::test_b89_in_the_vocabulary_of_llama_2
        text/bugs::test_b89_an_unknown_token_out_of_range_is_refused""",
    "B94": "text/bugs::test_b94_word_pieces_are_those_of_the_reference text/bugs::test_b94_on_any_text",
    "B95": """
        text/bugs::test_b95_the_mask_of_roberta_takes_the_space_before_it
        text/bugs::test_b95_in_the_files_of_roberta""",
    "B96": """
        text/bugs::test_b96_the_second_text_of_a_pair_is_segment_1 text/bugs::test_b96_in_the_vocabulary_of_bert""",
    "B100": """
        generation/filters::test_b100_equal_tokens_at_the_cut_are_taken_by_id_until_there_are_enough
        generation/filters::test_b100_top_k_takes_exactly_k_and_min_p_all_equals""",
    "B101": "generation/filters::test_b101_each_filter_sees_the_renormalised_survivors_of_the_one_before",
    "B104": """
        generation/beam::test_b104_no_end_comes_before_the_least_length
        generation/loop::test_b104_no_end_before_the_least_number_of_tokens
        generation/sampling::test_b104_ends_are_forbidden_only_while_too_few_tokens_were_generated""",
    "B105": "generation/batch::test_b105_a_row_that_has_ended_gives_and_costs_nothing_more",
    "B107": "generation/beam::test_b107_lengths_count_the_end_and_the_search_stops_with_the_last_beam",
    "B110": "generation/stop::test_b110_a_stop_is_text_and_a_number_is_refused_in_one_line",
    "B112": "generation/speculative::test_b112_greedy_speculation_gives_the_same_tokens",
    "B113": "generation/beam::test_b113_wide_enough_it_is_exhaustive",
    "B115": """
        train/balance::test_b115_parts_have_the_balance_loss_of_the_step
        train/loss::test_b115_any_split_gives_the_same_gradient train/loss::test_b115_the_loss_of_pairs_is_per_row""",
    "B118": "train/objectives::test_b118_special_tokens_and_padding_are_never_chosen",
    "B119": "train/objectives::test_b119_of_those_chosen_80_are_masked_10_random_10_kept",
    "B120": "train/trainer::test_b120_rates_count_optimizer_steps",
    "B123": "train/trainer::test_b123_what_is_clipped_is_the_true_gradient_once",
    "B126": "evaluate/perplexity::test_b126_the_protocol_is_named_and_llama_cpps_can_be_asked_for",
    "B127": "evaluate/translation::test_b127_the_signature_tells_what_makes_figures_incomparable",
    "B128": """
        train/loss::test_b128_the_loss_is_the_log_of_the_perplexity
        evaluate/perplexity::test_b128_perplexity_is_exp_of_the_loss_and_both_are_shifted""",
    "B130": "server",
    "B134": "server generation/constrain::test_b134_what_cannot_be_enforced_is_refused_by_name",
    "B135": "server generation/constrain::test_b135_exactly_the_values_of_the_schema",
}
"""By their numbers."""
