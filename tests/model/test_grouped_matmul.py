"""Matmuls of rows sorted by group: at once or one group after another, on whose word, and how often
the host waits for a GPU. META tensors stand for a GPU's: reading one on the host raises."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch.utils._python_dispatch import TorchDispatchMode

from pentameter.config.schema import ModelConfig
from pentameter.machine.capabilities import GpuCapabilities
from pentameter.model import grouped_matmul
from pentameter.model.experts import Experts
from pentameter.model.gpt import build_model
from pentameter.model.gpu.forms import obstacle_of
from pentameter.model.grouped_matmul import (
    Groups,
    at_once_disagreement,
    at_once_obstacle,
    groups_of,
    rows_at_once,
)
from pentameter.model.matmul import PLAIN
from pentameter.model.positions import Positions

CPU, META = torch.device("cpu"), torch.device("meta")
READING = [
    "ends_on_host",
    "grouped_linear",
    "grouped_input_gradient",
    "grouped_weight_gradient",
    "grouped_bias_gradient",
]
WITHOUT_READING = [f"{name}_at_once" for name in READING[1:4]]
E, D, F = 4, 32, 24
MODEL = ModelConfig(
    vocab_size=19, context_length=10, n_layers=1, n_heads=2, d_model=D, n_experts=E, d_expert=F
)
ENDS = {
    "all rows": [9, 20, 33, 40],
    "an empty group first": [0, 20, 33, 40],
    "empty groups": [17, 17, 17, 40],
    "one group only": [0, 0, 40, 40],
    "rows behind": [3, 3, 20, 31],
    "no rows in groups": [0, 0, 0, 0],
}


@pytest.mark.parametrize("name", READING + WITHOUT_READING)
def test_no_cuda_graph_records_what_the_host_reads(name: str) -> None:
    """By Inductor's own judgement, and by the tag alone for releases that judge otherwise."""
    op = getattr(torch.ops.pentameter, name).default
    node = SimpleNamespace(target=op, meta={}, args=(), kwargs={})
    assert is_cudagraph_unsafe_fx_node(node) == (name in READING)
    assert (torch.Tag.cudagraph_unsafe in op.tags) == (name in READING)


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_at_once_gives_what_one_after_another_gives(ends: list[int]) -> None:
    """Results and gradients, also of empty groups, and 0 behind the last end whatever was in that
    memory, in the rows and in the gradient."""
    x, weight, g = drawn((40, D), (E, F, D), (40, F))
    x[ends[-1] :], g[ends[-1] :] = torch.inf, torch.nan
    found = []
    for at_once in (True, False):
        torch.full((1 << 20,), torch.nan)  # freed at once: memory for results, not of zeros
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        groups = groups_of(x, torch.tensor(ends), at_once=at_once, holds_all=ends[-1] == 40)
        assert groups.ends.dtype == (torch.int32 if at_once else torch.int64)
        y = PLAIN.grouped_linear(*inputs, None, groups)
        found.append([y, *torch.autograd.grad(y, inputs, g)])
    # Each number is a sum in float32 of at most 40 products, rounded once.
    torch.testing.assert_close(found[0], found[1], rtol=2**-7, atol=1e-5)
    for at_once in found[0][:2]:
        assert not at_once[ends[-1] :].any()


def test_a_rank_without_rows_gets_zeros_and_a_gradient() -> None:
    x, weight = torch.empty(0, D).bfloat16(), drawn((E, F, D))[0].requires_grad_()
    groups = Groups(torch.zeros(E, dtype=torch.int32), at_once=True, holds_all=True)
    y = PLAIN.grouped_linear(x, weight, None, groups)
    y.sum().backward()
    assert y.shape == (0, F)
    assert weight.grad is not None
    assert not weight.grad.any()


