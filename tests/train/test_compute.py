"""What the engine says it does is what the Engine does."""

import warnings

import pytest
import torch

from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.fused_cpu import native
from pentameter.machine.capabilities import (
    Capabilities,
    Compiler,
    GpuCapabilities,
    machine_capabilities,
)
from pentameter.machine.fastest_matmul import Ceiling
from pentameter.model import compiled
from pentameter.model.attention.dot_product import PLAIN_ATTENTION, DotProductAttention
from pentameter.model.experts import Experts
from pentameter.model.gpu.forms import PLAIN_FORMS, GpuForms
from pentameter.parallel.assemble import assemble
from pentameter.parallel.context import run_attention
from pentameter.parallel.precision import set_matmul_precision
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.layout_checks import uncompiled_blocks
from pentameter.planning.plan import make_plan
from pentameter.processes.group.world import World
from pentameter.train import compute
from pentameter.train.compute import choose_compute


def plan(*, checkpoint=None, precision="bf16", **model):
    base = {"vocab_size": 11, "context_length": 8, "n_layers": 1, "n_heads": 1, "d_model": 32}
    train = {"steps": 2, "batch_size": 2, "device": "cpu", "precision": precision}
    return make_plan(
        Config.model_validate(
            {
                "model": base | model,
                "data": {"corpus": "grammar"},
                "train": {**train, "compile": True, "activation_checkpoint": checkpoint},
            }
        )
    )


@pytest.fixture
def a_machine_with_amx(monkeypatch):
    monkeypatch.setattr(compute, "tune_allocator", lambda **options: False)
    monkeypatch.setattr(compute, "choose_compile", lambda *_, **__: (True, "asked for"))
    monkeypatch.setattr(compute, "ceiling", lambda *_: Ceiling(1e12))
    monkeypatch.setattr(native, "load", lambda name, _: None)
    monkeypatch.setattr(native, "_loaded", {"vector": object(), "AMX": object()})
    monkeypatch.setattr(compute, "rehearse", lambda *_: {})


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16", ("vector", "AMX")), ("fp32", ("vector",)), ("fp64", ())],
)
def test_the_kernels_of_a_precision_serve_the_fused_step(a_machine_with_amx, precision, expected):
    chosen = choose_compute(plan(precision=precision))
    assert chosen.native_kernels == expected
    assert chosen.environment()["native_kernels"] == list(expected)
    with_kernels = f"; with {' and '.join(expected)} kernels" if expected else ""
    assert chosen.compile_reason == f"asked for{with_kernels}"
    assert plan().fused_obstacle is None


def test_what_a_machine_lacks_is_said(a_machine_with_amx, monkeypatch):
    lacks = {"vector": None, "AMX": "the CPU has no AMX"}
    monkeypatch.setattr(native, "load", lambda name, _: lacks[name])
    chosen = choose_compute(plan())
    assert chosen.native_kernels == ("vector",)
    assert chosen.compile_reason == "asked for; with vector kernels; the CPU has no AMX"


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(), None),
        (Layout(data=2), None),
        (Layout(tensor=2), None),
        (Layout(data=2, zero=1), "parallel.zero=1"),
        (Layout(data=2, zero=3), "parallel.zero=3"),
        (Layout(data=2, expert=2), "parallel.expert=2"),
    ],
)
def test_blocks_that_stay_uncompiled_are_said_to(layout, reason):
    experts = plan(checkpoint="full", n_experts=2, d_expert=8).config
    said = uncompiled_blocks(experts, layout)
    assert said is None if reason is None else f"send in the middle with {reason}" in said
    assert uncompiled_blocks(plan(checkpoint="full").config, layout) is None
    assert uncompiled_blocks(plan(n_experts=2, d_expert=8).config, layout) is None


