"""Published runs of mixtures of experts are planned as fast as they were, and in their order."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

QWEN3 = {
    "id": "qwen3-235b-a22b", "source": "Megatron-MoE-ModelZoo", "model": "qwen3-235b-a22b",
    "use": "test", "program": "Megatron Core", "device": "h100", "precision": "bf16", "gpus": 256,
    "micro_batch": 1, "global_batch": 2048, "sequence": 4096, "context": 1, "expert_tensor": 1,
}  # fmt: skip
LAYOUTS = [
    {"tensor": 2, "pipeline": 8, "virtual_pipeline": 4, "expert": 32, "dispatcher": "DeepEP",
     "recompute": "norm, act", "step_seconds_published": 19.7},
    {"tensor": 2, "pipeline": 32, "virtual_pipeline": 3, "expert": 8, "dispatcher": "A2A",
     "recompute": "norm, act", "step_seconds_published": 24.2},
    {"tensor": 4, "pipeline": 8, "virtual_pipeline": 4, "expert": 8, "dispatcher": "DeepEP",
     "step_seconds_published": 29.0},
]  # fmt: skip
FOLDING = {
    "id": "folding", "source": "MoE Parallel Folding (Liu et al. 2025), table 3", "use": "order",
    "program": "Megatron Core", "device": "h100", "precision": "bf16", "global_batch": 256,
    "sequence": 4096, "context": 1,
}  # fmt: skip


@pytest.fixture
def mixtures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("mixtures")


def test_layouts_of_a_mixture_are_in_their_published_order(mixtures):
    rows = [mixtures.MixtureRow({**QWEN3, **layout}) for layout in LAYOUTS]
    (group,) = mixtures.groups_in_order(rows).values()
    assert group == rows
    assert [row.seconds for row in group] == sorted(row.seconds for row in group)
    assert all(abs(row.error) < 0.2 for row in group)


def test_an_exchange_over_nodes_is_that_of_the_rows_program(mixtures):
    """DeepEP reaches 2.7 other nodes of three, where eight rows of each token reach six."""
    row = mixtures.MixtureRow({**QWEN3, **LAYOUTS[0]})
    assert row.estimate.sent == pytest.approx(3 * (1 - 0.75**8) / 6)


def test_runs_out_of_memory_do_not_fit_and_others_are_not_refused(mixtures):
    runs = {**FOLDING, "model": "qwen2-57b-a14b", "gpus": 64, "tensor": 2, "pipeline": 4,
            "expert": 4, "expert_tensor": 1, "strategy": "5D, parallel folding",
            "model_tflops_per_gpu": 385.9}  # fmt: skip
    assert mixtures.MixtureRow(runs).estimate.verdict != "does not fit"
    assert abs(mixtures.MixtureRow(runs).error) < 0.35
    large = {**FOLDING, "model": "llama3-8x70b", "gpus": 256, "tensor": 8, "out_of_memory": True}
    wide = {**large, "context": 8, "expert": 1, "strategy": "FSDP",
            "program": "Megatron Core (FSDP)"}  # fmt: skip
    assert mixtures.MixtureRow(wide).estimate.verdict == "does not fit"
    # 32 copies of attention, four of the experts, whose gradients alone are 28 GB: nothing is left
    # for what is not planned, even where all is computed again.
    row = mixtures.MixtureRow({**large, "expert": 8, "expert_tensor": 8, "strategy": "TP+EP+DP"})
    assert row.is_out_of_memory
    assert row.estimate.plan.config.train.activation_checkpoint == "full"
    assert row.estimate.verdict == "tight"


def test_a_run_whose_state_is_in_16_bits_is_not_refused(mixtures):
    """DeepSeek-V3 on 256 H100s, in 8.18 s: ours, with a state in 32 bits, lacks 14 GB."""
    row = mixtures.MixtureRow({
        "id": "deepseek", "source": "NeMo AutoModel", "use": "test", "model": "deepseek-v3-671b",
        "program": "NeMo AutoModel (PyTorch FSDP2 + TE + DeepEP)", "kernels": "TE + DeepEP",
        "device": "h100", "gpus": 256, "precision": "bf16", "tensor": 1, "context": 1,
        "pipeline": 4, "virtual_pipeline": 8, "expert": 64, "expert_tensor": 1, "micro_batch": 1,
        "global_batch": 512, "sequence": 4096, "step_seconds_published": 8.18,
    })  # fmt: skip
    assert row.estimate.verdict != "does not fit"
    assert row.error == pytest.approx(0.18, abs=0.03)
    plan = row.estimate.plan
    ours = mixtures.Estimate(plan, row.cluster, row.estimate.precision)
    assert ours.spare_bytes == pytest.approx(-14e9, rel=0.05)


def test_whole_layers_of_experts_may_be_computed_again(mixtures):
    """Qwen3-235B of 16,384 tokens and more: attention and the streams are kept."""
    long = {**QWEN3, "tensor": 4, "pipeline": 8, "virtual_pipeline": 4, "expert": 8,
            "dispatcher": "DeepEP", "global_batch": 256, "sequence": 16384,
            "recompute": "selective: layernorm, moe", "routing": "forced balance"}  # fmt: skip
    row = mixtures.MixtureRow({**long, "step_seconds_published": 11.4})
    assert row.estimate.verdict != "does not fit"
    assert abs(row.error) < 0.1
    without = mixtures.MixtureRow({**long, "recompute": "norm, act"})
    assert without.estimate.device_bytes > row.estimate.device_bytes + 30e9


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"device": "h800"}, "no h800 to plan for"),
        ({"precision": "nvfp4"}, "nvfp4 cannot be planned"),
        ({"model": "Nemotron"}, "a model with other layers"),
    ],
)
def test_what_cannot_be_planned_says_why(mixtures, facts, why):
    assert mixtures.MixtureRow({**QWEN3, **LAYOUTS[0], **facts}).obstacle == why


def test_rows_in_8_bits_are_planned_and_kept_apart(mixtures):
    facts = {**QWEN3, **LAYOUTS[0]}
    wide = mixtures.MixtureRow(facts)
    narrow = mixtures.MixtureRow({**facts, "precision": "mxfp8"})
    assert (wide.kind, narrow.kind) == (mixtures.SCORED, "fp8, h100")
    assert narrow.seconds < wide.seconds
    blackwell = mixtures.MixtureRow({**facts, "device": "gb200", "precision": "fp8-mx"})
    assert blackwell.kind == "fp8, blackwell"
    assert blackwell.cluster.node_size == 64
