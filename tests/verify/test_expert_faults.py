"""verify catches errors that other trainers have had with mixtures of experts, and names layout and
tensor as docs/twenty-four-errors.md says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pentameter.config.files.load import load_config
from pentameter.verify.cases import chosen_cases
from pentameter.verify.compare import verify_layouts
from pentameter.verify.shrink import shrink

PAGE = Path(__file__).parents[2] / "docs" / "twenty-four-errors.md"
MODELS = {
    "plain": ("qwen3-0.6b", {"n_experts": 4, "bias": True}),
    "bias": ("qwen3-0.6b", {"n_experts": 4, "balance": "bias", "dense_layers": 1}),
    "sequence": ("qwen3-0.6b", {"n_experts": 4, "balance": "sequence", "balance_weight": 1.0}),
    "batch": ("qwen3-0.6b", {"n_experts": 4, "balance": "batch", "router_z_loss": 0.1}),
    "latent": ("deepseek-v2-lite", {}),
}
"""Presets, and what is changed in their section `[model]`."""


@dataclass(frozen=True)
class Error:
    """An error in the page, by its number there; a function in planted_expert_faults.py plants it
    in a layout."""

    number: int
    fault: str
    layout: str
    subject: str
    """The first number that is off."""
    model: str = "plain"
    n_steps: int = 1


def gradient(name: str) -> str:
    """The subject for a parameter of the last layer, whose gradients are complete first."""
    return f"gradient of blocks.4.{name}"


ROUTER = gradient("experts.router.weight")
FULL = "data=1,activation_checkpoint=full"
QUICK = (
    Error(3, "bias_of_each_shard", "data=2,expert_tensor=2", "loss"),
    Error(11, "losses_divided_by_ranks", "data=2", ROUTER, "batch"),
    Error(13, "loss_divided_by_rows", "data=1,micro_batches=4", ROUTER, "sequence"),
    Error(14, "loss_of_each_pass", FULL, ROUTER, "sequence"),
    Error(15, "scaled_by_replicas", "data=2,expert=2", gradient("experts.down.bias")),
    Error(19, "routing_that_is_recomputed", FULL, gradient("experts.down.bias")),
)
SLOW = (
    Error(1, "rows_of_one_shard", "tensor=2,expert_tensor=2", gradient("experts_norm.weight")),
    Error(2, "gradient_of_own_tokens", "tensor=2,expert_tensor=2", ROUTER),
    Error(4, "places_in_one_row", "tensor=2,expert=2", "loss"),
    Error(
        5,
        "counts_of_one_tensor_rank",
        "tensor=2,sequence=1",
        "weight of blocks.3.experts.router.balance",
        "bias",
        n_steps=3,
    ),
    Error(
        6,
        "balance_until_a_dense_layer",
        "pipeline=2",
        "weight of blocks.1.experts.router.balance",
        "bias",
    ),
    Error(
        7,
        "mean_over_the_experts_own_ranks",
        "data=4,zero=3,expert=2",
        gradient("experts.down.bias"),
    ),
    Error(8, "norm_by_the_tensor_rank", "tensor=2,expert=2", "gradient norm"),
    Error(
        8,
        "experts_summed_over_data",
        "tensor=4,expert_tensor=2",
        gradient("experts.down.bias"),
    ),
    Error(9, "experts_summed_over_data", "data=4,expert_tensor=2", gradient("experts.down.bias")),
    Error(10, "norm_by_the_tensor_rank", "tensor=4,expert=4", "gradient norm"),
    Error(12, "losses_divided_by_ranks", "tensor=2,sequence=1", ROUTER, "batch"),
    Error(17, "loss_on_no_path", "data=2", ROUTER, "batch"),
    Error(18, "router_behind_a_gather", "tensor=2,expert=2", ROUTER),
    Error(
        18,
        "no_gradient_without_rows",
        "data=4,expert=4,idle_experts=true",
        gradient("experts.down.bias"),
    ),
    Error(21, "mean_over_the_layers_of_a_stage", "pipeline=2", ROUTER, "sequence"),
    Error(22, "loss_without_gradient", "data=2", ROUTER, "sequence"),
    Error(22, "loss_of_joined_layers", "pipeline=2", ROUTER, "sequence"),
    Error(
        23,
        "key_of_own_heads",
        "tensor=2",
        gradient("latent_attention.kv_down.weight"),
        "latent",
    ),
)


def outcomes_of(model, layouts, workers, fault=None, n_steps=1):
    preset, keys = MODELS[model]
    config = load_config(preset, {f"model.{key}": value for key, value in keys.items()})
    cases = chosen_cases(config, layouts)
    prepare = fault and f"planted_expert_faults:{fault}"
    return list(
        verify_layouts(shrink(config, cases), cases, workers, n_steps=n_steps, prepare=prepare)
    )


@pytest.mark.parametrize(
    "error",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)],
    ids=lambda error: f"{error.number}-{error.fault}",
)
def test_an_error_is_caught_and_named_as_the_page_says(error, workers):
    (outcome,) = outcomes_of(error.model, error.layout, workers, error.fault, error.n_steps)
    assert outcome.failure is None, outcome.worker_traceback
    assert outcome.first.subject == error.subject
    assert outcome.first.error > 1e-3
    rows = PAGE.read_text(encoding="utf-8").split("\n## ")
    (section,) = (row for row in rows if row.startswith(f"{error.number}. "))
    assert f"✗ {outcome.case.name}: {outcome.problem}" in section


@pytest.mark.parametrize("model", [pytest.param(each, marks=pytest.mark.slow) for each in MODELS])
def test_the_same_cases_pass_without_an_error(model, workers):
    """What the errors are planted in is not at fault itself."""
    n_steps = max(each.n_steps for each in (*QUICK, *SLOW) if each.model == model)
    layouts = ";".join(dict.fromkeys(e.layout for e in (*QUICK, *SLOW) if e.model == model))
    for outcome in outcomes_of(model, layouts, workers, n_steps=n_steps):
        assert outcome.passed, f"{outcome.case}: {outcome.problem}"


def test_routing_that_varies_is_kept_for_recomputation(workers):
    """Error 19 does no harm where results are kept, as they are here."""
    (outcome,) = outcomes_of("plain", FULL, workers, "routing_that_varies")
    assert outcome.passed, outcome.problem
