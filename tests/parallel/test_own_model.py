"""A module of somebody's own in the engine: what is known of it, how it starts, its numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.plan_estimates import plan_record, plan_state_bytes
from pentameter.parallel.assemble import assemble
from pentameter.parallel.sources.custom_model import OwnModel, model_source
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.sources.tied_parameters import give_memory, tie_within
from pentameter.planning.plan import make_plan

CPU = torch.device("cpu")
V, T, D = 11, 8, 4


def config(*, micro_batch_size=6, train=None, **sections) -> Config:
    return Config.model_validate(
        {
            "model": {
                "vocab_size": V,
                "context_length": T,
                "n_layers": 2,
                "n_heads": 2,
                "d_model": D,
            },
            "data": {"corpus": "grammar"},
            "train": {
                "steps": 10,
                "batch_size": 6,
                "micro_batch_size": micro_batch_size,
                **(train or {}),
            },
            **sections,
        }
    )


class Words(nn.Module):
    """Each token's logits from itself: a tied head, a dropout, a buffer that is not saved."""

    def __init__(self, p=0.0):
        super().__init__()
        [scale] = [x.item() for x in torch.linspace(0.5, 1, 1)]  # which `meta` cannot
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
        self.dropout = nn.Dropout(p)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("turn", torch.polar(torch.ones(D), torch.rand(D)), persistent=False)
        self.scale = scale

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)) * self.turn.real) * self.scale
        return self.head(x)


class WithLoss(Words):
    def forward(self, tokens, targets=None):
        logits = super().forward(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
        )


class NeedsTargets(WithLoss):
    def forward(self, tokens, targets):
        return super().forward(tokens, targets)


class Unsummed(WithLoss):
    def forward(self, tokens, targets):
        return super().forward(tokens)


