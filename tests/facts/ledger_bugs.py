"""The bugs of other implementations, row by row, for `ledger`, which says how to read them."""

# fmt: off

BUGS: dict[str, str] = {
    "B02": "cache",
    "B03": "bugs::test_b03_positions_belong_to_the_row",
    "B06": "cache",
    "B07": "cache",
    "B09": """
        bugs::test_b09_every_backend_sees_the_same_keys
        bugs::test_b09_the_window_backend_sees_the_same_keys_of_interleaved_documents
        bugs::test_b09_the_window_backend_sees_sinks_beside_global_tokens
        bugs::test_b09_the_compiled_backend_sees_the_same_keys""",
    "B10": "bugs::test_b10_a_window_as_long_as_the_row_is_causal",
    "B12": "cache",
    "B13": "cache",
    "B14": "cache",
    "B16": "generation",
    "B17": "generation",
    "B18": "bugs::test_b18_padding_the_source_further_changes_nothing",
    "B19": "cache",
    "B21": "cache",
    "B22": "cache",
    "B23": "cache",
    "B24": "bugs::test_b24_a_row_longer_than_the_table_of_positions_is_refused_by_name generation",
    "B25": "cache",
    "B27": "cache",
    "B29": """
        bugs::test_b29_a_row_that_sees_nothing_gives_zero_and_no_nan_backwards
        bugs::test_b29_the_oracle_and_the_tiled_form_give_zero_too""",
    "B31": "bugs::test_b31_the_future_does_not_leak_by_a_single_bit bugs::test_b31_nor_in_the_oracle",
    "B32": "bugs::test_b32_a_query_at_the_end_sees_the_last_keys cache",
    "B33": """
        bugs::test_b33_a_window_longer_than_the_row_stays_causal
        bugs::test_b33_the_mask_of_a_window_longer_than_the_row_is_causal""",
    "B35": "training",
    "B36": "training",
    "B37": "bugs::test_b37_two_blocks_of_keys_merged_by_their_denominators_are_one training",
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
    "B50": "bugs::test_b50_a_long_row_does_not_change_a_short_one_after_it cache",
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
    "B65": "training",
    "B66": "training",
    "B67": "checkpoint/strict::test_b67_a_copy_of_the_tied_head_is_accepted_if_equal",
    "B69": "checkpoint/strict::test_b69_a_tied_tensor_stays_one_storage training",
    "B71": "checkpoint/strict::test_b71_a_file_cut_short_is_refused_when_it_is_opened",
    "B72": """
        checkpoint/strict::test_b72_a_stray_file_is_not_looked_at
        checkpoint/strict::test_b72_a_stale_index_is_refused""",
    "B73": """
        checkpoint/strict::test_b73_computed_buffers_are_ignored_by_a_named_rule_and_nothing_else_is""",
    "B75": "cli/models::test_b75_rows_that_pad_the_table_are_never_drawn",
    "B76": "checkpoints",
    "B78": "checkpoint/gguf::test_a_head_is_tied_where_it_is_missing_or_a_copy",
    "B80": "checkpoint/gguf_blocks::test_a_row_that_is_not_whole_blocks_is_refused",
    "B81": "checkpoints",
    "B83": "training",
    "B84": """
        text/bugs::test_b84_whitespace_without_a_piece_becomes_byte_tokens
        text/bugs::test_b84_in_the_vocabulary_of_llama_2""",
    "B85": """
        text/bugs::test_b85_a_leading_space_survives
        text/bugs::test_b85_no_spaces_appear_around_control_tokens""",
    "B87": """
        text/bugs::test_b87_no_space_is_put_before_a_text_whose_file_says_so
        text/bugs::test_b87_in_the_files_of_gpt_2""",
    "B89": """
        text/bugs::test_b89_a_newline_is_a_byte_and_the_name_of_a_byte_is_text
        text/bugs::test_b89_in_the_vocabulary_of_llama_2
        text/bugs::test_b89_an_unknown_token_out_of_range_is_refused""",
    "B94": """
        text/bugs::test_b94_word_pieces_are_those_of_the_reference
        text/bugs::test_b94_on_any_text""",
    "B95": """
        text/bugs::test_b95_the_mask_of_roberta_takes_the_space_before_it
        text/bugs::test_b95_in_the_files_of_roberta""",
    "B96": """
        text/bugs::test_b96_the_second_text_of_a_pair_is_segment_1
        text/bugs::test_b96_in_the_vocabulary_of_bert""",
    "B100": "generation",
    "B101": "generation",
    "B104": "generation",
    "B105": "generation",
    "B107": "generation",
    "B110": "generation",
    "B112": "generation",
    "B113": "generation",
    "B115": "training",
    "B118": "training",
    "B119": "training",
    "B120": "training",
    "B123": "training",
    "B126": "evaluation",
    "B127": "evaluation",
    "B128": "training",
    "B130": "server",
    "B134": "server",
    "B135": "server",
}
"""By their numbers."""
