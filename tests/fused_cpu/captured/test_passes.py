"""A step's passes that are captured once and replayed have the bits of those that are not."""

import gc

import numpy as np
import pytest
import torch

from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch
from pentameter.errors import ConfigError
from pentameter.fused_cpu import functions, native
from pentameter.fused_cpu.captured import matmul_parts, passes
from pentameter.fused_cpu.captured.native_calls import NativeCalls
from pentameter.fused_cpu.captured.passes import CapturedPasses
from pentameter.model import compiled
from pentameter.model.compiled import plainly
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan

CPU = torch.device("cpu")
SIZES = {"vocab_size": 13, "context_length": 32, "n_layers": 2, "n_heads": 2, "d_model": 64}
DROPPING = {"dropout": 0.2, "attention_dropout": 0.1, "bias": True, "qkv_bias": True}
VARIANTS = {
    "gelu": DROPPING,
    "llama": {
        **{"activation": "swiglu", "positions": "rotary", "norm": "rmsnorm", "tied_head": True},
        **{"n_heads": 4, "n_kv_heads": 2, "head_size": 32, "qk_norm": "head"},
    },
    "experts": {
        **{"n_experts": 4, "experts_per_token": 2, "d_expert": 32, "dense_layers": 1},
        **{"activation": "swiglu", "balance": "bias", "router_z_loss": 1e-3},
    },
}
ROWS = 12


def engine_of(variant="gelu", micro_batch_size=4, precision="bf16", **model):
    config = {
        "model": SIZES | VARIANTS[variant] | model,
        "data": {"corpus": "grammar"},
        "train": {"steps": 10, "batch_size": ROWS, "micro_batch_size": micro_batch_size},
    }
    return assemble(make_plan(Config.model_validate(config)), CPU, precision, compiled=True)


def batch_of(step, rows=ROWS):
    """As many targets in each step as its number says, and some more."""
    generator = np.random.default_rng(step)
    inputs, targets = (generator.integers(0, 13, (rows, 32)) for _ in range(2))
    targets[step % rows, step:] = -1
    return Batch(inputs, targets, np.arange(rows))


def trained(engine, steps):
    """The losses of these steps, their gradients, and all parameters and buffers at the end."""
    found = []
    for step in steps:
        found.append(torch.tensor(engine.forward_backward(batch_of(step), step).total))
        for parameter in engine.parameters():
            if parameter.grad is not None:
                found.append(parameter.grad.clone())
                parameter.data.sub_(parameter.grad)
        engine.zero_gradients()
    return [*found, *engine.parameters(), *engine.model.buffers()]


def never_captured(engine):
    engine._stages._captured = None
    return engine