class Leaving(Words):
    """A module of which a part has no part in the loss."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(D, D)


def build(config):
    return Words()


def build_dropping(config):
    return Words(0.5)


SOURCE = OwnModel(build, blocks="blocks.*")


def planned(source, settings):
    return make_plan(settings, outline_of=source.outline)


def engine_of(source, **changes):
    precision = changes.pop("precision", "fp64")
    return assemble(
        planned(source, config(**changes)), CPU, precision, compiled=False, source=source
    )


def batch():
    generator = np.random.default_rng(3)
    inputs = generator.integers(0, V, (6, T))
    targets = generator.integers(0, V, (6, T))
    for row in range(6):
        targets[row, row + 1 :] = -1
    return Batch(inputs, targets, np.arange(6))


def step_of(engine, step=0):
    loss = engine.forward_backward(batch(), step)
    return loss.mean, {name: p.grad for name, p in engine.named_parameters()}


def test_the_plan_counts_what_is_there():
    plan = planned(SOURCE, config())
    module = Words()
    assert [(spec.name, spec.shape) for spec in plan.table] == [
        (name, tuple(p.shape)) for name, p in module.named_parameters()
    ]
    assert plan.n_parameters == sum(p.numel() for p in module.parameters())
    assert plan.flops_per_token == 6 * (V * D + 2 * D * D)
    assert plan_state_bytes(plan).weights_bytes == 4 * plan.n_parameters
    assert plan_state_bytes(plan).optimizer_bytes == 8 * plan.n_parameters
    said = plan_record(plan)
    assert said["model"]["built_by"] == "test_own_model.py:build"
    assert said["communication"] is None
    muon = {spec.name for spec in plan.table if spec.is_block_matrix}
    assert muon == {"blocks.0.weight", "blocks.1.weight"}
    assert {spec.name for spec in plan.table if spec.decay} == muon | {"embedding.weight"}


def test_the_plan_divides_bytes_as_styles_and_shards_do():
    source = OwnModel(build, tensor_table=lambda config, stream: {"blocks.*": ColwiseParallel()})
    cut = planned(source, config(parallel={"tensor": 2}))
    blocks = 2 * (D * D + D)
    assert plan_state_bytes(cut).weights_bytes == 4 * (cut.n_parameters - blocks // 2)
    shared = planned(SOURCE, config(parallel={"zero": 3, "data": 2}, micro_batch_size=3))
    rows = -(-V // 2) * D + blocks // 2
    assert plan_state_bytes(shared).weights_bytes == 4 * rows


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"parallel": {"tensor": 2}}, "give pm.OwnModel a `tensor_table`"),
        ({"parallel": {"pipeline": 2}}, "give pm.OwnModel a `slice`"),
        ({"parallel": {"context": 2}}, "mixes its positions"),
        (
            {"train": {"precision": "bf16", "stream": "bf16"}},
            "train.stream='bf16' is of the built-in model",
        ),
        ({"parallel": {"tensor": 4, "tensor_mode": "2d"}}, "'2d' splits activations by row"),
        ({"lora": {"rank": 2}}, "give pm.OwnModel `blocks`"),
        ({"parallel": {"partition": "weighted"}}, "use 'uniform'"),
        ({"train": {"activation_checkpoint": "full"}}, "give pm.OwnModel `blocks`"),
        ({"optimizer": {"name": "muon"}}, "names none; give pm.OwnModel `blocks`"),
    ],
    ids=str,
)
def test_what_was_not_said_is_asked_for(settings, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        planned(OwnModel(build), config(micro_batch_size=None, **settings))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (OwnModel(lambda config: None), "returned NoneType"),
        (OwnModel(lambda config: nn.Identity()), "no parameters"),
        (OwnModel(build, blocks="layers.*"), "no sub-module is at 'layers.*'"),
        (
            OwnModel(build, tensor_table=lambda config, stream: {"up": ColwiseParallel()}),
            "`tensor_table`: no sub-module is at 'up'",
        ),
        (
            OwnModel(build, slice=lambda config, layers: nn.Linear(D, D)),
            "has weight of shape",
        ),
        (
            OwnModel(build, slice=lambda config, layers: nn.ModuleDict()),
            "of no slice of its layers",
        ),
    ],
)
def test_what_cannot_be_is_refused(source, said):
    settings = {} if source.slice is None else {"pipeline": 2}
    with pytest.raises(ConfigError, match=said):
        planned(source, config(micro_batch_size=None, parallel=settings))


class Patterned(nn.Module):
    """A slice of layers with a head that is not theirs, and a buffer that has values."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(V, D)  # in every slice: one parameter
        self.blocks = nn.ModuleDict({str(n): nn.Linear(D, D) for n in layers})
        self.gain = nn.ParameterDict({str(n): nn.Parameter(torch.empty(D)) for n in layers})
        self.register_buffer("pattern", torch.arange(D) % 2 == 0)

    def forward(self, x):
        x = self.embedding(x) if x.dtype == torch.int64 else x
        for name, block in self.blocks.items():
            x = x + block(x) * self.pattern * self.gain[name]
        return x


def init_patterned(config, path, module):
    assert all(child.is_meta for own in module.children() for child in own.parameters())
    if path == "gain":
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    else:
        module.reset_parameters()


def only_without_memory(config):
    """The whole module, which nobody may give memory to."""
    if not torch.empty(1).is_meta:
        raise AssertionError("the whole module was built with values")
    return Patterned(range(2))


BY_SLICE = OwnModel(
    only_without_memory,
    slice=lambda config, layers: Patterned(layers),
    init_weights=init_patterned,
)


def values_of(source, settings):
    """Name → initial value, of every slice, all of whose copies must agree."""
    plan = planned(source, settings)
    found = {}
    for number, layers in enumerate(plan.stages):
        model = source.build_slice(plan.config, layers, torch.float32)
        give_memory(model, CPU)
        source.initialize({number: model}, plan)
        for name, value in model.state_dict().items():
            assert torch.equal(found.setdefault(name, value), value)
    return found


