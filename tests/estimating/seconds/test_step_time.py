"""The time of a step: its parts, what makes it longer, and published runs."""

from pathlib import Path

import pytest

from pentameter.config.files.load import load_config
from pentameter.estimating.bytes.communication import Communication
from pentameter.estimating.bytes.plan_estimates import step_of
from pentameter.estimating.seconds import compute_time
from pentameter.estimating.seconds import estimate as estimating
from pentameter.estimating.seconds.cluster import parse_cluster
from pentameter.estimating.seconds.estimate import make_estimate
from pentameter.estimating.seconds.links import Links
from pentameter.estimating.seconds.step_time import step_time
from pentameter.estimating.seconds.timeline import SIMULATED_ROUNDS, timeline

GPT = {
    "model.vocab_size": 50304,
    "model.n_layers": 16,
    "model.attention.n_heads": 16,
    "model.d_model": 2048,
    "model.context_length": 1024,
    "train.batch_size": 256,
    "train.precision": "bf16",
    "train.micro_batch_size": 4,
}
LAYOUTS = [
    "data=8",
    "data=8,zero=1",
    "data=8,zero=2",
    "data=8,zero=3",
    "data=4,tensor=2,sequence=true,zero=3",
    "data=1,tensor=8",
    "data=4,tensor=4,tensor_mode=2d",
    "tensor=2,context=4",
    "tensor=2,context=4,context_mode=all-to-all",
    "data=2,pipeline=4",
    "data=2,pipeline=4,zero=1,schedule=interleaved,virtual_stages=2",
    "pipeline=4,schedule=zero-bubble",
    "pipeline=4,schedule=zero-bubble-v,virtual_stages=2",
    "pipeline=4,schedule=gpipe",
]


