"""Keys that take one of a few words: each value is computed by every path, or refused by name.

A path is a place that branches on the value: the plain model, compiled, fused, the planner, the
export, the optimizer and so on. The schema says which keys and values there are; a value that no
place knows is planted in the configuration past its checks.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pentameter.checkpoint.hugging_face.config_json import (
    choose_family,
    from_their_config,
    to_their_config,
)
from pentameter.config.choices import PRECISIONS
from pentameter.config.fields import choices_of, leaves, value_in
from pentameter.config.fingerprint import config_hash
from pentameter.config.schema import Config, ModelConfig
from pentameter.data.batches.step import training_batches
from pentameter.data.corpora.records.rows import RowsRead
from pentameter.data.prepare.splits import Splitting
from pentameter.data.shards.dataset import TokenSequence, TokenSplit
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.costs import PassSeconds, Step
from pentameter.estimating.bytes.plan_estimates import plan_memory, plan_record
from pentameter.estimating.seconds.cluster import multiplied_in
from pentameter.estimating.seconds.timeline import timeline
from pentameter.evaluate import split as evaluation
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.machine.choices import (
    choose_asynchronous,
    choose_compile,
    choose_device,
    choose_precision,
)
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import GPT, build_model
from pentameter.model.loss import AuxiliaryLoss
from pentameter.optim.build import build_optimizer
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.assemble import assemble
from pentameter.parallel.pipeline.bounded_stage import SCHEDULES
from pentameter.parallel.precision import MATMULS, arithmetic
from pentameter.parallel.sources.gpt_source import gpt_slice
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.fused_step import architecture_obstacle
from pentameter.planning.layouts.layout import Layout, make_layout
from pentameter.planning.plan import make_plan
from pentameter.train.keep.saving import failure_ends_run

# Sizes that no other test uses: the fused kernels keep what was compiled for each shape.
BASE = Config.model_validate(
    {
        "model": {
            "vocab_size": 19,
            "context_length": 12,
            "n_layers": 4,
            "n_heads": 2,
            "d_model": 12,
            "bias": True,
            "dropout": 0.1,
            "init_std": 0.5,  # large enough for activations to tell apart
        },
        "data": {"corpus": "grammar"},
        "schedule": {"decay_steps": 50, "decay_interval": 10},
        "train": {"batch_size": 4, "steps": 100, "precision": "fp32"},
    }
)
CPU = torch.device("cpu")
WITH = {
    ("parallel.tensor_mode", "2d"): {"tensor": 4, "pipeline": 1},
    ("parallel.tensor_mode", "2.5d"): {"tensor": 8, "pipeline": 1},
    ("parallel.tensor_mode", "3d"): {"tensor": 8, "pipeline": 1},
    ("parallel.tensor_mode", "made-up"): {"tensor": 4, "pipeline": 1},
    ("parallel.schedule", "interleaved"): {"pipeline": 2, "virtual_stages": 2},
    ("parallel.schedule", "zero-bubble"): {"pipeline": 2, "virtual_stages": 2},
    ("parallel.schedule", "zero-bubble-v"): {"pipeline": 2, "virtual_stages": 2},
}
"""What a value needs beside it in its section."""
PIPELINE = {"pipeline": 2}  # without one, the schedule and the partition are not read
BESIDE = {
    "parallel.context_mode": {"context": 2},
    "model.rope_scaling.type": {"positions": "rotary"},
    "model.attention.type": {"positions": "rotary"},
    "model.router.score_function": {"experts.count": 4},
    "model.router.balance": {"experts.count": 4},
}


CHOICES = {
    path: found
    for path, leaf in leaves().items()
    if (found := tuple(itertools.chain(*map(choices_of, leaf.options))))
}
"""The words and numbers that keys take by name."""
OF_MODEL = [(path, value) for path in CHOICES for value in CHOICES[path] if "model." in path]
OF_MODEL_ITSELF = [(path, value) for path, value in OF_MODEL if "rope_scaling" not in path]
OF_EXPERTS = ("model.router.score_function", "model.router.balance")
"""Keys of experts, which the export refuses by `model.experts.count`."""


def with_value(path: str, value: Any) -> Config:
    """BASE with `value` at `path`, which no check of the schema has seen."""
    section = path.partition(".")[0]
    beside = BESIDE.get(path, PIPELINE if section == "parallel" else {})
    beside = {**beside, **WITH.get((path, value), {})}
    return BASE.updated({**{f"{section}.{key}": each for key, each in beside.items()}, path: value})


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(40).view(4, 10) * 7 % 19
    return tokens, tokens.roll(-1, 1)


def built(config: Config) -> GPT:
    return build_model(config.model, config.seed, dtype=torch.float64).train()


def step_of(model: GPT, forward: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed loss and every gradient of what `forward` computes of `model`."""
    tokens, targets = batch()
    for module in model.modules():
        if isinstance(module, AuxiliaryLoss):
            module.start_step(1.0)
    keys = dropout_keys(model.config, 3, 5, range(len(tokens)))
    loss = forward(tokens, targets, keys)
    loss.sum().backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plainly(config: Config) -> tuple[float, dict[str, torch.Tensor]]:
    model = built(config)
    return step_of(model, lambda x, y, keys: model(x, targets=y, dropout_keys=keys))