def test_the_reason_for_compiling_says_which_blocks_are_not(a_machine_with_amx, monkeypatch):
    monkeypatch.setattr(compute, "uncompiled_blocks", lambda config, layout: "but not these")
    assert choose_compute(plan(checkpoint="full")).compile_reason.endswith("; but not these")


class TwoMachines(World):
    """This process, and one of another machine, which cannot do everything."""

    def __init__(self, lacks_compiler: bool) -> None:
        super().__init__(rank=0, size=2, local_rank=0, local_size=1)
        object.__setattr__(self, "lacks_compiler", lacks_compiler)

    def on_main(self, action):
        return action()

    def all_gather(self, value):
        if isinstance(value, tuple):
            return [value, (False, "no compiler there") if self.lacks_compiler else value]
        return [value, value | {"AMX": "no AMX there"} if value else value]


@pytest.mark.parametrize("lacks_compiler", [True, False])
def test_what_one_machine_cannot_do_none_does(a_machine_with_amx, lacks_compiler):
    chosen = choose_compute(plan(), TwoMachines(lacks_compiler))
    assert chosen.native_kernels == (() if lacks_compiler else ("vector",))
    stays = native.serves("AMX", torch.float32, torch.bfloat16)
    assert stays is lacks_compiler  # unloaded, or never asked
    assert chosen.compiled is not lacks_compiler
    assert ("no compiler there" if lacks_compiler else "no AMX there") in chosen.compile_reason


def test_what_is_found_wrong_is_not_used_and_said(a_machine_with_amx, monkeypatch):
    levels = {"vector": "plain", "unfold": "-O2"}
    monkeypatch.setattr(compute, "rehearse", lambda *_: levels)
    monkeypatch.setattr(compiled, "_held", {})
    chosen = choose_compute(plan())
    assert chosen.native_kernels == ("AMX",)
    assert compiled.refused() == {"unfold": "-O2"}
    assert chosen.compile_reason == (
        "asked for; with AMX kernels; not as this compiler makes them: unfold built with -O2, "
        "vector left to PyTorch"
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"norm_position": "post"}, "does not know model.norm_position='post'"),
        ({"checkpoint": "full"}, "does not know train.activation_checkpoint='full'"),
    ],
)
def test_kernels_are_not_claimed_where_they_do_not_serve(a_machine_with_amx, settings, reason):
    chosen = choose_compute(plan(**settings))
    assert chosen.native_kernels == ()
    assert reason in chosen.compile_reason
    assert chosen.environment()["native_kernels"] == []


def test_amx_kernels_serve_what_their_attention_does_not_take(a_machine_with_amx):
    chosen = choose_compute(plan(n_heads=2))
    assert "AMX" in chosen.native_kernels
    assert "not for attention: the AMX kernels want heads of a multiple" in chosen.compile_reason


@pytest.fixture
def a_machine_with_a_gpu(monkeypatch):
    cpu = machine_capabilities().cpu
    gpu = GpuCapabilities("NVIDIA H100 80GB HBM3", "sm_90", 80 * 10**9)
    here = Capabilities(cpu, (gpu,), "cuda 13.0", mps=False)
    monkeypatch.setattr(compute, "machine_capabilities", lambda: here)
    monkeypatch.setattr(compute, "choose_compile", lambda *_, **__: (True, "asked for"))
    monkeypatch.setattr(compute, "device_name", lambda *_: gpu.name)
    monkeypatch.setattr(compute, "set_matmul_precision", lambda *_: None)
    looked_at = []

    def looked(model, dtype, device):
        looked_at.append((model.attention.dropout, dtype, device.type))

    monkeypatch.setattr(compute, "kernel_obstacle", looked)
    return looked_at


def on_gpu(**model):
    built = plan(**model)
    train = built.config.train.model_copy(update={"device": "cuda"})
    return make_plan(built.config.model_copy(update={"train": train}))


