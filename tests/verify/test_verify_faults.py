"""verify catches what can be wrong with a layout, and names where it shows first."""

from __future__ import annotations

import math
import re
from functools import cache

import pytest

from pentameter.config.files.load import load_config
from pentameter.verify.cases import chosen_cases
from pentameter.verify.compare import verify_layouts
from pentameter.verify.shrink import shrink

EMBEDDING, FINAL_NORM = "token_embedding.weight", "final_norm.bias"
GRID, CUBE = "tensor=4,tensor_mode=2d", "tensor=8,tensor_mode=3d"


@cache
def config():
    """GPT-2's structure: tied head, learned positions, biases everywhere; the vocabulary padded."""
    return load_config("gpt2-124m")


def outcome_of(fault, layout, workers, **options):
    (case,) = chosen_cases(config(), layout)
    (outcome,) = verify_layouts(
        shrink(config(), [case]),
        [case],
        workers,
        n_steps=options.pop("n_steps", 1),
        prepare=f"planted_faults:{fault}",
        **options,
    )
    return outcome


@pytest.mark.parametrize(
    ("fault", "layout", "kind", "tensor"),
    [
        # In backward order the final norm comes first: a tied head has no parameters of its own.
        ("no_sum_of_copies", "data=2", "gradient", FINAL_NORM),
        ("no_sum_after_backward", "data=2,pipeline=2", "gradient", FINAL_NORM),
        ("no_sum_after_backward", "tensor=2,sequence=1", "gradient", FINAL_NORM),
        ("averaged_shards", "data=2,zero=3", "gradient", FINAL_NORM),
        ("mean_of_means", "data=1,micro_batches=4", "gradient", FINAL_NORM),
        ("no_sum_of_tied_copies", "pipeline=2", "gradient", EMBEDDING),
        ("row_bias_of_each_process", "tensor=2", "loss", "loss"),
        ("count_of_own_targets", "data=2", "loss", "loss"),
        ("mask_by_rank", "data=2", "loss", "loss"),
        ("mask_by_rank", "tensor=2", "loss", "loss"),
        ("mask_by_own_row", "data=2,zero=1", "loss", "loss"),
        ("norm_of_every_copy", "tensor=2", "gradient norm", "gradient norm"),
        ("clip_by_own_norm", "data=2,zero=2", "weight", None),
        ("no_sum_of_copies", "context=2", "gradient", FINAL_NORM),
        ("count_of_own_targets", "data=2,context=2", "loss", "loss"),
        ("skipped_block", "context=2", "loss", "loss"),
        ("merged_without_rescaling", "context=2", "loss", "loss"),
        ("gradients_stay_with_their_process", "context=2", "gradient", None),
        ("wrong_half", "context=2", "loss", "loss"),
        ("heads_numbered_from_zero", "context=2,context_mode=all-to-all", "loss", "loss"),
        ("evaluation_by_each_process", "data=2", "evaluation loss", "evaluation loss"),
        ("counts_up_to_the_last_target", "data=2", "loss", "loss"),
        ("tiles_at_their_chunk", "context=2", "loss", "loss"),
        ("last_chunk_of_the_loss", "data=2", "gradient", EMBEDDING),
        ("rows_of_each_process", "data=2", "row losses", "row losses"),
        ("partial_row_losses", "context=2", "row losses", "row losses"),
        ("logits_of_the_last_position", "tensor=2", "next logits", "next logits"),
        ("logits_of_the_last_position", "context=2", "next logits", "next logits"),
        ("smallest_doubled", "data=2", "gradient", None),
        ("smallest_dropped", "data=2,zero=3", "gradient", None),
        ("smallest_off_by_a_thousandth", "tensor=2", "gradient", None),
        ("smallest_not_summed", "tensor=2,sequence=1", "gradient", None),
        ("no_broadcast_of_blocks", GRID, "loss", "loss"),
        ("sum_to_the_wrong_process", GRID, "gradient", None),
        ("norm_of_own_channels", GRID, "loss", "loss"),
        pytest.param("norm_of_own_channels", CUBE, "loss", "loss", marks=pytest.mark.slow),
        ("no_sum_over_rows", GRID, "gradient", FINAL_NORM),
        pytest.param("no_sum_over_rows", CUBE, "gradient", FINAL_NORM, marks=pytest.mark.slow),
        ("no_sum_after_backward", "tensor=8,tensor_mode=2.5d", "gradient", FINAL_NORM),
        ("channels_from_zero", GRID, "loss", "loss"),
        ("heads_of_the_stream_rows", CUBE, "loss", "loss"),
        ("targets_of_the_stream_rows", CUBE, "loss", "loss"),
    ],
)
def test_a_fault_is_caught_where_it_shows_first(fault, layout, kind, tensor, workers):
    outcome = outcome_of(fault, layout, workers)
    assert not outcome.passed
    assert outcome.failure is None, outcome.worker_traceback
    assert outcome.first.kind == kind
    assert outcome.first.step == 0
    assert tensor is None or outcome.first.tensor == tensor
    assert outcome.first.error > 1e-6
    assert outcome.first.subject in outcome.problem