def assert_equal(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-13)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        # Sums of a few hundred terms in another order: some ulps of the largest element.
        scale = gradient.abs().max().item()
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-10, atol=1e-12 * scale, msg=name
        )


# Every value of the schema


@pytest.mark.parametrize(
    # `balance` adds gradients and state, which tests/model/test_experts.py tells apart.
    "path",
    [path for path in CHOICES if path.startswith("model.") and path != "model.router.balance"],
)
def test_no_value_of_the_architecture_computes_what_another_does(path):
    losses = [plainly(with_value(path, value))[0] for value in CHOICES[path]]
    for one, other in itertools.combinations(losses, 2):
        assert abs(one - other) > 1e-6 * abs(one)


@pytest.mark.parametrize(("path", "value"), OF_MODEL_ITSELF)
def test_the_fused_step_computes_a_value_or_names_it(monkeypatch, path, value):
    # Uncompiled: what is asked here is which function a kernel computes.
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    config = with_value(path, value)
    obstacle = architecture_obstacle(config.model)
    model = built(config)

    def forward(tokens, targets, keys):
        return fused_loss_sum(model, tokens, targets, keys, torch.float64)

    if obstacle is None:
        assert_equal(step_of(model, forward), plainly(config))
    else:
        named = f"{path}={value!r}"
        assert obstacle == named
        with pytest.raises(ConfigError, match=named):
            step_of(model, forward)


@pytest.mark.parametrize(("path", "value"), OF_MODEL)
def test_a_compiled_graph_computes_every_value(path, value):
    """Traced as for a run, and executed as traced; code for the machine has its own test."""
    torch._dynamo.reset()
    config = with_value(path, value)
    model = built(config)
    traced = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    found = step_of(model, lambda x, y, keys: traced(x, targets=y, dropout_keys=keys))
    assert_equal(found, plainly(config))


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, -1])
def test_compiled_code_computes_first_and_last_values(place):
    """All in one model, to compile twice only; `test_fused` compiles the values between."""
    chosen = {path: CHOICES[path][place] for path in CHOICES if path.startswith("model.")}
    config = BASE.updated({"model.n_layers": 1, **chosen})
    part = StageModule(gpt_slice(built(config)), CPU, arithmetic("fp64")).train()
    part.run_compiled()
    assert_equal(step_of(part.model, part), plainly(config))


def exported_config(model: ModelConfig) -> dict[str, Any]:
    family = choose_family(model)
    return to_their_config(family, model, vocab_size=19, token_ids={}, dtype="float32")