def test_kernels_that_agree_drop_attention_weights(a_machine_with_a_gpu):
    chosen = choose_compute(on_gpu(attention_dropout=0.2))
    assert a_machine_with_a_gpu == [(0.2, torch.bfloat16, "cuda")]
    assert chosen.forms.drops_by_blocks
    assert "drops_by_blocks" not in chosen.forms.obstacles
    assert not choose_compute(on_gpu()).forms.drops_by_blocks  # which drops nothing
    assert len(a_machine_with_a_gpu) == 1


def test_kernels_that_do_not_agree_are_left_with_the_reason(a_machine_with_a_gpu, monkeypatch):
    monkeypatch.setattr(compute, "kernel_obstacle", lambda *_: "their dq is off by 3.0e-01")
    chosen = choose_compute(on_gpu(attention_dropout=0.2))
    assert not chosen.forms.drops_by_blocks
    assert chosen.forms.obstacles["drops_by_blocks"] == "their dq is off by 3.0e-01"
    chosen = choose_compute(on_gpu(attention_dropout=0.2, n_heads=1, d_model=256))
    assert "heads of 256 channels" in chosen.forms.obstacles["drops_by_blocks"]


def test_kernels_that_one_machine_cannot_use_none_uses(a_machine_with_a_gpu, monkeypatch):
    class Others(TwoMachines):
        def all_gather(self, value):
            if not isinstance(value, dict):
                return [value, value]
            return [value, {**value, "drops_by_blocks": "no Triton there"}]

    monkeypatch.setattr(compute, "local_device", lambda device, world: device)
    chosen = choose_compute(on_gpu(attention_dropout=0.2), Others(lacks_compiler=False))
    assert chosen.forms.obstacles["drops_by_blocks"] == "no Triton there"


def test_an_engine_drops_in_kernels_where_it_is_told_to(monkeypatch):
    in_kernels = DotProductAttention()
    monkeypatch.setattr(run_attention, "_kernel_attention", lambda: in_kernels)

    def attends_by(**chosen):
        dropping = plan(attention_dropout=0.2)
        engine = assemble(dropping, torch.device("cpu"), "fp32", compiled=False, **chosen)
        return {block.attention.attend for block in engine.model.blocks.values()}

    assert attends_by() == {PLAIN_ATTENTION}
    assert attends_by(forms=GpuForms(drops_by_blocks=True)) == {in_kernels}


def test_forms_that_agree_on_every_rank_are_taken(a_machine_with_a_gpu, monkeypatch):
    class Others(TwoMachines):
        def all_gather(self, value):
            if not isinstance(value, dict):
                return [value, value]
            return [value, {**value, "one_pass_loss": "the loss is off by 1.0e-01"}]

    tried = []
    monkeypatch.setattr(compute, "sums_obstacle", lambda *asked: tried.append(asked))
    monkeypatch.setattr(compute, "loss_obstacle", lambda *asked: tried.append(asked))
    monkeypatch.setattr(compute, "local_device", lambda device, world: device)
    gpu = torch.device("cuda")
    chosen = choose_compute(on_gpu())
    model = plan().config.model
    sizes = (model.padded_vocab_size, model.vocab_size, None)
    assert tried == [(torch.bfloat16, gpu), (torch.bfloat16, gpu, *sizes)]
    assert chosen.forms == GpuForms(precise_sums=True, one_pass_loss=True)
    assert chosen.environment()["gpu_forms"] == {
        "drops_by_blocks": False,
        "experts_at_once": False,
        "precise_sums": True,
        "one_pass_loss": True,
        "fused_ring": False,
    }
    chosen = choose_compute(on_gpu(), Others(lacks_compiler=False))
    assert chosen.forms == GpuForms(precise_sums=True)
    assert chosen.forms.obstacles == {"one_pass_loss": "the loss is off by 1.0e-01"}