class WithoutHead(nn.Module):
    """A slice of which only the first part has parameters."""

    def __init__(self, layers):
        super().__init__()
        if 0 in layers:
            self.embedding = nn.Embedding(V, D)

    def forward(self, x):
        return self.embedding(x) if x.dtype == torch.int64 else torch.sin(x)


def test_a_stage_without_parameters_is_refused_for_that():
    source = OwnModel(
        lambda config: WithoutHead(range(2)), slice=lambda config, layers: WithoutHead(layers)
    )
    with pytest.raises(ConfigError, match="has nothing to train, as its slice has no parameters"):
        planned(source, config(parallel={"pipeline": 2}, micro_batch_size=3))


def test_a_slice_is_initialised_without_the_others():
    state = torch.get_rng_state()
    parts = values_of(BY_SLICE, config(parallel={"pipeline": 2}, micro_batch_size=3))
    assert torch.equal(torch.get_rng_state(), state)
    assert {name for name in parts if "blocks" in name} == {
        f"blocks.{n}.{kind}" for n in range(2) for kind in ("weight", "bias")
    }
    assert parts["pattern"].tolist() == [True, False, True, False]
    whole = values_of(
        OwnModel(lambda config: Patterned(range(2)), init_weights=init_patterned), config()
    )
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert not torch.equal(whole["blocks.0.weight"], whole["blocks.1.weight"])
    other = values_of(BY_SLICE, config(parallel={"pipeline": 2}, micro_batch_size=3, seed=4))
    assert not torch.equal(other["gain.0"], whole["gain.0"])
    assert not torch.equal(whole["gain.0"], whole["gain.1"])


class Turned(nn.Module):
    """A slice of layers, each of which has a buffer that is drawn, and one that they share."""

    def __init__(self, layers):
        super().__init__()
        shared = nn.Module()
        shared.register_buffer("angles", torch.arange(D) / D)
        self.blocks = nn.ModuleDict()
        for n in layers:
            block = self.blocks[str(n)] = nn.Linear(D, D)
            block.register_buffer("turn", torch.rand(D))
            block.shared = shared

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x) * block.turn * block.shared.angles
        return x


def init_turned(config, path, module):
    module.reset_parameters()


@pytest.mark.parametrize("init_weights", [None, init_turned])
def test_a_buffer_is_the_same_in_a_slice_the_whole_and_what_is_loaded(init_weights):
    source = OwnModel(
        lambda config: Turned(range(2)),
        slice=lambda config, layers: Turned(layers),
        init_weights=init_weights,
    )
    whole = values_of(source, config())
    parts = values_of(source, config(parallel={"pipeline": 2}, micro_batch_size=3))
    loaded = source.build_whole(config(), torch.float32, CPU)  # the caller loads parameters
    assert not torch.equal(whole["blocks.0.turn"], whole["blocks.1.turn"])
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    for name, value in loaded.named_buffers():
        assert torch.equal(value, whole[name]), name


def test_slices_of_one_process_share_a_parameter_under_all_its_names():
    first, last = Words(), Words()
    tie_within([first, last], ["embedding.weight"])
    assert last.embedding.weight is last.head.weight is first.embedding.weight
    assert last.blocks[0].weight is not first.blocks[0].weight


def test_a_parameter_that_nobody_sets_is_named():
    source = OwnModel(
        lambda config: Patterned(range(2)), init_weights=lambda config, path, module: None
    )
    with pytest.raises(ConfigError, match=r"left embedding.weight \(11, 4\) without values"):
        values_of(source, config())