@pytest.mark.parametrize(("path", "value"), OF_MODEL_ITSELF)
def test_an_export_keeps_a_value_or_names_it(path, value):
    model = with_value(path, value).model
    refusal = None
    try:
        written = exported_config(model)
    except ConfigError as error:
        refusal = str(error)
    if refusal is not None:
        named = "model.experts.count=4" if path in OF_EXPERTS else f"{path}={value!r}"
        assert named in refusal
        return
    again = from_their_config(written, Path("config.json"))
    assert value_in(again, path.removeprefix("model.")) in (value, None)


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path in CHOICES for value in CHOICES[path]]
)
def test_the_planner_knows_every_value(path, value):
    plan = make_plan(with_value(path, value), rows_per_epoch=100)
    assert plan_memory(plan).total_bytes > 0
    assert plan_record(plan)["time"]["bubble_fraction"] >= 0


def test_precisions_are_as_wide_as_the_planner_says():
    assert {"auto", *PRECISIONS} == {"auto", *MATMULS} == set(CHOICES["train.precision"])
    for name in PRECISIONS:
        found, step = arithmetic(name), Step(make_plan(BASE).config, Layout(), asked_precision=name)
        assert found.weights.itemsize == step.element_bytes
        assert found.products.itemsize == step.product_bytes


def test_learning_rates_differ_by_schedule():
    rates = {}
    for name in CHOICES["schedule.name"]:
        config = make_plan(with_value("schedule.name", name), rows_per_epoch=100).config
        rates[name] = [learning_rate(step, config.optimizer, config.schedule) for step in range(50)]
    assert all(one != other for one, other in itertools.combinations(rates.values(), 2))


def pass_order(layout, n_micro_batches):
    """Return, for each pipeline rank, its passes in the order in which the schedule runs them."""
    seconds = [PassSeconds(1.0, 1.0, 1.0)] * layout.n_stages
    spans = timeline(layout, n_micro_batches, seconds)
    return [[span.done for span in process] for process in spans]


def test_pipelines_have_an_order_for_every_schedule():
    assert set(SCHEDULES) == set(CHOICES["parallel.schedule"])
    orders = {}
    for name in SCHEDULES:
        plan = make_plan(with_value("parallel.schedule", name))
        orders[name] = pass_order(plan.layout, 4)
    assert all(one != other for one, other in itertools.combinations(orders.values(), 2))


# A value that the schema does not have


def fused(config: Config) -> None:
    assert architecture_obstacle(config.model) is not None
    model = built(BASE)
    model.config = config.model
    fused_loss_sum(model, *batch(), None, torch.float64)


def exported(config: Config) -> None:
    exported_config(config.model)


def assembled(config: Config) -> None:
    """The engine, past the planner, which refuses it first."""
    plan = make_plan(BASE)
    config = plan.config.model_copy(update={"train": config.train, "model": config.model})
    object.__setattr__(plan, "config", config)
    assemble(plan, CPU, config.train.precision, compiled=False)


def split() -> TokenSplit:
    tokens = TokenSequence([np.arange(400, dtype="<u4") % 19], 0, 400)
    return TokenSplit("train", tokens, 400, np.array([0, 200]))


def evaluated(config: Config) -> None:
    plan = SimpleNamespace(config=config)
    evaluation.evaluate(SimpleNamespace(plan=plan), split(), name="val", step=0, batch_size=2)


def optimizer_of(config: Config) -> None:
    plan = make_plan(BASE)
    build_optimizer(built(BASE).named_parameters(), plan.table, config.optimizer)