@pytest.mark.parametrize("obstacle", [None, "their dq is off by 3.0e-01"])
def test_a_ring_of_gpus_runs_by_kernels_that_agree(a_machine_with_a_gpu, monkeypatch, obstacle):
    tried = []

    def looked(model, dtype, device):
        tried.append((dtype, device.type))
        return obstacle

    monkeypatch.setattr(compute, "ring_obstacle", looked)
    built = on_gpu().config
    parallel = built.parallel.model_copy(update={"context": 2})
    ring = make_plan(built.model_copy(update={"parallel": parallel}), world_size=2)
    chosen = choose_compute(ring)
    assert tried == [(torch.bfloat16, "cuda")]
    assert chosen.forms.fused_ring is (obstacle is None)
    assert chosen.forms.obstacles.get("fused_ring") == obstacle
    assert not choose_compute(on_gpu()).forms.fused_ring  # which has no ring
    assert len(tried) == 1


def test_what_a_gpu_lacks_leaves_the_plain_forms(a_machine_with_a_gpu):
    """Here it lacks everything: the machine has no GPU."""
    chosen = choose_compute(on_gpu())
    assert chosen.forms == PLAIN_FORMS
    assert set(chosen.forms.obstacles) == {"precise_sums", "one_pass_loss"}


def test_widths_that_the_vector_kernels_do_not_take_are_named(a_machine_with_amx):
    chosen = choose_compute(plan(d_model=20, precision="fp32"))
    assert chosen.native_kernels == ("vector",)  # for the activations, of 80 channels
    assert "multiples of 16, not model.d_model=20" in chosen.compile_reason
    assert "feed_forward.width" not in chosen.compile_reason
    chosen = choose_compute(plan(d_model=20, d_ff=24, precision="fp32"))
    assert chosen.native_kernels == ()
    assert "not model.d_model=20, model.feed_forward.width=24" in chosen.compile_reason


@pytest.mark.parametrize(
    ("setting", "precision", "expected"),
    [
        (None, "fp32", "highest"),
        (None, "tf32", "high"),
        ("medium", "fp32", "medium"),
        ("highest", "tf32", "highest"),
    ],
)
def test_matmul_precision(setting, precision, expected):
    before = torch.get_float32_matmul_precision()
    try:
        whole = plan()
        train = whole.config.train.model_copy(update={"matmul_precision": setting})
        config = whole.config.model_copy(update={"train": train})
        assemble(make_plan(config), torch.device("cpu"), precision, compiled=False)
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_compilers_advice_on_a_matmul_precision_is_not_shown():
    """torch/_inductor/compile_fx.py gives it on any GPU with TF32 whose precision is `highest`."""
    with warnings.catch_warnings(record=True) as shown:
        set_matmul_precision(None, "fp32")
        warnings.warn("TensorFloat32 tensor cores for float32 matrix …", stacklevel=1)
    assert not shown


@pytest.mark.parametrize(
    ("precision", "measured"),
    [("fp64", torch.float64), ("fp32", torch.float32), ("fp16", torch.float32)],
)
def test_what_a_cpu_emulates_is_a_share_of_what_it_computes_in(monkeypatch, precision, measured):
    """fp16's own products are slow where nothing but the training's are fast."""
    asked = []
    monkeypatch.setattr(compute, "tune_allocator", lambda **options: False)
    monkeypatch.setattr(
        compute, "ceiling", lambda _name, _device, dtype, *_: asked.append(dtype) or Ceiling(1e12)
    )
    train = {"steps": 2, "batch_size": 2, "device": "cpu", "precision": precision, "compile": False}
    choose_compute(make_plan(Config.model_validate({**plan().config.model_dump(), "train": train})))
    assert asked == [measured]


EXPERTS = {"n_experts": 4, "d_expert": 16}


@pytest.fixture
def experts_tried(a_machine_with_a_gpu, monkeypatch):
    """The sizes with which experts at once are tried on the GPU that is not there."""
    tried = []
    monkeypatch.setattr(compute, "at_once_disagreement", lambda *sizes: tried.append(sizes))
    return tried