class Reads(TorchDispatchMode):
    """Counts the operations that wait for a GPU's numbers and give them to the host."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += "ends_on_host" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("capacity", [None, 0.75])
@pytest.mark.parametrize(("at_once", "n_reads"), [(True, 0), (False, 1)])
def test_the_host_waits_once_a_layer_or_not_at_all(at_once, n_reads, capacity, monkeypatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # META has none
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    tables = {"experts": MODEL.experts.model_copy(update={"capacity": capacity})}
    config = MODEL.model_copy(update=tables)
    experts = build_model(config, 0).train().blocks["0"].get_submodule("experts")
    assert isinstance(experts, Experts)
    experts.to(META, torch.bfloat16)
    experts.at_once = at_once
    x = torch.empty(3, 10, D, device=META, dtype=torch.bfloat16, requires_grad=True)
    where = torch.arange(10, device=META)
    with Reads() as reads:
        y = experts(x, Positions(where, where, None))
        y.sum().backward()
    assert reads.n == n_reads
    assert x.grad is not None


@pytest.mark.parametrize("holds_all", [True, False])
def test_what_multiplies_at_once_reads_nothing(holds_all: bool) -> None:
    """The body of the operations, which META tensors alone would not enter."""
    rows, weight, ends = (
        torch.empty(shape, device=META, dtype=dtype)
        for shape, dtype in (
            ((40, D), torch.bfloat16), ((E, F, D), torch.bfloat16), ((E,), torch.int32)
        )
    )  # fmt: skip
    assert rows_at_once(rows, weight.mT, ends, holds_all).shape == (40, F)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        ends.tolist()


def test_only_bf16_is_multiplied_at_once() -> None:
    """In evaluation without autocast, weights are float32."""
    experts = build_model(MODEL, 0).blocks["0"].get_submodule("experts")
    assert isinstance(experts, Experts)
    seen = []
    experts.down.forward = lambda rows, groups: seen.append(groups.at_once) or rows
    experts.at_once = True
    rows, ends = torch.zeros(E, D), torch.arange(1, E + 1)
    experts.expert_outputs(rows, ends)
    with torch.autocast("cpu", torch.bfloat16):
        experts.expert_outputs(rows, ends)
    experts.at_once = False
    experts.expert_outputs(rows.bfloat16().float(), ends)
    assert seen == [False, True, False]


def test_tokens_are_rounded_before_they_are_sorted() -> None:
    """Copies of rows and their gradients are bf16, and gate and up read one tensor."""
    sizes = {**MODEL.feed_forward.model_dump(exclude_none=True), "activation": "swiglu"}
    config = ModelConfig.model_validate(
        {**MODEL.model_dump(exclude_none=True), "feed_forward": sizes}
    )
    found = {}
    for at_once in (True, False):
        experts = build_model(config, 0).train().blocks["0"].get_submodule("experts")
        assert isinstance(experts, Experts)
        assert experts.gate is not None
        experts.at_once = at_once
        read: list[Tensor] = []
        for linear in (experts.gate, experts.up):
            linear.register_forward_pre_hook(lambda _, given, read=read: read.append(given[0]))
        x = torch.randn(3, 10, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
        where = torch.arange(10)
        with torch.autocast("cpu", torch.bfloat16):
            y = experts(x, Positions(where, where, None))
        y.square().sum().backward()
        assert read[0] is read[1]
        assert read[0].dtype == (torch.bfloat16 if at_once else torch.float32)
        assert x.grad is not None
        found[at_once] = y.detach(), x.grad
    # Gradients of gate's and up's rows, and of a token's two copies, are added in bf16.
    for one, other, roundings in zip(found[True], found[False], (1, 4), strict=True):
        bound = roundings * 2**-8 * other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=bound)


# -- the choice -----------------------------------------------------------------------------------


def gpu(architecture: str) -> GpuCapabilities:
    return GpuCapabilities("a GPU", architecture, 80 * 10**9)


@pytest.mark.parametrize(
    ("architecture", "obstacle"),
    [
        ("sm_90", None),
        ("sm_100", None),
        ("sm_103", None),
        ("sm_80", "PyTorch's kernel is for compute capability 9.x or 10.x, not sm_80"),
        ("sm_89", "PyTorch's kernel is for compute capability 9.x or 10.x, not sm_89"),
        ("sm_120", "PyTorch's kernel is for compute capability 9.x or 10.x, not sm_120"),
        ("gfx942", "PyTorch's kernel is for compute capability 9.x or 10.x, not gfx942"),
    ],
)
def test_only_chips_with_a_kernel_multiply_at_once(architecture, obstacle) -> None:
    assert at_once_obstacle(MODEL, E, F, torch.bfloat16, gpu(architecture)) == obstacle


def test_what_the_kernel_does_not_take_is_named() -> None:
    def obstacle(n_experts=E, width=F, dtype=torch.bfloat16, **keys):
        return at_once_obstacle(
            MODEL.model_copy(update=keys), n_experts, width, dtype, gpu("sm_90")
        )

    assert obstacle() is None
    assert obstacle(dtype=torch.float32) == "they are in float32, PyTorch's kernel in bfloat16"
    assert obstacle(dtype=torch.float16) == "they are in float16, PyTorch's kernel in bfloat16"
    assert obstacle(bias=True) == "model.bias=true"
    assert obstacle(d_model=36) == "model.d_model=36 is no multiple of 8"
    assert obstacle(width=12) == "an expert's width on a rank=12 is no multiple of 8"
    assert obstacle(n_experts=1024) == "1024 experts, more than 1023"


@pytest.mark.parametrize("n_experts", [1, 2, E, 64])
def test_a_device_that_is_right_is_taken(n_experts: int) -> None:
    assert at_once_disagreement(n_experts, D, F, CPU) is None


@pytest.mark.parametrize("fault", ["garbage behind", "an empty group", "a wrong product", "nan"])
def test_a_device_that_is_wrong_is_not(fault: str, monkeypatch) -> None:
    multiply = torch.nn.functional.grouped_mm

    def wrong(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        y = multiply(a, b, offs=offs)
        if fault == "an empty group" and y.ndim == 3:
            y[1] = 1.0
        elif fault == "a wrong product":
            y[0] *= 1.05
        elif fault == "nan":
            y[0] = torch.nan
        return y

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", wrong)
    if fault == "garbage behind":  # which nobody zeroes
        monkeypatch.setattr(Tensor, "masked_fill_", lambda y, *_: y.new_ones(y.shape))
    said = at_once_disagreement(E, D, F, CPU)
    assert said is not None
    assert "is off by" in said


def test_a_device_without_a_kernel_is_asked_without_harm(monkeypatch) -> None:
    def missing(*_: object, **__: object) -> Tensor:
        raise RuntimeError("grouped mm is not supported on your system\nat …")

    monkeypatch.setattr(grouped_matmul.F, "grouped_mm", missing)
    said = obstacle_of(partial(at_once_disagreement, E, D, F, CPU))
    assert said == "RuntimeError: grouped mm is not supported on your system"