class Measured(nn.Module):
    """A loss of several inputs and targets."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 2)])

    def forward(self, inputs, targets):
        x, (weight,) = inputs["x"], inputs["more"]
        return ((self.blocks[0](x) - targets["y"]).square().sum(1) * weight).sum()


MEASURED = OwnModel(
    lambda config: Measured(), blocks="blocks.*", count_targets=lambda targets: len(targets["y"])
)


def measured_batch(n_rows=6):
    random = np.random.default_rng(2)
    inputs = {"x": random.normal(size=(n_rows, 3)).astype(np.float32)}
    inputs["more"] = (random.random(n_rows),)
    return Batch(inputs, {"y": random.normal(size=(n_rows, 2))}, np.arange(n_rows), count=n_rows)


def test_inputs_and_targets_have_any_structure():
    whole = engine_of(MEASURED)
    expected = whole.forward_backward(measured_batch(), 0)
    assert expected.n_targets == 6
    parts = engine_of(MEASURED, micro_batch_size=2)
    assert parts.forward_backward(measured_batch(), 0).mean == pytest.approx(expected.mean)
    for (name, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-13, atol=1e-15), name
    assert whole.evaluate(measured_batch()).mean == pytest.approx(expected.mean)
    assert len({measured_batch().hash(), measured_batch(5).hash()}) == 2


def test_adapters_alone_are_trained():
    settings = {"lora": {"rank": 2, "targets": ["0"]}}
    plan = planned(SOURCE, config(**settings))
    assert plan.n_trained == 2 * 2 * D
    assert plan.flops_per_token == 4 * (V * D + 2 * D * D) + 6 * 4 * D
    plain, adapted = engine_of(SOURCE), engine_of(SOURCE, **settings)
    tokens = torch.from_numpy(batch().inputs)
    assert torch.equal(adapted.model(tokens), plain.model(tokens))
    _, gradients = step_of(adapted)
    assert {name for name, each in gradients.items() if each is not None} == {
        "blocks.0.lora_a", "blocks.0.lora_b",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="'2', which is no linear layer"):
        planned(SOURCE, config(lora={"rank": 1, "targets": ["2"]}))


def test_a_module_is_no_function_that_builds_one():
    assert isinstance(model_source(None), GPTSource)
    assert model_source(build) == OwnModel(build)
    assert model_source(SOURCE) is SOURCE
    for wrong in (Words(), "build"):
        with pytest.raises(TypeError, match="function of the configuration"):
            model_source(wrong)


def test_it_starts_as_its_constructor_under_the_seed_leaves_it():
    state = torch.get_rng_state()
    engine = engine_of(SOURCE, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    expected = Words()
    model = engine.model
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.double())
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.turn, expected.turn)


@pytest.mark.parametrize("kind", [WithLoss, NeedsTargets])
def test_a_loss_of_its_own_is_the_step_s(kind):
    ours, gradients = step_of(engine_of(SOURCE))
    source = OwnModel(lambda config: kind())
    theirs, same = step_of(engine_of(source))
    assert theirs == pytest.approx(ours, rel=1e-14)
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-12, atol=1e-16)
    assert planned(source, config()).gives_logits == (kind is WithLoss)
    assert engine_of(source).evaluate(batch()).mean == pytest.approx(ours, rel=1e-14)


def test_a_loss_that_is_no_sum_is_refused():
    with pytest.raises(ConfigError, match=r"returned \(6, 8, 11\); it is to return the summed"):
        step_of(engine_of(OwnModel(lambda config: Unsummed())))


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_micro_batches_and_recomputation_change_nothing(recompute):
    whole, gradients = step_of(engine_of(SOURCE))
    train = {"activation_checkpoint": recompute}
    parts, same = step_of(engine_of(SOURCE, micro_batch_size=2, train=train))
    assert parts == pytest.approx(whole, rel=1e-14)
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_dropout_of_a_step_is_repeatable(recompute):
    source = OwnModel(build_dropping, blocks="blocks.*")
    train = {"activation_checkpoint": recompute}
    first = engine_of(source, micro_batch_size=2, train=train)
    loss, gradients = step_of(first)
    torch.rand(7)  # whatever else is drawn
    again, same = step_of(engine_of(source, micro_batch_size=2))
    assert again == loss
    assert all(torch.equal(same[name], gradients[name]) for name in gradients)
    other, _ = step_of(engine_of(source, micro_batch_size=2), step=1)
    assert other != loss
    assert first.evaluate(batch()).mean == first.evaluate(batch()).mean != loss


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_runs_in_less_precision(precision):
    true, gradients = step_of(engine_of(SOURCE))
    loss, rounded = step_of(engine_of(SOURCE, precision=precision))
    assert loss == pytest.approx(true, rel=1e-6 if precision == "fp32" else 0.01)
    largest = gradients["embedding.weight"].abs().max().item()
    error = (rounded["embedding.weight"] - gradients["embedding.weight"]).abs().max().item()
    assert rounded["embedding.weight"].dtype == torch.float32
    assert error < largest * (1e-5 if precision == "fp32" else 0.05)


def test_muon_takes_the_matrices_of_blocks():
    from pentameter.optim.build import build_optimizer

    settings = config(optimizer={"name": "muon"})
    engine = assemble(planned(SOURCE, settings), CPU, "fp32", compiled=False, source=SOURCE)
    optimizer = build_optimizer(
        engine.named_parameters(), engine.plan.table, engine.plan.config.optimizer
    )
    shapes = [tuple(p.shape) for group in optimizer.parts[0].param_groups for p in group["params"]]
    assert shapes == [(D, D), (D, D)]


def test_what_has_no_part_has_a_gradient_of_zero():
    _, gradients = step_of(engine_of(OwnModel(lambda config: Leaving())))
    assert torch.equal(gradients["unused.weight"], torch.zeros(D, D, dtype=torch.float64))
    assert gradients["blocks.0.weight"].abs().sum() > 0


def test_it_gives_logits_without_the_future():
    engine = engine_of(SOURCE)
    text = batch().inputs[:2, :5]
    expected = engine.model(torch.from_numpy(text))[:, -1]
    np.testing.assert_allclose(engine.next_logits(text), expected.detach().numpy(), rtol=1e-12)


@pytest.mark.slow
def test_compiled_code_takes_any_structure():
    plan = planned(MEASURED, config(micro_batch_size=2))
    compiled = assemble(plan, CPU, "fp64", compiled=True, source=MEASURED)
    expected = engine_of(MEASURED).forward_backward(measured_batch(), 0)
    assert compiled.forward_backward(measured_batch(), 0).mean == pytest.approx(expected.mean)


@pytest.mark.slow
def test_compiled_code_computes_the_same():
    plain = engine_of(OwnModel(build_dropping))
    plan = planned(SOURCE, config(micro_batch_size=2))
    compiled = assemble(plan, CPU, "fp64", compiled=True, source=SOURCE)
    loss, gradients = step_of(compiled)
    expected, true = step_of(engine_of(SOURCE))
    assert loss == pytest.approx(expected, rel=1e-13)
    for name, gradient in true.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-11, atol=1e-15)
    assert plain.evaluate(batch()).mean == pytest.approx(expected, rel=1e-13)


class KeptFromTraining(Words):
    """Its dropout is switched off by the model itself, as in a frozen backbone."""

    def __init__(self):
        super().__init__(0.5)
        self.dropout.eval()


def test_a_module_that_is_kept_from_training_stays_so_after_an_evaluation():
    source = OwnModel(lambda _: KeptFromTraining())
    plan = make_plan(config(), outline_of=source.outline)
    engine = assemble(plan, CPU, "fp32", compiled=False, source=source)
    tokens = np.arange(6 * (T + 1)).reshape(6, -1) % V
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.arange(6))
    before = engine.forward_backward(batch, 0).mean
    engine.evaluate(batch)
    assert engine.forward_backward(batch, 0).mean == before
    assert engine.model.blocks.training
    assert not engine.model.dropout.training