def test_experts_that_agree_are_multiplied_at_once(experts_tried):
    chosen = choose_compute(on_gpu(**EXPERTS))
    assert experts_tried == [(4, 32, 16, torch.device("cuda"))]
    assert chosen.forms.experts_at_once
    assert chosen.environment()["gpu_forms"]["experts_at_once"] is True
    dense = choose_compute(on_gpu())
    assert not dense.forms.experts_at_once
    assert len(experts_tried) == 1


def test_experts_that_cannot_be_multiplied_at_once_are_not_tried(experts_tried):
    chosen = choose_compute(on_gpu(**EXPERTS, bias=True))
    assert not chosen.forms.experts_at_once
    assert chosen.forms.obstacles["experts_at_once"] == "model.bias=true"
    assert experts_tried == []


def test_experts_that_do_not_agree_are_multiplied_one_after_another(experts_tried, monkeypatch):
    monkeypatch.setattr(compute, "at_once_disagreement", lambda *_: "their y is off by 3.0e-01")
    chosen = choose_compute(on_gpu(**EXPERTS))
    assert not chosen.forms.experts_at_once
    assert chosen.forms.obstacles["experts_at_once"] == "their y is off by 3.0e-01"


@pytest.mark.parametrize("at_once", [True, False])
def test_the_engine_multiplies_experts_as_it_is_told(at_once):
    forms = GpuForms(experts_at_once=at_once)
    engine = assemble(plan(**EXPERTS), torch.device("cpu"), "bf16", compiled=False, forms=forms)
    found = [each.at_once for each in engine.models[0].modules() if isinstance(each, Experts)]
    assert found == [at_once]


def test_8_bits_are_refused_where_a_gpu_has_none_and_emulated_on_a_cpu():
    def check(device):
        on = compute._Choosing(plan(), World(), capabilities, torch.device(device), "bf16")
        on.check_matmuls("fp8")

    gpu = GpuCapabilities("NVIDIA A100", "sm_80", 2**36)
    capabilities = Capabilities(machine_capabilities().cpu, (gpu,), "cuda 13.0", mps=False)
    check("cpu")
    with pytest.raises(ConfigError, match=r"'fp8' is not possible on NVIDIA A100: .* 8\.9"):
        check("cuda:0")


def test_kernels_that_cannot_be_built_are_tried_once(monkeypatch):
    tried = []

    def load(name, _):
        tried.append(name)
        return "the compiler fails"

    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(compute, "compiler_command", lambda: "g++")
    monkeypatch.setattr(compute, "find_compiler", lambda *_: Compiler("g++", True, "g++ builds"))
    monkeypatch.setattr(compute, "ceiling", lambda *_: Ceiling(1e12))
    monkeypatch.setattr(compute, "rehearse", lambda *_: {})
    chosen = choose_compute(plan(precision="fp32"))
    assert chosen.compiled
    assert tried == ["vector"]
    assert "; the compiler fails" in chosen.compile_reason


@pytest.mark.parametrize(
    ("model", "precision", "expected"),
    [
        ({"context_length": 32, "n_heads": 2}, "bf16", "kernels in C++"),
        ({"context_length": 24, "n_heads": 2}, "bf16", None),
        ({"context_length": 32, "n_heads": 4}, "bf16", None),
        ({"context_length": 32, "d_model": 40}, "bf16", None),
        ({"context_length": 32, "n_heads": 2}, "fp64", None),
        ({"context_length": 32, "attention": {"sliding_window": 8}}, "bf16", None),
    ],
)
def test_what_is_compiled_is_known_before_it_is(monkeypatch, model, precision, expected):
    monkeypatch.setattr(native, "machine_obstacle", lambda *_: None)
    planned, here = plan(precision=precision, **model), machine_capabilities()
    for device, made in (("cpu", expected), ("cuda", None)):
        on = compute._Choosing(planned, World(), here, torch.device(device), precision)
        assert on._makes() == made