def estimate(layout="data=8", cluster="a100-80gb:8x2", **changes):
    config = load_config("quickstart", {**GPT, **changes})
    return make_estimate(config, parse_cluster(cluster), layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_a_step_add_up(layout):
    found = estimate(layout)
    time = found.time
    parts = time.compute + time.bubble + sum(time.exposed.values()) + time.optimizer
    assert parts == pytest.approx(time.seconds, rel=1e-6)
    assert min(time.compute, time.optimizer, *time.exposed.values()) > 0
    assert time.bubble >= -1e-9
    assert 0 < found.mfu < 1


def test_more_work_takes_longer_and_a_better_device_less():
    plain = estimate().time.seconds
    assert estimate(**{"train.activation_checkpoint": "full"}).time.seconds > 1.2 * plain
    assert estimate(**{"train.batch_size": 512}).time.seconds > 1.8 * plain
    assert estimate(cluster="h100-80gb:8x2").time.seconds < 0.8 * plain
    assert estimate(**{"train.precision": "fp32"}).time.seconds > 3 * plain
    by_ones = estimate(**{"train.micro_batch_size": 1}).time
    assert by_ones.compute > estimate().time.compute  # gradients are added up four times as often


def test_frozen_weights_cost_no_gradients():
    """Two products of three, and a little for the adapters."""
    whole, adapted = estimate(), estimate(**{"lora.rank": 16})
    assert 0.65 < adapted.time.compute / whole.time.compute < 0.8
    assert adapted.time.exposed["data"] < 0.05 * whole.time.exposed["data"]
    two_thirds = adapted.plan.flops_per_token / whole.plan.flops_per_token
    assert two_thirds == pytest.approx(2 / 3, rel=0.08)


@pytest.mark.parametrize("layout", ["data=8", "data=8,zero=3", "data=2,pipeline=4"])
def test_frozen_weights_are_not_updated(layout):
    whole, adapted = estimate(layout), estimate(layout, **{"lora.rank": 16})
    share = adapted.plan.n_trained / whole.plan.n_parameters
    assert share < 0.05
    assert adapted.time.optimizer < 2 * share * whole.time.optimizer  # on the fullest process


def test_what_leaves_the_node_is_slower():
    inside, between = estimate("tensor=8"), estimate("tensor=8", cluster="a100-80gb:4x4")
    assert between.time.exposed["tensor"] > 2 * inside.time.exposed["tensor"]
    assert inside.links()["tensor"] == "inside a node"
    assert between.links()["tensor"] == "between nodes"
    assert any("keep parallel.tensor within" in line for line in between.warnings())
    links = Links(inside.plan.layout, inside.cluster)
    small, large = (links.seconds("tensor", "all_reduce", Communication(1, n)) for n in (8, 10**9))
    assert 0 < small < 1e-3 < large


def test_zero_hides_its_gathers_beside_compute():
    time = estimate("data=8,zero=3").time
    assert time.hidden["shard"] > time.exposed["shard"]
    tiny = {"model.context_length": 128, "train.micro_batch_size": 1, "train.batch_size": 8}
    assert "shard" in estimate("data=8,zero=3", **tiny).time.exposed


@pytest.mark.parametrize(
    "stages", ["", ",pipeline=4", ",pipeline=4,schedule=interleaved,virtual_stages=2"]
)
def test_tensor_parallel_sums_hide_beside_products(stages):
    """Of a mean process's messages; a schedule that splits the backward pass waits for all."""
    n_stages = 4 if stages else 1
    time = estimate(f"tensor=2,sequence=true{stages}", cluster=f"a100-80gb:{2 * n_stages}x1").time
    whole = estimate("tensor=2,sequence=true", cluster="a100-80gb:2x1").time
    for book, of_whole in ((time.hidden, whole.hidden), (time.exposed, whole.exposed)):
        assert book["tensor"] == pytest.approx(of_whole["tensor"] / n_stages, rel=0.02)
    assert 0 < time.hidden["tensor"] < time.exposed["tensor"]
    split = estimate("tensor=2,sequence=true,pipeline=4,schedule=zero-bubble").time
    assert "tensor" not in split.hidden


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved,virtual_stages=2", "zero-bubble"])
def test_many_rounds_of_a_pipeline_take_what_a_whole_simulation_says(schedule):
    many = {"train.batch_size": 4 * 4 * 20, "train.micro_batch_size": 4}
    found = estimate(f"data=1,pipeline=4,schedule={schedule}", **many)
    plan = found.plan
    assert plan.n_micro_batches == 80 > (SIMULATED_ROUNDS + 2) * 4
    short = found.time
    from pentameter.estimating.seconds import timeline as module

    whole = pytest.MonkeyPatch()
    whole.setattr(module, "SIMULATED_ROUNDS", 80)
    try:
        long = step_time(step_of(plan, found.precision), found.cluster)
    finally:
        whole.undo()
    assert max(span.done.micro_batch for span in long.spans[0]) == 79
    assert short.seconds == pytest.approx(long.seconds, rel=1e-3)
    assert short.bubble_fraction == pytest.approx(long.bubble_fraction, abs=0.01)


def test_messages_delay_the_stages_that_wait_for_them():
    found = estimate("pipeline=4")
    layout, seconds = found.plan.layout, [(1.0, 1.0, 1.0)] * 4
    from pentameter.estimating.bytes.costs import PassSeconds

    passes = [PassSeconds(*each) for each in seconds]
    at_once, later = (timeline(layout, 4, passes, way) for way in (0.0, 0.5))
    assert later[3][0].start == at_once[3][0].start + 3 * 0.5
    assert later[0][0] == at_once[0][0]


@pytest.mark.parametrize(
    ("preset", "cluster", "layout", "published", "share"),
    [
        # Narayanan et al. 2021: 32 s a step at a batch of 1,536, all recomputed
        ("gpt3-175b", "a100-80gb:8x128", "data=8,tensor=8,pipeline=16", 32.0, 0.15),
    ],
)
def test_published_runs(preset, cluster, layout, published, share):
    found = make_estimate(load_config(preset), parse_cluster(cluster), layout=layout)
    assert found.time.seconds == pytest.approx(published, rel=share)
    assert found.fits


def test_a_layout_must_fit_the_cluster():
    from pentameter.errors import ConfigError

    with pytest.raises(ConfigError, match=r"takes 64 devices, and --cluster a100-80gb:8x2 has 16"):
        estimate("data=64")
    with pytest.raises(ConfigError, match=r"tf64|not known"):
        estimate(cluster="b200:8x2", **{"train.precision": "fp32"}).mfu  # noqa: B018
    idle = estimate("data=4")
    assert any("12 stay idle" in line for line in idle.warnings())


def test_what_does_not_fit_says_by_how_much():
    found = estimate("data=16", cluster="rtx-4090:8x2", **{"train.micro_batch_size": 16})
    assert not found.fits
    assert found.spare_bytes < 0
    assert "does not fit" in next(iter(found.warnings()))
    shown = found.to_json()
    assert shown["fits"] is False
    assert shown["memory"]["spare_bytes"] == round(found.spare_bytes)


CPU = """
[calibrations.mine]
fitted_on = "by hand"
product_share = 0.5
attention_share = 0.1
memory_share = 1.0
link_share = 1.0
network_share = 1.0
fresh_bytes_per_second = 2e9
exponential_seconds = {exponential}

[calibrations.mine.precisions.fp32]
product_share = 1.0
attention_share = 0.3
attention_backward = 2.0

[devices.cpu]
tflops = {{ bf16 = 2.0, fp32 = 2.0 }}
memory_bytes = 16e9
memory_bytes_per_second = 2e10
link_bytes_per_second = 2e9
shared = true
calibration = "mine"
source = "by hand"
date = "2026-11"
"""


@pytest.fixture
def cpu(tmp_path):
    """A CPU of two processes; `exponential` is the time of one exponential."""

    def make(exponential=0.0):
        path = tmp_path / "cpu.toml"
        path.write_text(CPU.format(exponential=exponential), encoding="utf-8")
        return f"{path}:2x1"

    return make


def test_what_a_cpu_does_otherwise_counts(cpu):
    def computed(layout="data=2", exponential=0.0, **changes):
        return estimate(layout, cpu(exponential), **changes).time.compute

    joined = computed()
    assert computed(**{"train.compile": False}) > 1.02 * joined  # each operation by itself
    # As fast on paper, but its products reach twice the share.
    assert computed(**{"train.precision": "fp32"}) < 0.7 * joined
    assert computed(exponential=1e-7) > 1.1 * joined
    # Freed memory goes back to the system, and each page is given anew.
    assert computed("data=2,zero=1") > 1.02 * joined


def test_the_fused_step_has_shares_of_its_own(cpu):
    table = """
[calibrations.mine.fused.bf16]
product_share = {share}
attention_share = 0.5
step_share = {share}
"""

    def computed(share, **changes):
        file, _, shape = cpu(exponential=1e-7).rpartition(":")
        text = Path(file).read_text(encoding="utf-8") + table.format(share=share)
        Path(file).write_text(text, encoding="utf-8")
        return estimate("data=2", f"{file}:{shape}", **changes).time.compute

    assert computed(0.5) > 1.9 * computed(1.0)
    # Activation functions are among its products; windows are not fused.
    assert computed(0.5, **{"model.attention.sliding_window": 512}) > 1.5 * computed(0.5)
    assert computed(0.5, **{"train.compile": False}) == computed(1.0, **{"train.compile": False})


def test_what_cannot_be_compiled_is_planned_so():
    """A schedule that splits the backward pass runs uncompiled, whatever is asked for."""

    def computed(schedule, compiled):
        layout = f"data=2,pipeline=4,schedule={schedule}"
        return estimate(layout, **{"train.compile": compiled}).time.compute

    uncompiled = computed("1f1b", False)
    assert computed("1f1b", "auto") < 0.98 * uncompiled
    assert computed("zero-bubble", "auto") == computed("zero-bubble", False) == uncompiled


def test_a_reduce_scatter_between_cpus_is_an_all_reduce(cpu):
    on_cpus, on_gpus = (
        Links(found.plan.layout, found.cluster)
        for found in (estimate("data=2", cpu()), estimate("data=2", "h100-80gb:2x1"))
    )
    traffic = Communication(1, 1 << 30)

    def ratio(links):
        seconds = links.seconds("data", "reduce_scatter", traffic)
        return seconds / links.seconds("data", "all_reduce", traffic)

    assert ratio(on_cpus) == pytest.approx(1.0, rel=1e-3)  # but for a hop
    assert ratio(on_gpus) == pytest.approx(0.5, rel=1e-3)


DROPPING = {"model.attention.dropout": 0.1}


def test_kernels_that_drop_weights_take_less_than_writing_them_out(monkeypatch):
    without, dropping = estimate(), estimate(**DROPPING)
    wide = estimate(**DROPPING, **{"model.attention.head_size": 256})
    assert dropping.drops_by_blocks
    assert not without.drops_by_blocks
    assert not wide.drops_by_blocks
    assert dropping.memory == without.memory
    (said,) = (warning for warning in dropping.warnings() if "attention.dropout" in warning)
    monkeypatch.setattr(estimating, "fuses_dropout", lambda *_: False)
    monkeypatch.setattr(compute_time, "fuses_dropout", lambda *_: False)
    written = estimate(**DROPPING)
    more = written.memory.total_bytes - dropping.memory.total_bytes
    assert f"{more / 1e9:,.1f} GB more" in said
    assert without.time.compute < dropping.time.compute < written.time.compute
    assert not any("attention.dropout" in warning for warning in written.warnings())


def test_a_cpu_and_a_ring_have_no_kernels_that_drop_weights(cpu):
    assert not estimate(layout="tensor=2,context=4", **DROPPING).drops_by_blocks
    assert estimate(layout="tensor=2,context=4,context_mode=all-to-all", **DROPPING).drops_by_blocks
    assert not estimate(layout="data=1", cluster=cpu(), **DROPPING).drops_by_blocks


def test_a_step_of_a_billion_micro_batches_is_timed_at_once():
    """Those between the second and the last take as long as the second."""
    few, many = (
        estimate("data=2,zero=2", **{"train.batch_size": 2 * n, "train.micro_batch_size": 1})
        for n in (1000, 1_000_000_000)
    )
    one = few.time.compute / 1000
    assert many.time.compute / 1e9 == pytest.approx(one)
    assert many.time.seconds == pytest.approx(1e6 * few.time.seconds, rel=1e-2)


def test_the_update_is_that_of_the_fullest_rank_wherever_its_experts_are():
    experts = {"model.experts.count": 128, "model.experts.width": 512}
    ends = estimate("pipeline=4", **experts, **{"model.experts.dense_layers": list(range(4, 16))})
    middle = [*range(4), *range(8, 16)]
    between = estimate("pipeline=4", **experts, **{"model.experts.dense_layers": middle})
    assert between.time.optimizer > 0.5 * ends.time.optimizer


def test_a_cube_over_several_nodes_is_warned_of():
    found = estimate("tensor=8,tensor_mode=3d", "a100-80gb:4x2")
    assert any(said.startswith("depth-parallel") for said in found.warnings())
    assert not any("several nodes" in said for said in estimate("tensor=8").warnings())
