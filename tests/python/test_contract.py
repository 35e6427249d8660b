"""The contract with users of the published documentation: which test holds which promise.

The numbers are rows of the contract. Section 0: where two versions of the documentation disagree;
1: the package; 2: workspaces and branches; 3: processes and limits; 4: patterns and their results;
5: exceptions; 6: the command. Section 7 (image and wrapper) is held by tests/docker, section 8
(what the file system says on the wire) by test_published.py.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted

import branching
from branching import BeamSearch, Speculate, SpeculationOutcome, SpeculationResult, Workspace

HERE = Path(__file__).parent

PROMISED = {
    0: range(1, 11),
    1: range(1, 9),
    2: range(1, 20),
    3: range(1, 20),
    4: [*range(1, 9), *range(10, 28), *range(30, 34)],
    6: [
        *range(1, 8),
        *range(10, 16),
        *range(20, 23),
        *range(30, 35),
        *range(40, 44),
        50,
        *range(60, 64),
    ],
}
"""The rows of each section. Section 5 is one row, the tree."""

NOT_YET: set[str] = set()
"""Rows of what is still to be built."""

ROWS = {
    "0.1": [
        "test_best_of_n.py::test_a_list_of_candidates_is_tried_once_each",
        "test_best_of_n.py::test_one_task_is_tried_n_times",
        "test_best_of_n.py::test_what_makes_no_sense_is_refused",
    ],
    "0.2": [
        "test_tournament.py::test_one_task_plays_n_times",
    ],
    "0.3": [
        "test_isolated.py::test_every_pattern_takes_it",
        "test_speculate.py::test_what_makes_no_sense_or_cannot_be_honoured_is_refused",
        "test_contract.py::test_each_pattern_takes_all_options",
    ],
    "0.4": [
        "test_speculate.py::test_closures_and_lambdas_keep_their_mutations",
        "test_context.py::TestWhatReachesIt::test_what_it_changes_stays_there",
    ],
    "0.5": [
        "test_contract.py::test_the_backend_is_found_and_told_by_fstype",
    ],
    "0.6": [
        "test_workspace.py::test_the_backend_is_found_by_itself",
    ],
    "0.7": [
        "test_package.py::test_the_metadata_is_as_published",
        "../docker/test_image.py::test_the_image_has_what_commands_need_and_nothing_to_build_with",
    ],
    "0.8": [
        "test_options.py::test_it_commits_one_success_and_leaves_no_branch",
    ],
    "0.9": [
        "test_workspace.py::test_a_child_commits_into_its_parent",
    ],
    "0.10": [
        "../docker/test_image.py::test_the_documented_line_works_as_it_stands",
    ],
    "1.1": [
        "test_package.py::test_the_metadata_is_as_published",
        "test_package.py::test_the_version_is_the_distributions",
    ],
    "1.2": [
        "test_package.py::test_the_metadata_is_as_published",
    ],
    "1.3": [
        "test_package.py::test_the_library_imports_nothing_from_outside",
        "test_package.py::test_the_metadata_is_as_published",
    ],
    "1.4": [
        "test_package.py::test_the_metadata_is_as_published",
    ],
    "1.5": [
        "test_package.py::test_a_name_loads_its_own_layer_only",
        "test_package.py::test_importing_the_package_loads_nothing_beside_it",
    ],
    "1.6": [
        "test_package.py::test_every_public_name_resolves_and_the_list_is_sorted",
        "test_package.py::test_all_names_of_the_published_package_are_there",
    ],
    "1.7": [
        "test_package.py::test_an_unknown_name_is_an_attribute_error",
    ],
    "1.8": [
        "test_package.py::test_the_metadata_is_as_published",
    ],
    "2.1": [
        "test_workspace.py::test_the_backend_is_found_by_itself",
    ],
    "2.2": [
        "test_workspace.py::test_a_path_deep_inside_the_mount_opens_the_workspace",
        "test_workspace.py::test_a_workspace_opened_in_a_branch_stands_for_that_branch",
    ],
    "2.3": [
        "test_workspace.py::test_a_path_outside_any_mount_is_an_error_that_tells_what_to_do",
    ],
    "2.4": [
        "test_workspace.py::test_the_backend_is_found_by_itself",
    ],
    "2.5": [
        "test_workspace.py::test_a_clean_exit_commits",
    ],
    "2.6": [
        "test_workspace.py::test_none_leaves_the_branch_open",
        "test_workspace.py::test_other_ends_are_refused",
    ],
    "2.7": [
        "test_workspace.py::test_a_clean_exit_commits",
        "test_workspace.py::test_an_exception_aborts_and_goes_on",
    ],
    "2.8": [
        "test_workspace.py::test_none_leaves_the_branch_open",
    ],
    "2.9": [
        "test_workspace.py::test_a_child_commits_into_its_parent",
        "test_workspace.py::test_a_workspace_opened_in_a_branch_stands_for_that_branch",
        "test_workspace.py::test_the_name_is_the_name",
    ],
    "2.10": [
        "test_workspace.py::test_ending_twice_does_nothing",
    ],
    "2.11": [
        "test_workspace.py::test_a_branch_is_made_by_with_and_not_before",
    ],
    "2.12": [
        "test_workspace.py::test_a_child_commits_into_its_parent",
        "test_workspace.py::test_a_clean_exit_commits",
    ],
    "2.13": [
        "test_workspace.py::test_a_clean_exit_commits",
        "test_workspace.py::test_an_exception_aborts_and_goes_on",
    ],
    "2.14": [
        "test_workspace.py::test_the_name_is_the_name",
    ],
    "2.15": [
        "test_workspace.py::test_the_first_sibling_wins_and_the_second_is_told",
    ],
    "2.16": [
        "test_workspace.py::test_a_stale_branch_has_no_files_and_no_children",
    ],
    "2.17": [
        "test_cli.py::TestStatus::test_it_lists_the_branches_by_name",
        "test_cli.py::TestRun::test_the_name_is_the_users",
        "test_workspace.py::test_the_name_is_the_name",
    ],
    "2.18": [
        "test_contract.py::test_branches_cost_the_same_whatever_the_size",
    ],
    "2.19": [
        "test_on_demand.py::TestMount::test_failures_are_mount_errors_and_leave_nothing",
        "test_on_demand.py::TestMount::test_it_mounts_in_a_directory_of_its_own",
        "test_on_demand.py::TestMount::test_it_takes_the_options_of_the_published_package",
    ],
    "3.1": [
        "test_context.py::TestPublishedBehaviour::test_the_published_options_are_taken",
        "test_context.py::TestWhatReachesIt::test_a_file_object_over_a_pipe_is_passed_on_unless_closed",
        "test_contract.py::test_a_branch_context_takes_what_the_contract_has",
    ],
    "3.2": [
        "test_context.py::TestPublishedBehaviour::test_the_published_options_are_taken",
        "test_contract.py::test_a_branch_context_takes_what_the_contract_has",
    ],
    "3.3": [
        "test_context.py::TestPublishedBehaviour::test_returning_is_success",
        "test_context.py::TestPublishedBehaviour::test_raising_is_failure_and_comes_home_typed",
        "test_context.py::TestPublishedBehaviour::test_system_exit_sets_the_exit_code",
    ],
    "3.4": [
        "test_context.py::TestPublishedBehaviour::test_returning_is_success",
        "test_context.py::TestPublishedBehaviour::test_leaving_the_with_ends_it",
    ],
    "3.5": [
        "test_context.py::TestInABranch::test_the_target_is_given_the_workspaces_path",
        "test_context.py::TestInABranch::test_nobody_needs_to_be_root",
    ],
    "3.6": [
        "test_context.py::TestPublishedBehaviour::test_a_workspace_that_is_not_there_is_an_error",
        "test_sandbox.py::TestFailures::test_a_machine_without_namespaces_is_told_what_to_do",
        "test_sandbox.py::TestFailures::test_a_step_that_fails_is_named",
    ],
    "3.7": [
        "test_context.py::TestPublishedBehaviour::test_before_the_start_it_has_no_pid",
        "test_context.py::TestPublishedBehaviour::test_the_pid_is_the_targets",
    ],
    "3.8": [
        "test_context.py::TestPublishedBehaviour::test_wait_can_time_out_and_be_repeated",
        "test_context.py::TestPublishedBehaviour::test_raising_is_failure_and_comes_home_typed",
    ],
    "3.9": [
        "test_context.py::TestPublishedBehaviour::test_abort_lets_it_tidy_up_first",
        "test_context.py::TestPublishedBehaviour::test_abort_ends_what_does_not_listen",
        "test_escape.py::TestLife::test_double_forks_and_sessions_of_their_own_die",
    ],
    "3.10": [
        "test_context.py::TestPublishedBehaviour::test_create_starts_one_for_each",
        "test_context.py::TestPublishedBehaviour::test_as_many_workspaces_as_targets",
    ],
    "3.11": [
        "test_context.py::TestWhatReachesIt::test_what_cannot_be_copied_is_named",
        "test_command.py::test_a_directory_that_is_gone_is_our_failure_and_not_the_programs",
    ],
    "3.12": [
        "test_limits.py::test_without_arguments_nothing_is_limited",
        "test_limits.py::test_limits_are_frozen_and_equal_by_value",
        "test_limits_enforced.py::test_cpu_time_is_a_share_of_the_wall_clock",
        "test_limits_enforced.py::test_what_uses_too_much_memory_is_killed",
    ],
    "3.13": [
        "test_limits.py::test_without_arguments_nothing_is_limited",
        "test_limits_enforced.py::test_with_oom_group_all_processes_die_together",
    ],
    "3.14": [
        "test_limits_enforced.py::test_a_limit_takes_hold_before_the_program_runs",
        "test_context.py::TestLimits::test_memory",
    ],
    "3.15": [
        "test_limits_of_commands.py::TestRun::test_a_hog_is_killed_and_nothing_of_it_committed",
        "test_isolated.py::test_every_pattern_takes_it",
        "test_speculate.py::test_what_makes_no_sense_or_cannot_be_honoured_is_refused",
    ],
    "3.16": [
        "test_isolated.py::test_every_pattern_takes_it",
        "test_contract.py::test_each_pattern_takes_all_options",
    ],
    "3.17": [
        "test_context.py::TestPublishedBehaviour::test_the_published_options_are_taken",
        "test_isolated.py::test_every_pattern_takes_it",
    ],
    "3.18": [
        "test_limits_of_commands.py::TestSearches::test_all_candidates_share_the_groups_limit",
        "test_isolated.py::test_every_pattern_takes_it",
    ],
    "3.19": [
        "test_limits.py::test_a_size_counts_by_1024",
        "test_limits.py::test_what_is_no_size_is_an_error",
    ],
    "4.1": [
        "test_contract.py::test_constructors_take_what_the_contract_has",
        "test_contract.py::test_each_pattern_takes_all_options",
    ],
    "4.2": [
        "test_contract.py::test_constructors_take_what_the_contract_has",
        "test_contract.py::test_each_pattern_takes_all_options",
    ],
    "4.3": [
        "test_contract.py::test_constructors_take_what_the_contract_has",
        "test_contract.py::test_each_pattern_takes_all_options",
    ],
    "4.4": [
        "test_contract.py::test_constructors_take_what_the_contract_has",
        "test_contract.py::test_each_pattern_takes_all_options",
    ],
    "4.5": [
        "test_contract.py::test_constructors_take_what_the_contract_has",
        "test_contract.py::test_each_pattern_takes_all_options",
    ],
    "4.6": [
        "test_contract.py::test_constructors_take_what_the_contract_has",
        "test_contract.py::test_each_pattern_takes_all_options",
    ],
    "4.7": [
        "test_contract.py::test_constructors_take_what_the_contract_has",
        "test_contract.py::test_each_pattern_takes_all_options",
    ],
    "4.8": [
        "test_options.py::test_a_runner_runs_the_candidates_elsewhere",
    ],
    "4.10": [
        "test_speculate.py::test_the_first_success_is_committed_and_nothing_else",
    ],
    "4.11": [
        "test_speculate.py::test_first_wins_false_runs_all_and_takes_the_first_in_order",
    ],
    "4.12": [
        "test_runner.py::test_commands_that_lose_are_killed_before_the_call_returns",
        "test_speculate.py::test_the_first_success_is_committed_and_nothing_else",
        "test_speculate.py::test_the_winners_latency_is_its_own",
        "test_isolated.py::test_losers_are_killed_though_they_are_functions",
    ],
    "4.13": [
        "test_speculate.py::test_the_timeout_ends_the_call",
        "test_speculate.py::test_the_timeout_is_for_the_whole_call_and_not_shared_out",
    ],
    "4.14": [
        "test_speculate.py::test_max_parallel_is_the_most_that_run_at_once",
    ],
    "4.15": [
        "test_best_of_n.py::test_a_list_of_candidates_is_tried_once_each",
        "test_best_of_n.py::test_one_task_is_tried_n_times",
    ],
    "4.16": [
        "test_best_of_n.py::test_a_score_is_evaluates_or_its_own_or_the_lists_or_one",
    ],
    "4.17": [
        "test_best_of_n.py::test_the_timeout_stops_the_wait_and_the_best_so_far_is_committed",
        "test_isolated.py::test_the_timeout_kills_functions",
        "test_tree_of_thoughts.py::test_the_timeout_takes_the_best_of_the_level_it_interrupts",
        "test_beam_search.py::test_the_timeout_takes_the_best_of_the_level_it_interrupts",
        "test_tournament.py::test_a_judge_that_hangs_does_not_outlast_the_timeout",
    ],
    "4.18": [
        "test_reflexion.py::test_feedback_goes_from_the_critique_to_the_next_attempt",
        "test_reflexion.py::test_max_retries_is_the_number_of_attempts",
    ],
    "4.19": [
        "test_reflexion.py::test_a_critique_that_raises_gives_no_feedback_and_a_log_entry",
        "test_reflexion.py::test_feedback_goes_from_the_critique_to_the_next_attempt",
    ],
    "4.20": [
        "test_tree_of_thoughts.py::test_one_level_commits_the_best",
        "test_tree_of_thoughts.py::test_each_level_starts_from_the_winner_of_the_one_before",
        "test_tree_of_thoughts.py::test_a_level_without_a_winner_drops_everything",
    ],
    "4.21": [
        "test_beam_search.py::test_only_the_beams_are_expanded_and_in_their_own_branches",
        "test_beam_search.py::test_all_of_a_level_are_ranked_together",
        "test_beam_search.py::test_the_weaker_beam_can_win_and_brings_all_it_is_built_on",
    ],
    "4.22": [
        "test_tournament.py::test_the_strongest_is_left",
        "test_tournament.py::test_failures_do_not_play",
        "test_tournament.py::test_a_sole_survivor_wins_unjudged",
    ],
    "4.23": [
        "test_beam_search.py::test_an_expand_that_raises_ends_the_call_cleanly",
        "test_best_of_n.py::test_a_slow_evaluate_does_not_outlast_the_timeout",
        "test_best_of_n.py::test_an_evaluate_that_raises_ends_the_call_cleanly",
        "test_tournament.py::test_a_judge_that_raises_ends_the_call_cleanly",
        "test_tree_of_thoughts.py::test_an_expand_that_raises_ends_the_call_cleanly",
    ],
    "4.24": [
        "test_cascaded.py::test_waves_widen_and_hear_of_all_failures_before",
        "test_cascaded.py::test_empty_errors_are_dropped_and_exceptions_are_errors",
        "test_cascaded.py::test_the_first_wave_is_enough",
    ],
    "4.25": [
        "test_best_of_n.py::test_no_success_commits_nothing",
        "test_cascaded.py::test_all_waves_may_fail",
        "test_reflexion.py::test_max_retries_is_the_number_of_attempts",
        "test_speculate.py::test_no_success_changes_nothing",
        "test_tree_of_thoughts.py::test_a_level_without_a_winner_drops_everything",
        "test_beam_search.py::test_a_level_without_success_drops_everything",
        "test_tournament.py::test_a_sole_survivor_wins_unjudged",
    ],
    "4.26": [
        "test_speculate.py::test_closures_and_lambdas_keep_their_mutations",
    ],
    "4.27": [
        "test_reflexion.py::test_a_task_that_raises_is_a_failed_attempt",
        "test_speculate.py::test_no_success_changes_nothing",
    ],
    "4.30": [
        "test_contract.py::test_results_have_the_contracts_fields",
    ],
    "4.31": [
        "test_speculate.py::test_return_values_come_back_as_they_are",
    ],
    "4.32": [
        "test_speculate.py::test_return_values_come_back_as_they_are",
        "test_isolated.py::test_closures_reach_it_and_values_come_back",
        "test_context.py::TestWhatComesHome::test_values_come_back_as_they_are",
        "test_context.py::TestWhatComesHome::test_any_size",
    ],
    "4.33": [
        "test_contract.py::test_the_winner_is_one_of_all_results",
    ],
    "5": [
        "test_errors.py::test_each_exception_has_its_published_parent",
    ],
    "6.1": [
        "test_cli.py::TestCommon::test_without_a_command_it_shows_the_help",
    ],
    "6.2": [
        "test_cli.py::TestCommon::test_the_workspace_is_found_from_below_and_by_option",
        "test_manual.py::test_every_command_takes_a_workspace",
    ],
    "6.3": [
        "test_cli.py::TestRun::test_json_is_alone_on_stdout",
        "test_manual.py::test_every_command_that_has_no_other_output_has_a_document",
        "test_output_schema.py::test_every_document_is_as_it_says",
    ],
    "6.4": [
        "test_cli.py::TestRun::test_a_signal_ends_everything",
        "test_cli.py::TestCommon::test_a_wrong_call_exits_with_2_and_does_nothing",
        "test_cli.py::TestCommon::test_a_missing_workspace_has_the_published_message",
        "test_cli.py::TestCommon::test_without_a_command_it_shows_the_help",
    ],
    "6.5": [
        "test_cli.py::TestCommon::test_a_missing_workspace_has_the_published_message",
    ],
    "6.6": [
        "test_cli.py::TestRun::test_the_first_dashes_end_our_options_and_are_optional",
    ],
    "6.7": [
        "test_cli.py::TestCommon::test_a_wrong_call_exits_with_2_and_does_nothing",
        "test_cli.py::TestCommon::test_a_missing_command_has_the_published_message",
    ],
    "6.10": [
        "test_cli.py::TestRun::test_failure_aborts_with_the_commands_own_code",
        "test_cli.py::TestRun::test_success_commits",
    ],
    "6.11": [
        "test_cli.py::TestRun::test_failure_aborts_with_the_commands_own_code",
        "test_command.py::test_a_program_that_cannot_be_executed_ends_with_126",
        "test_command.py::test_a_program_that_is_not_there_ends_with_127",
        "test_command.py::test_the_exit_code_is_the_shells",
    ],
    "6.12": [
        "test_cli.py::TestRun::test_success_commits",
    ],
    "6.13": [
        "test_cli.py::TestRun::test_the_end_of_the_branch_can_be_chosen",
    ],
    "6.14": [
        "test_cli.py::TestOnATerminal::test_ask_commits_on_yes_only",
    ],
    "6.15": [
        "test_cli.py::TestRun::test_json_is_alone_on_stdout",
        "test_cli.py::TestRun::test_success_commits",
    ],
    "6.20": [
        "test_cli.py::TestSpeculate::test_the_first_success_is_committed",
    ],
    "6.21": [
        "test_cli.py::TestSpeculate::test_its_document",
        "test_cli.py::TestSpeculate::test_no_success_exits_with_1",
    ],
    "6.22": [
        "test_cli.py::TestSpeculate::test_no_success_exits_with_1",
        "test_cli.py::TestSpeculate::test_the_first_success_is_committed",
    ],
    "6.30": [
        "test_cli.py::TestBestOfN::test_the_best_success_is_committed",
    ],
    "6.31": [
        "test_cli.py::TestBestOfN::test_its_document",
        "test_cli.py::TestBestOfN::test_the_best_success_is_committed",
        "test_command.py::test_the_score_is_what_was_written_to_descriptor_3",
        "test_command.py::test_the_score_wrapper_keeps_arguments_and_exit_codes",
        "test_runner.py::TestProgram::test_the_score_is_the_last_line_if_it_is_a_number",
    ],
    "6.32": [
        "test_cli.py::TestBestOfN::test_the_best_success_is_committed",
        "test_runner.py::TestProgram::test_it_tells_the_command_where_it_is",
    ],
    "6.33": [
        "test_cli.py::TestBestOfN::test_its_document",
        "test_cli.py::TestBestOfN::test_the_best_success_is_committed",
    ],
    "6.34": [
        "test_cli.py::TestBestOfN::test_no_success_is_said",
        "test_cli.py::TestBestOfN::test_the_best_success_is_committed",
    ],
    "6.40": [
        "test_cli.py::TestReflexion::test_it_learns",
    ],
    "6.41": [
        "test_cli.py::TestReflexion::test_it_learns",
        "test_runner.py::TestProgram::test_it_tells_the_command_where_it_is",
    ],
    "6.42": [
        "test_cli.py::TestReflexion::test_it_learns",
        "test_cli.py::TestReflexion::test_its_document",
    ],
    "6.43": [
        "test_cli.py::TestReflexion::test_all_failed_is_said",
        "test_cli.py::TestReflexion::test_it_learns",
    ],
    "6.50": [
        "test_cli.py::TestStatus::test_it_lists_the_branches_by_name",
    ],
    "6.60": [
        "test_limits_of_commands.py::TestRun::test_a_hog_is_killed_and_nothing_of_it_committed",
        "test_limits_of_commands.py::TestRun::test_cpu_time_is_shared_out",
        "test_limits_of_commands.py::test_the_commands_have_the_limits",
    ],
    "6.61": [
        "test_limits_of_commands.py::TestRun::test_what_stays_below_is_committed",
        "test_limits_of_commands.py::test_the_commands_have_the_limits",
    ],
    "6.62": [
        "test_limits_of_commands.py::TestSearches::test_all_candidates_share_the_groups_limit",
        "test_limits_of_commands.py::test_the_commands_have_the_limits",
    ],
    "6.63": [
        "test_cli.py::TestCommon::test_it_tells_its_version",
    ],
}

OPTIONS = {
    "isolate_processes": False,
    "resource_limits": None,
    "group_limits": None,
    "max_parallel": None,
    "commit": True,
    "runner": None,
    "on_event": None,
}
"""What each of the seven takes besides its own."""

CONSTRUCTORS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "Speculate": (["candidates"], {"first_wins": True, "timeout": None}),
    "BestOfN": (
        ["candidates_or_task", "n"],
        {"scores": None, "evaluate": None, "timeout": None},
    ),
    "Reflexion": (["task"], {"max_retries": 3, "critique": None}),
    "TreeOfThoughts": (
        ["strategies"],
        {"evaluate": None, "expand": None, "max_depth": 1, "timeout": None},
    ),
    "BeamSearch": (
        ["strategies"],
        {
            "expand": inspect.Parameter.empty,
            "evaluate": None,
            "beam_width": 3,
            "max_depth": 2,
            "timeout": None,
        },
    ),
    "Tournament": (
        ["candidates_or_task", "n"],
        {"judge": inspect.Parameter.empty, "timeout": None},
    ),
    "Cascaded": (["task"], {"fan_out": (1, 2, 4), "timeout": None, "wave_timeout": None}),
}


def names_of_tests(file: Path) -> set[str]:
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{method.name}"
                for method in node.body
                if isinstance(method, ast.FunctionDef)
            }
    return found


def test_every_row_has_a_test() -> None:
    rows = [f"{section}.{row}" for section, rows in PROMISED.items() for row in rows]
    assert set(ROWS) | NOT_YET == {*rows, "5"}
    assert all(ROWS.values())


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row: str) -> None:
    for name in ROWS[row]:
        file, _, test = name.partition("::")
        assert test in names_of_tests(HERE / file), name


def test_the_backend_is_found_and_told_by_fstype(mount: Mounted) -> None:
    """0.5, 0.6"""
    space = Workspace(mount.root)
    assert space.fstype in ("branchfs", "overlay", "daxfs")
    space.close()


def test_branches_cost_the_same_whatever_the_size(real: Mounted) -> None:
    """2.18, S1: the store grows by the same for a workspace of one file and of a thousand, and an
    abort leaves nothing."""
    store = real.base / ".branching"

    def grown() -> int:
        before = sum(1 for _ in store.rglob("*"))
        with Workspace(real.root) as space, space.branch("b", on_success=None) as branch:
            after = sum(1 for _ in store.rglob("*"))
            branch.abort()
        return after - before

    few = grown()
    for number in range(1_000):
        (real.base / f"file-{number}").write_text("x")
    assert grown() == few


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_take_what_the_contract_has(name: str) -> None:
    """4.1-4.8, 0.3, 3.16, 3.18"""
    positional, keywords = CONSTRUCTORS[name]
    signature = inspect.signature(getattr(branching, name)).parameters
    plain = inspect.signature(branching.patterns.pattern.Pattern).parameters
    for parameter in positional:
        assert signature[parameter].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter, default in keywords.items():
        if parameter != "max_retries":
            assert signature[parameter].kind is inspect.Parameter.KEYWORD_ONLY
        assert signature[parameter].default == default
    for parameter, default in OPTIONS.items():
        assert plain[parameter].default == default


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_each_pattern_takes_all_options(name: str) -> None:
    """0.3, 3.16, 3.18, 4.1-4.8: and none that it does not know."""
    first: Any = print if name in ("Reflexion", "Cascaded") else [print]
    needed = {
        parameter: print
        for parameter, default in CONSTRUCTORS[name][1].items()
        if default is inspect.Parameter.empty
    }
    pattern = getattr(branching, name)
    for how in ({"isolate_processes": True, "max_parallel": 2}, {"runner": print}):
        assert callable(pattern(first, **needed, **{**OPTIONS, **how}))
    with pytest.raises(TypeError, match="no_such_option"):
        pattern(first, **needed, no_such_option=1)


def test_a_branch_context_takes_what_the_contract_has() -> None:
    """3.1, 3.2"""
    signature = inspect.signature(branching.BranchContext).parameters
    assert list(signature)[:2] == ["target", "workspace"]
    options = {"close_fds": False, "limits": None, "isolate": False, "parent_cgroup": None}
    for parameter, default in options.items():
        assert signature[parameter].kind is inspect.Parameter.KEYWORD_ONLY
        assert signature[parameter].default == default


def test_results_have_the_contracts_fields() -> None:
    """4.30, 4.31"""
    outcome = {field.name: field for field in dataclasses.fields(SpeculationOutcome)}
    assert {"committed", "winner", "all_results"} <= set(outcome)
    result = {field.name: field.default for field in dataclasses.fields(SpeculationResult)}
    wanted = {"branch_index", "success", "return_value", "exception", "branch_path"}
    assert wanted <= set(result)
    assert (result["score"], result["exit_code"]) == (0.0, 0)


def test_the_winner_is_one_of_all_results(workspace: Workspace) -> None:
    """4.33, also in a search by levels"""

    def makes(path: Path) -> bool:
        (path / path.name).write_text("x")
        return True

    for pattern in (
        Speculate([makes, makes]),
        BeamSearch([makes, makes], expand=lambda path, depth: [makes]),
    ):
        outcome = pattern(workspace)
        assert any(outcome.winner is result for result in outcome.all_results)