def are_equal(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are captured, as a list that grows."""
    made = []

    class Graph(passes._Graph):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(passes, "_Graph", Graph)
    return made


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("micro_batch_size", [ROWS, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_have_the_bits_of_what_they_replay(
    loaded, graphs, variant, micro_batch_size, precision
):
    engines = [engine_of(variant, micro_batch_size, precision) for _ in range(2)]
    expected = trained(never_captured(engines[1]), range(4))
    assert not graphs
    assert are_equal(trained(engines[0], range(4)), expected)
    if variant != "experts":  # which ask for their numbers of rows where no kernel multiplies
        assert len(graphs) == 1


def test_threads_multiply_parts(loaded, graphs, monkeypatch):
    monkeypatch.setattr(matmul_parts, "_is_equal", lambda *_: True)  # whatever the processor
    engine = engine_of()
    trained(engine, range(1))
    (graph,) = graphs
    runs = [run for run, _, _ in graph._operations]
    assert any(isinstance(run, NativeCalls) for run in runs)
    assert not any(run in (torch.mm, torch.bmm) for run in runs)


@pytest.mark.parametrize(
    ("array", "wrong", "said"),
    [
        ("targets", 13, r"batch.targets from -1 to 13, outside -1 … 12 .*; -1 is a target that"),
        ("targets", -100, "batch.targets from -100 to"),  # as elsewhere none is called
        ("inputs", 13, r"batch.inputs from 0 to 13, outside 0 … 12 \(model.vocab_size=13\)$"),
        ("inputs", -1, "batch.inputs from -1 to"),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused(loaded, graphs, array, wrong, said):
    """Kernels read where an id says, captured ones without a look at it."""
    engine = engine_of()
    trained(engine, range(1))
    batch = batch_of(1)
    getattr(batch, array)[3, 4] = wrong
    for read in (lambda it: engine.forward_backward(it, 1), engine.evaluate, engine.row_losses):
        with pytest.raises(ConfigError, match=said):
            read(batch)


@pytest.mark.parametrize("hold", [lambda g: g, lambda g: g.detach().view(-1)[1:]])
def test_gradients_that_are_held_stay_as_they_are(loaded, graphs, hold):
    """A hook, or an optimizer, may keep the gradient of the step before."""
    found, expected = engine_of(), never_captured(engine_of())
    kept, values, replays = None, None, []
    for step in range(5):
        for engine in (found, expected):
            engine.forward_backward(batch_of(step), step)
        assert are_equal(
            [each.grad for each in found.parameters()],
            [each.grad for each in expected.parameters()],
        )
        if kept is not None:
            assert torch.equal(kept, values)
        gradient = next(iter(found.parameters())).grad
        replays.append(graphs[0]._memory.alias(gradient) is not None)
        kept = hold(gradient) if step < 3 else None
        del gradient
        values = None if kept is None else kept.clone()
        for engine in (found, expected):
            engine.zero_gradients()
    assert replays == [True, False, True, False, True]
    assert len(graphs) == 1


def test_kernels_on_tiles_are_replayed(loaded, emulated_tiles, graphs):
    found, expected = engine_of(), never_captured(engine_of())
    assert are_equal(trained(found, range(3)), trained(expected, range(3)))
    assert len(graphs) == 1


def test_other_shapes_and_parameters_elsewhere_are_captured_anew(loaded, graphs):
    found, expected = engine_of(), never_captured(engine_of())
    for engine in (found, expected):
        engine.forward_backward(batch_of(0, 6), 0)
        engine.zero_gradients()
    assert are_equal(trained(found, range(2)), trained(expected, range(2)))
    assert len(graphs) == 2
    for engine in (found, expected):
        for parameter in engine.parameters():
            parameter.data = parameter.data.clone()
    assert are_equal(trained(found, range(2, 4)), trained(expected, range(2, 4)))
    assert len(graphs) == 3


def test_gradients_that_are_there_are_added_to(loaded):
    found = []
    for engine in (engine_of(), never_captured(engine_of())):
        engine.forward_backward(batch_of(0), 0)
        engine.forward_backward(batch_of(1), 1)
        found.append([parameter.grad for parameter in engine.parameters()])
    assert are_equal(*found)


@pytest.mark.parametrize("variant", ["gelu", "experts"])
def test_what_is_compiled_is_not_captured(loaded, graphs, monkeypatch, variant):
    """It is called in the backward pass, after a router's buffers have changed."""
    monkeypatch.setattr(
        functions, "sum_rows", compiled.Kernel(lambda x: x.flatten(0, -2).float().sum(0))
    )
    monkeypatch.setattr(compiled.Kernel, "_level", lambda *_: "plain")
    model = {"bias": True, "qkv_bias": True}
    found = engine_of(variant, **model)
    expected = never_captured(engine_of(variant, **model))
    assert are_equal(trained(found, range(2)), trained(expected, range(2)))
    assert not graphs


def test_what_depends_on_a_number_is_not_captured():
    module = torch.nn.Linear(2, 1)

    def passes(x):
        loss = module(x).sum() if x.sum() > 0 else -module(x).sum()
        loss.backward()
        return loss.detach()

    replayed = CapturedPasses(passes, module)
    for x in (torch.ones(3, 2), -torch.ones(3, 2)):
        module.zero_grad()
        assert torch.equal(replayed(x), passes(x))


def test_a_profiler_sees_what_is_replayed_otherwise(loaded):
    engine, expected = engine_of(), trained(never_captured(engine_of()), range(3))
    found = trained(engine, range(1))
    with torch.profiler.profile() as profile:
        found = found[: -len(engine.parameters())] + trained(engine, range(1, 2))
    assert "AddNormBackward" in {each.key for each in profile.key_averages()}
    found = found[: -len(engine.parameters())] + trained(engine, range(2, 3))
    assert are_equal(found, expected)


def test_a_capture_takes_as_much_memory_as_live_tensors():
    memory = passes._Memory()
    first = memory.take_like(torch.empty(100))
    second = memory.take_like(torch.empty(3, 5, dtype=torch.bfloat16).t())
    assert (second.shape, second.stride(), second.dtype) == ((5, 3), (1, 5), torch.bfloat16)
    assert second.data_ptr() == first.data_ptr() + 448
    view, place = first[3:], first.data_ptr()
    del first
    third = memory.take_like(torch.empty(90))
    assert third.data_ptr() > second.data_ptr()  # the view holds the place
    alias = memory.alias(view)
    assert alias is not None
    assert (alias.data_ptr(), alias.shape) == (view.data_ptr(), view.shape)
    del view
    assert memory.take_like(torch.empty(90)).data_ptr() == place
    assert memory.alias(torch.empty(3)) is None
    del second, third
    gc.collect()
    assert [n_bytes for _, n_bytes in memory._free] == [passes.CHUNK]


def test_memory_grows_by_what_there_is(monkeypatch):
    monkeypatch.setattr(passes, "CHUNK", 128)
    memory = passes._Memory()
    held = [memory.take_like(torch.empty(n, dtype=torch.uint8)) for n in (64, 100, 128, 500)]
    for number, x in enumerate(held):
        x.fill_(number)
    assert [int(x.float().mean()) for x in held] == [0, 1, 2, 3]
    assert [len(chunk) for chunk in memory._chunks] == [128, 128, 256, 512]


def test_calls_of_kernels_are_told(loaded):
    told = []
    with native.telling(lambda *call: told.append(call)), plainly():
        native.call("vector", "transpose", torch.empty(4, 4), torch.ones(4, 4), 4, 4, 4)
    native.call("vector", "transpose", torch.empty(4, 4), torch.ones(4, 4), 4, 4, 4)
    ((again, arguments),) = told
    out = arguments[0].fill_(7)
    NativeCalls([again])()
    assert torch.equal(out, torch.ones(4, 4))