@pytest.mark.parametrize(
    ("fault", "layout", "kind"),
    [
        ("window_before_the_text", "tensor=2", "evaluation loss"),
        ("keys_of_another_head", "tensor=4,kv_heads=2", "loss"),
    ],
)
def test_a_fault_in_what_only_some_models_have_is_caught(fault, layout, kind, workers):
    """Attention in windows, and key heads that several query heads share."""
    model = {"model.attention.sliding_window": 64, "model.attention.sliding_window_pattern": 2}
    config = load_config("qwen3-0.6b", model)
    (case,) = chosen_cases(config, layout)
    small = shrink(config, [case])
    (right,) = verify_layouts(small, [case], workers, n_steps=1)
    assert right.passed, right.problem
    prepare = f"planted_faults:{fault}"
    (wrong,) = verify_layouts(small, [case], workers, n_steps=1, prepare=prepare)
    assert wrong.failure is None, wrong.worker_traceback
    assert wrong.first.kind == kind
    assert wrong.first.error > 1e-6


def test_the_same_processes_and_cases_pass_without_a_fault(workers):
    """What the faults are planted in is not at fault itself. That GRID and CUBE pass, with this
    model, is seen in test_verify_layouts.py."""
    layouts = "data=2;data=2,pipeline=2;tensor=2,sequence=1;data=2,zero=3"
    cases = chosen_cases(config(), layouts)
    for outcome in verify_layouts(shrink(config(), cases), cases, workers, n_steps=1):
        assert outcome.passed, outcome.problem


def test_what_is_not_finite_is_a_difference(workers):
    outcome = outcome_of("nothing_finite", "data=2", workers)
    assert outcome.first.kind == "gradient norm"  # gradients are read before it is taken
    assert outcome.gradient_error == math.inf
    assert outcome.to_json()["gradient_error"] is None


@pytest.mark.parametrize(
    ("fault", "seconds", "said"),
    [
        ("crash", 60, "rank 1: ValueError: the planted crash"),
        ("die", 60, r"rank 1 was killed by SIGKILL \(out of memory\?\)"),
        ("hang", 5, "no answer in 5 seconds from rank 0, 1"),
    ],
)
def test_a_layout_without_numbers_fails_and_the_next_goes_on(fault, seconds, said, workers):
    outcome = outcome_of(fault, "data=2", workers, timeout_seconds=seconds)
    assert not outcome.passed
    assert re.search(said, outcome.failure), outcome.failure
    assert ("planted crash" in outcome.worker_traceback) == (fault == "crash")
    (case,) = chosen_cases(config(), "data=2")
    (after,) = verify_layouts(shrink(config(), [case]), [case], workers, n_steps=1)
    assert after.passed