ARCHITECTURE = {"plan": make_plan, "plain": built, "fused": fused, "export": exported}
PATHS: dict[str, dict[str, Any]] = {
    "model.feed_forward.activation": ARCHITECTURE,
    "model.norm": ARCHITECTURE,
    "model.norm_position": ARCHITECTURE,
    "model.positions": ARCHITECTURE,
    "model.attention.qk_norm": ARCHITECTURE,
    "model.rope_scaling.type": {"plain": plainly},
    "model.attention.type": ARCHITECTURE,
    "model.router.score_function": {"plain": plainly, "fused": fused},
    "model.router.balance": {"plan": make_plan, "plain": built, "fused": fused},
    # The weights say it all: nothing computes otherwise, and an export keeps them.
    "model.init": {"plan": make_plan, "plain": built},
    "data.order": {"train": lambda c: training_batches(c, split()), "eval": evaluated},
    "data.bad_rows": {"read": lambda c: RowsRead(c.data.bad_rows)},
    "data.split_by": {"prepare": lambda c: Splitting(by=c.data.split_by)},
    "optimizer.name": {"plan": make_plan, "build": optimizer_of, "hash": config_hash},
    "optimizer.decay": {"build": optimizer_of},
    "schedule.name": {
        "plan": make_plan,
        "rate": lambda c: learning_rate(0, c.optimizer, c.schedule),
        "hash": config_hash,
    },
    "train.device": {"engine": lambda c: choose_device(c.train.device)},
    "train.precision": {
        "memory": lambda c: plan_memory(make_plan(c)),
        "engine": lambda c: choose_precision(c.train.precision, CPU),
        "assemble": assembled,
    },
    "train.matmul_precision": {
        "assemble": assembled,
        "peak": lambda c: multiplied_in("fp32", c.train.matmul_precision),
    },
    "train.matmuls": {"assemble": assembled},
    "train.stream": {"memory": lambda c: plan_memory(make_plan(c)), "assemble": assembled},
    "train.activation_checkpoint": {
        "memory": lambda c: plan_memory(make_plan(c)),
        "assemble": assembled,
    },
    "train.compile": {"engine": lambda c: choose_compile(c.train.compile, CPU, total_flops=1.0)},
    "train.eval_interval": {"plan": make_plan},
    "train.eval_tokens": {"plan": make_plan},
    "train.sample_interval": {"plan": make_plan},
    "parallel.zero": {"plan": make_plan},
    "parallel.schedule": {
        "plan": make_plan,
        "order": lambda c: pass_order(
            make_plan(BASE).layout.__class__(pipeline=2, schedule=c.parallel.schedule), 4
        ),
    },
    "parallel.context_mode": {"plan": make_plan},
    "parallel.tensor_mode": {"plan": make_plan, "layout": lambda c: make_layout(c.parallel)},
    "parallel.partition": {"plan": make_plan},
    "checkpoint.asynchronous": {
        "save": lambda c: choose_asynchronous(c.checkpoint.asynchronous, 1, 2),
    },
    "checkpoint.on_error": {"save": failure_ends_run},
}
"""Key → the places that branch on it, each a function that meets a configuration there."""


def test_every_key_of_the_schema_has_its_places():
    assert set(PATHS) == set(CHOICES)


@pytest.mark.parametrize(
    ("path", "place"), [(path, place) for path in PATHS for place in PATHS[path]]
)
def test_a_value_that_nobody_knows_is_refused_by_name(path, place):
    planted = 9 if path == "parallel.zero" else "made-up"
    with pytest.raises(ConfigError) as caught:
        PATHS[path][place](with_value(path, planted))
    assert path.split(".")[1] in str(caught.value)
    assert str(planted) in str(caught.value)


def test_the_fused_step_carries_no_stream_in_bf16():
    train = {"precision": "bf16", "stream": "bf16"}
    plan = make_plan(BASE.updated({f"train.{key}": word for key, word in train.items()}))
    assert plan.fused_obstacle == "train.stream='bf16'"


@pytest.mark.parametrize("key", sorted(BASE.parallel.model_fields_set | {"tensor", "zero"}))
def test_the_fused_step_runs_copies_only(key):
    plan = make_plan(BASE.model_copy(update={"train": BASE.train}))
    assert plan.fused_obstacle is None
    layout = plan.layout.__class__(data=2, **{key: 2})
    object.__setattr__(plan, "layout", layout)
    assert plan.fused_obstacle == f"parallel.{key}=2"
