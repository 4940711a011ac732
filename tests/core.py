"""The core tests: a fast selection that executes code of every module of the product (`pytest -m core`).

tests/conftest.py gives the marker `core` to the tests listed here. A name without brackets stands for all parameters of
its test, a name with brackets for one of them; tests/test_core.py fails when an entry matches nothing.
"""

import pytest

CORE: dict[str, tuple[str, ...]] = {
    "tests/generate/test_given_caches.py": ("test_columns_of_a_static_cache_are_those_of_the_text",),
    "tests/generate/test_model_keywords.py": (
        "test_a_keyword_of_the_call_reaches_every_forward[[B, 1, V]-ngram]",
        "test_tensors_with_a_column_per_token_are_sliced_as_plain_decoding_would[ngram-Grown]",
    ),
    "tests/generate/test_options_on_configs.py": (
        "test_a_models_own_config_does_not_break_calls_in_which_another_one_drafts[ngram]",
        "test_a_models_own_config_does_not_break_drafts_of_transformers",
        "test_a_tree_of_a_saved_config_is_drafted[dynamic]",
        "test_seed_and_slots_of_a_saved_config_are_read",
    ),
    "tests/generation/drafters/test_dflash.py": ("test_copies_and_folders",),
    "tests/generation/drafters/test_eagle.py": (
        "test_distributions_of_a_sampled_chain_are_warped_and_stay_in_the_draft_vocabulary",
        "test_transformers_own_assisted_loop_takes_its_chains[1]",
    ),
    "tests/generation/drafters/test_gemma4.py": (
        "test_copies_are_detached_and_may_be_attached[deepcopy]",
        "test_other_folders_are_loaded_as_ever",
    ),
    "tests/generation/drafters/test_head_trees.py": ("test_backbones_that_take_chains_only_say_so",),
    "tests/generation/drafters/test_ngram.py": ("test_a_call_may_ask_for_another_number_of_branches",),
    "tests/generation/drafters/test_p_eagle.py": ("test_options_of_calls",),
    "tests/generation/drafters/test_translation.py": (
        "test_options_of_calls[assistant_confidence_threshold-text]",
        "test_options_of_calls[assistant_confidence_threshold-vocabulary]",
    ),
    "tests/generation/test_continuation.py": (
        "test_positions_of_a_model_with_slots_of_its_own",
        "test_slots_that_ride_along[token_type_ids]",
    ),
    "tests/generation/test_processing.py": (
        "test_mixed_lists[warpers last-one row]",
        "test_unknown_processors_see_all_rows_in_their_order[one row]",
    ),
    "tests/generation/test_recording.py": ("test_own_traffic_teaches_within_its_budget",),
    "tests/generation/test_records.py": ("test_steps_that_were_verified_and_not_kept_are_dropped",),
    "tests/generation/test_replay.py": (
        "test_drafters_of_any_kind_speculate_on_recurrent_backbones[nemotron_h]",
        "test_mixers_that_begin_a_block_without_its_state_decode_plainly",
    ),
    "tests/generation/test_schedule.py": ("test_a_call_begins_with_what_calls_of_its_kind_have_learned",),
    "tests/generation/test_static.py": ("test_one_graph_verifies_the_blocks_of_all_calls[gpt2-chains]",),
    "tests/generation/test_targets.py": ("test_masks_by_hand",),
    "tests/generation/test_tree_choice.py": (
        "test_trials_are_those_of_the_call_and_not_of_the_models_own_config[own0-asked0]",
    ),
    "tests/generation/test_verification.py": ("test_verify_emits_the_targets_distribution[token-random]",),
    "tests/generation/test_vllm_proposer.py": (
        "test_drafts_of_ragged_requests_are_those_of_generate[ff]",
        "test_requests_without_a_token_and_at_their_end_get_no_drafts",
    ),
    "tests/integration/test_enumeration.py": ("test_enumeration_notices_drafts_that_end_by_what_comes_behind",),
    "tests/integration/test_padded_vocabularies.py": ("test_greedy_text_is_the_backbones[42-48]",),
    "tests/integration/test_separate_drafter.py": ("test_greedy_text_is_the_larger_models[mask]",),
    "tests/model_cards/test_bundle.py": ("test_every_form_of_import",),
    "tests/model_cards/test_command.py": (
        "test_a_card_of_a_drafter_needs_no_backbone",
        "test_refusals_are_one_line",
    ),
    "tests/model_cards/test_export.py": (
        "test_every_family_that_is_served[bailing_hybrid]",
        "test_yarn_has_the_older_fields_too",
    ),
    "tests/model_cards/test_export_drafters.py": (
        "test_eagle_heads[1-eagle]",
        "test_what_engines_cannot_run_is_refused_by_name",
    ),
    "tests/model_cards/test_push.py": (
        "test_push_is_one_commit_with_model_tokenizer_card_and_files",
        "test_unchanged_push_makes_no_commit",
    ),
    "tests/model_cards/test_results.py": (
        "test_spread_and_processor_time",
        "test_text_that_repeats_itself_claims_no_speed_up",
    ),
    "tests/modeling/deepseek/test_draft_vocabulary.py": (
        "test_logits_are_the_head_s_of_those_rows_also_once_it_was_trained",
        "test_the_folder_keeps_it_and_forgets_it",
    ),
    "tests/modeling/deepseek/test_families.py": ("test_retrofit_refuses_what_it_cannot_do",),
    "tests/modeling/deepseek/test_float8.py": ("test_what_was_dequantised_is_saved_in_full",),
    "tests/modeling/deepseek/test_losses.py": (
        "test_options_are_checked_and_kept_in_the_folder",
        "test_unrolled_training_counts_every_step_and_checkpoints[sdpa]",
    ),
    "tests/modeling/eagle/test_export.py": (
        "test_every_layout_of_version_3_comes_back[official]",
        "test_new_heads_for_backbones_whose_layers_differ",
        "test_options_of_the_loss_stay_with_a_foreign_folder",
    ),
    "tests/modeling/eagle/test_losses.py": ("test_shifted_labels_say_the_same",),
    "tests/modeling/evabyte/test_cache.py": (
        "test_a_row_that_ended_windows_ago_cannot_be_continued_and_that_is_said",
        "test_reorder_repeat_select_and_reset",
    ),
    "tests/modeling/evabyte/test_draft_layers.py": (
        "test_a_row_that_went_back_leaves_the_cache_of_one_that_never_drafted",
        "test_layers_come_below_stored_heads[ff]",
        "test_what_is_drafted_follows_from_verified_tokens_alone",
    ),
    "tests/modeling/evabyte/test_rows.py": ("test_one_row_of_positions_serves_the_batch",),
    "tests/modeling/evabyte/test_tokenizer.py": ("test_a_saved_folder_names_no_code_files_of_the_folder_read",),
    "tests/modeling/evabyte/test_trees.py": ("test_trees_at_every_offset_in_a_window",),
    "tests/modeling/heads/test_chunks.py": ("test_no_gradients_are_made_where_none_are_wanted",),
    "tests/modeling/heads/test_circuit_head.py": ("test_masked_tokens_are_observed_or_summed_out",),
    "tests/modeling/heads/test_divergences.py": ("test_values",),
    "tests/modeling/heads/test_draft_layers.py": (
        "test_what_is_drafted_follows_from_verified_tokens_alone",
        "test_zero_adapters_are_the_drafter_without_layers[1]",
    ),
    "tests/modeling/heads/test_layer_heads_memory.py": (
        "test_the_same_loss_and_gradients_as_without_recomputation[False-backbone]",
    ),
    "tests/modeling/heads/test_medusa_hydra_layer.py": (
        "test_losses_are_weighed_taught_and_balanced_as_defined",
        "test_weighted_layer_heads_are_the_backbone_with_another_last_layer",
    ),
    "tests/modeling/heads/test_new_family.py": ("test_its_export_is_answered_by_what_it_reads",),
    "tests/modeling/heads/test_official.py": (
        "test_damaged_and_foreign_folders_are_refused_by_name",
        "test_distributions_losses_and_gradients_are_the_authors[hydra_mlp]",
        "test_names_are_the_authors",
    ),
    "tests/modeling/heads/test_sequential_distribution.py": ("test_samples_have_the_distribution",),
    "tests/modeling/ptp/test_backbones_with_adapters.py": (
        "test_adapters_are_kept_and_the_model_is_not_touched[add_adapter, default]",
        "test_what_cannot_be_merged_is_refused_by_name",
    ),
    "tests/modeling/ptp/test_features.py": ("test_beta_placements_have_the_moments_of_beta",),
    "tests/modeling/ptp/test_masked_model.py": ("test_folders_keep_the_distribution[mlp]",),
    "tests/modeling/ptp/test_model.py": ("test_checkpointed_activations_give_the_same_gradients",),
    "tests/modeling/ptp/test_official.py": ("test_folders_that_cannot_be_read[official_binary]",),
    "tests/modeling/test_forward_arguments.py": (
        "test_a_parallel_model_scales_its_loss_as_its_backbone_does",
        "test_shifted_labels_give_the_loss_of_labels[evabyte]",
    ),
    "tests/modeling/test_from_backbone.py": ("test_a_path_will_do[deepseek]",),
    "tests/modeling/test_peft_matrix.py": ("test_an_eagle_head_is_adapted_saved_and_merged[1]",),
    "tests/modeling/test_resizing.py": ("test_padding_to_a_multiple",),
    "tests/modeling/test_saving.py": (
        "test_a_crash_in_the_middle_leaves_nothing_or_what_was_there[evabyte_ff]",
        "test_a_push_carries_the_code_of_models_and_none_of_drafters",
    ),
    "tests/modeling/test_train_mode.py": ("test_attached_heads_on_a_backbone_in_train_mode",),
    "tests/test_cli.py": (
        "test_a_name_that_the_hub_cannot_give[--model]",
        "test_wrong_arguments_are_named_in_one_line[arguments0---seconds: '0' must be a number above 0]",
    ),
    "tests/test_core.py": (
        "test_every_entry_matches_a_fast_test",
        "test_the_list_is_sorted_and_its_files_exist",
    ),
    "tests/test_extending.py": (
        "test_every_public_name_is_there",
        "test_sampled_output_has_the_backbones_distribution[{}]",
    ),
    "tests/test_private_apis.py": ("test_a_missing_name_is_said_with_both_versions",),
    "tests/training/commands/test_analyze.py": (
        "test_drafters_without_distributions_and_rows_that_are_too_short_are_refused",
        "test_the_marginal_of_a_backbone_that_is_its_own_head",
    ),
    "tests/training/commands/test_continued_training.py": ("test_adapters_are_no_backbone",),
    "tests/training/commands/test_file_values.py": ("test_what_a_parser_makes_of_text_is_taken",),
    "tests/training/commands/test_harness.py": ("test_the_class_of_lm_eval_drafts",),
    "tests/training/commands/test_pictures.py": ("test_marginals_that_leave_much_out_are_hollow",),
    "tests/training/commands/test_recipes.py": ("test_an_eagle_head_learns_text_that_its_backbone_wrote",),
    "tests/training/commands/test_refusals.py": ("test_rows_that_cannot_be_learned_are_named[no rows]",),
    "tests/training/demo/test_figures.py": ("test_plain_decoding_stands_on_the_line_of_its_own_speed",),
    "tests/training/demo/test_report.py": (
        "test_a_failed_comparison_is_named",
        "test_only_the_last_lines_of_a_prompt_are_shown",
        "test_text_that_loops_claims_no_speed_up",
    ),
    "tests/training/demo/test_run.py": (
        "test_a_damaged_file_is_named_before_anything_is_measured",
        "test_results_come_with_their_circumstances",
        "test_someone_elses_directory_is_refused_unless_told_otherwise",
        "test_the_demo_shows_outputs_results_and_figures",
    ),
    "tests/training/evaluation/test_bench.py": ("test_a_run_goes_on_where_it_ended", "test_what_pays_is_recommended"),
    "tests/training/evaluation/test_decoding.py": ("test_a_difference_is_found_and_is_no_near_tie",),
    "tests/training/evaluation/test_drafts.py": ("test_an_eagle_head_drafts_what_its_distributions_say[1]",),
    "tests/training/evaluation/test_expected.py": (
        "test_calls_along_a_text_are_those_of_all_the_ways_to_write_it[0-token]",
    ),
    "tests/training/evaluation/test_ranks.py": (
        "test_a_tree_of_measured_accuracies_keeps_more_than_one_of_equal_size_without",
        "test_text_without_targets_is_refused",
    ),
    "tests/training/ptp/test_exactness.py": (
        "test_pieces_of_the_loss_give_what_all_of_it_gives[one_hot-ce]",
        "test_the_default_rate_is_the_trainers_own",
    ),
    "tests/training/ptp/test_masks.py": ("test_micro_batches_give_the_gradient_of_the_whole",),
    "tests/training/ptp/test_mutor.py": (
        "test_the_loss_of_tokens_is_the_plain_loss_bit_for_bit_and_both_weigh_as_said",
    ),
    "tests/training/ptp/test_refusals.py": ("test_documents_begin_where_positions_do_not_go_on",),
    "tests/training/ptp/test_trainer.py": ("test_uninformative_uniforms_are_all_alike",),
    "tests/training/test_acceptance_callback.py": ("test_texts_are_generated_now_and_then[small_model]",),
    "tests/training/test_analysis.py": (
        "test_lens_and_spread_by_definition",
        "test_positions_and_padding",
    ),
    "tests/training/test_box.py": ("test_a_head_that_is_not_there",),
    "tests/training/test_card.py": (
        "test_data_of_this_machine_are_named_without_their_folder",
        "test_heads_name_their_backbone_and_no_folder",
    ),
    "tests/training/test_completion.py": ("test_the_prompt_may_come_through_a_pipe[arguments0]",),
    "tests/training/test_data_validation.py": ("test_a_checkpoint_of_another_model_is_refused[another head]",),
    "tests/training/test_deepseek_training.py": (
        "test_experts_are_balanced_as_the_main_model_does[qwen3_next]",
        "test_resuming_in_the_middle_gives_the_same_model[deepseek_v3]",
    ),
    "tests/training/test_dpo.py": ("test_preferences_and_drafter_learn_together[evabyte]",),
    "tests/training/test_existing_adapters.py": ("test_all_linear_is_what_it_was",),
    "tests/training/test_features.py": (
        "test_refusals",
        "test_rows_come_back_in_order_without_padding",
    ),
    "tests/training/test_online.py": ("test_a_callback_belongs_to_one_trainer",),
    "tests/training/test_regeneration.py": ("test_refusals",),
    "tests/training/test_sft.py": ("test_only_the_assistant_is_learned",),
    "tests/training/test_strategies.py": ("test_in_the_warm_up_only_the_head_learns_and_then_everything",),
    "tests/training/test_web.py": (
        "test_a_drafter_that_does_not_fit_is_named",
        "test_cycles_are_what_speculation_counts",
    ),
}
"""The names of the core tests of each file, both sorted."""

COLLECTED = pytest.StashKey[dict[str, bool]]()
"""Whether each collected test is slow, by node id, before any is deselected."""


def is_core(node: str) -> bool:
    """Return whether a node id ("tests/test_x.py::test_y[z]") is in the list."""
    file, _, name = node.partition("::")
    return not {name, name.partition("[")[0]}.isdisjoint(CORE.get(file, ()))
