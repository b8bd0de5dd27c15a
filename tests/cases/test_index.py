"""Every known fault of the field has a test.

Faults are numbered 1 to 133. Most tests say theirs, in their name (`test_case_24_…`) or in their
text ("CASE 39", "(77, 78)"); the others are listed here.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FAULTS = range(1, 134)
ELSEWHERE = {
    # Precision
    69: "inference/test_engine.py::test_nan_logits_stop_the_engine",
    70: "train/test_loop.py::test_bf16_keeps_fp32_weights_and_learns",
    71: "models/test_family_layers.py::test_rotary_tables_follow_the_device_and_keep_their_dtype",
    72: "models/test_merged.py::test_a_way_of_quantising_that_is_not_known_is_refused",
    73: "scripts/test_import_head.py::test_an_export_keeps_the_fingerprint_it_carries",
    # Ranks
    81: "train/test_engine.py::test_two_ranks_of_muon_follow_one",
    82: "train/test_loop.py::test_a_head_with_its_own_lm_head_trains_in_shards_too",
    83: "train/test_loop.py::test_steps_are_computed_again_in_shards_too",
    # Launch and tracking
    90: "scripts/test_cli.py::test_next_command_carries_the_overrides",
    91: "train/test_tracker.py::test_tables_of_a_validation_are_written_by_wandb_itself",
    # Figures
    93: "inference/test_report.py::test_every_number_is_defined",
    94: "inference/test_context.py::test_head_keys_after_any_round_are_those_of_true_states",
    95: "inference/test_report.py::test_shares_per_position",
    96: "train/test_validation.py::test_acceptance_from_the_engine_decides_the_score",
    97: "models/test_layout_matrix.py::test_native_to_layout_to_native",
    98: "train/test_validation.py::test_figures_equal_a_count_by_hand",
    99: "inference/test_engine.py::test_an_oracle_scores_k_plus_one_and_a_wrong_draft_one",
    100: "inference/test_engine.py::test_an_oracle_scores_k_plus_one_and_a_wrong_draft_one",
    # Sampling
    103: "inference/test_engine.py::test_sampled_output_has_the_targets_law",
    104: "inference/test_exact_law.py::test_the_joint_law_of_a_chain_is_the_targets",
    105: "inference/test_trees.py::test_sampled_trees_have_the_targets_law",
    106: "inference/test_exact_law.py::test_the_joint_law_of_a_chain_is_the_targets",
    107: "inference/test_sampling.py::test_sampled_frequencies_are_the_targets",
    108: "inference/test_sampling.py::test_greedy_takes_the_likeliest_of_the_edited_logits",
    109: "inference/test_report.py::test_differences_from_plain_are_listed",
    110: "inference/test_exact_law.py::"
    "test_the_mask_is_asked_about_speculated_texts_and_keeps_nothing",
    111: "inference/test_engine.py::test_every_accept_pattern",
    # Length and rope
    114: "inference/test_report.py::test_breakdowns_pool_the_prompt_sets",
    115: "models/test_eagle_layouts.py::test_a_scaled_rope_reads_the_same_in_both_spellings",
    125: "models/test_family_layers.py::test_logits_of_packed_rows_equal_transformers",
    # Families
    117: "models/test_target.py::test_the_target_is_frozen_and_needs_the_context",
    119: "inference/test_family_rows.py::test_training_rows_equal_the_engines_rows",
    # Use
    126: "inference/test_payoff.py",
    128: "docs/test_commands.py::test_every_command_of_a_page_composes",
    132: "inference/test_bootstrap.py::test_the_figure_is_the_ratio_of_sums",
    133: "scripts/test_evaluate.py::test_a_report_is_reused_until_what_it_measured_changes",
}
"""Fault -> the test that holds its right value, where the test does not say its number."""


@cache
def told() -> dict[str, set[int]]:
    """Test -> the faults that its name or text names."""
    found: dict[str, set[int]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = " ".join((ast.get_docstring(node) or "").split())
                numbers = re.match(r"test_case((?:(?:_and)?_\d+)+)", node.name)
                spelt = [numbers.group(1)] if numbers else []
                many = r"(\d{1,3}(?:(?:, | and )\d{1,3})*)"
                spelt += re.findall(rf"C(?:ase|ASE)S? {many}", text)
                spelt += re.findall(rf"\({many}\)\.?$", text)
                spelt += re.findall(rf"\({many}\)[.:;]", text)
                name = f"{path.relative_to(TESTS)}::{node.name}"
                found[name] = {int(n) for one in spelt for n in re.findall(r"\d+", one)}
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_its_test(fault: int) -> None:
    """By its number, or by the list above; a listed test exists and says no number of its own."""
    named = [test for test, numbers in told().items() if fault in numbers]
    if fault not in ELSEWHERE:
        assert named, f"no test says that it holds fault {fault}"
        return
    listed = ELSEWHERE[fault]
    assert any(listed in (test, test.partition("::")[0]) for test in told()), listed
    assert not named, f"{named} say that they hold it: take {fault} off the list"
