"""The matmuls of generation: the same bits as PyTorch's, whichever kernel computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import native
from pentameter.generation import few_rows as few_rows_module
from pentameter.generation.few_rows import (
    MOST_ROWS,
    FewRows,
    few_rows,
    gather_in_huge_pages,
    memory_ranges,
    multiplying_by,
)
from pentameter.generation.loop import Generation, sampled_tokens
from pentameter.machine.capabilities import compiler_command, machine_capabilities
from pentameter.model.gpt import GPT, build_model
from pentameter.model.matmul import PLAIN, Matmul

CONFIG = ModelConfig(
    vocab_size=65, context_length=32, n_layers=2, d_model=128, tied_head=True, n_heads=2
)
HUGE = 2.0**60


@pytest.fixture
def library() -> None:
    reason = native.load("rows", machine_capabilities())
    if reason is not None:
        assert compiler_command() is None or "cannot be built" not in reason, reason
        pytest.skip(reason)


@pytest.fixture
def always(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve models of any size."""
    monkeypatch.setattr(few_rows_module, "_LEAST_WEIGHTS", 0)


def made(n_rows: int, K: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n_rows + K + N)
    x, weight = (torch.randn(n, K, generator=generator) for n in (n_rows, N))
    return x, weight


@pytest.mark.parametrize(("K", "N"), [(64, 24), (200, 65), (1536, 384)])
@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, MOST_ROWS, MOST_ROWS + 1])
def test_a_product_has_the_bits_of_pytorch(library, n_rows, K, N):
    x, weight = made(n_rows, K, N)
    with torch.inference_mode():
        for form in (x, x[:, None], x[None]):
            assert torch.equal(FewRows().linear(form, weight), F.linear(form, weight))


@pytest.mark.parametrize("n_rows", [1, 3, 4, 7, 8, 15, 16, 40])
def test_fewer_rows_add_like_many(library, n_rows):
    """One text's row is the same beside any others, if the many have a kernel at all."""
    x, weight = made(48, 384, 100)
    with torch.inference_mode():
        matmul = FewRows()
        if matmul._kernel(48, weight) is None:
            pytest.skip("PyTorch adds in another order on this machine")
        with matmul.adding_like(48):
            assert torch.equal(matmul.linear(x[:n_rows], weight), F.linear(x, weight)[:n_rows])
        assert torch.equal(matmul.linear(x[:n_rows], weight), F.linear(x[:n_rows], weight))


def order_of_sum(kernel: Any, K: int, n_rows: int) -> list[int]:
    """How many of K ones are lost between a huge number and its opposite, by their places."""
    x = torch.ones(K * K, K)
    for number in range(K * K):
        x[number, number // K] += HUGE
        x[number, number % K] -= HUGE
    weight = torch.ones(9, K)
    found = torch.cat([kernel(rows, weight) for rows in x.split(n_rows)])
    assert (found == found[:, :1]).all()
    return found[:, 0].int().tolist()


def added(x: np.ndarray, block: int | None) -> float:
    """The documented order, number by number."""
    if block is not None:
        sums = [np.float32(0)] * -(-len(x) // block)
        for k, number in enumerate(x):
            sums[k // block] += number
        return float(sum(sums[1:], sums[0]))
    lanes = [sum(x[1:4], x[0]), *[np.float32(0)] * 3]
    for k, number in enumerate(x[4:]):
        lanes[k % 4] += number
    return float((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]))


@pytest.mark.parametrize(("block", "n_rows"), [(None, 1), (8, 1), (8, 3), (8, 7), (8, 16), (5, 20)])
def test_the_order_of_a_sum_is_as_documented(library, block, n_rows):
    K = 20
    matmul = FewRows()

    def kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        by = matmul._by_lanes if block is None else lambda *of: matmul._by_blocks(block, *of)
        return by(x, weight)

    expected = []
    for number in range(K * K):
        x = np.ones(K, dtype=np.float32)
        x[number // K] += np.float32(HUGE)
        x[number % K] -= np.float32(HUGE)
        expected.append(added(x, block))
    assert order_of_sum(kernel, K, n_rows) == expected


@pytest.mark.parametrize("n_rows", [1, 2, 7, 16, 20])
@pytest.mark.parametrize(("K", "N"), [(64, 24), (1536, 65)])
def test_a_weight_of_bf16_numbers_has_the_bits_of_fp32(library, n_rows, K, N):
    x, weight = made(n_rows, K, N)
    weight = weight.bfloat16().float()
    matmul, plain = FewRows(), FewRows(narrows=False)
    assert matmul.least(weight).dtype is torch.bfloat16
    assert plain.least(weight) is weight
    with torch.inference_mode():
        assert torch.equal(matmul.linear(x, weight), F.linear(x, weight))
    for by in (matmul._by_lanes, *(lambda *of, n=n: matmul._by_blocks(n, *of) for n in (5, 192))):
        rows = x[:1] if by == matmul._by_lanes else x
        assert torch.equal(by(rows, weight.bfloat16()), by(rows, weight))


def test_only_weights_of_bf16_numbers_get_a_copy_and_changes_make_it_anew(library):
    matmul, weight = FewRows(), torch.nn.Parameter(torch.ones(70, 1000))
    copy = matmul.least(weight)
    assert copy.dtype is torch.bfloat16
    assert matmul.least(weight) is copy
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(matmul.least(weight), torch.full_like(copy, 2))
    with torch.no_grad():
        weight[-1, -1] = 1.0001
    assert matmul.least(weight) is weight
    with torch.inference_mode():
        made_there = torch.ones(8, 8)
    assert matmul.least(made_there) is made_there


def test_a_weight_that_shows_no_order_is_left_to_pytorch(library):
    matmul = FewRows()
    assert matmul._kernel(16, torch.zeros(64, 64)) is None
    assert matmul._kernel(16, torch.eye(64)) is None


def test_no_rows_and_a_weight_of_other_strides_are_pytorchs(library):
    x, weight = made(1, 64, 64)
    matmul = FewRows()
    with torch.inference_mode():
        matmul.linear(x, weight)  # for its shape there is a kernel now
        assert matmul.linear(x[:0], weight).shape == (0, 64)
        assert torch.equal(matmul.linear(x, weight.t()), F.linear(x, weight.t()))


@pytest.mark.parametrize("case", ["bias", "bf16", "gradients", "unlike strides"])
def test_what_the_kernels_do_not_compute_is_pytorchs(library, monkeypatch, case):
    x, weight = made(4, 64, 24)
    bias = torch.ones(24) if case == "bias" else None
    if case == "bf16":
        x, weight = x.bfloat16(), weight.bfloat16()
    if case == "unlike strides":
        x = x.t().contiguous().t()
    monkeypatch.setattr(FewRows, "_by_blocks", None)
    with torch.set_grad_enabled(case == "gradients"):
        matmul = FewRows()
        matmul._kernel = lambda *_: None if case != "unlike strides" else pytest.fail  # type: ignore[method-assign,assignment,return-value]
        assert torch.equal(matmul.linear(x, weight, bias), F.linear(x, weight, bias))


class _Counting(Matmul):
    def __init__(self) -> None:
        self.n_calls = 0

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        self.n_calls += 1
        return super().linear(x, weight, bias)


def test_a_model_multiplies_by_it_only_inside():
    model, matmul = build_model(CONFIG, 1), _Counting()
    tokens = torch.zeros((1, 3), dtype=torch.int64)
    expected = model(tokens)
    with multiplying_by(model, matmul):
        assert torch.equal(model(tokens), expected)
        assert matmul.n_calls == 4 * CONFIG.n_layers + 1
    model(tokens)
    assert matmul.n_calls == 4 * CONFIG.n_layers + 1
    assert not any("forward" in vars(module) for module in model.modules())


def test_forwards_of_a_run_stay():
    model, matmul = build_model(CONFIG, 1), _Counting()
    linear: Any = next(each for each in model.modules() if isinstance(each, nn.Linear))
    linear.forward = own = lambda x: F.linear(x, linear.weight)
    with multiplying_by(model, matmul):
        assert linear.forward is own
    assert linear.forward is own


def test_only_large_models_in_fp32_or_bf16_get_the_kernels(library, monkeypatch):
    model = build_model(CONFIG, 1)
    assert few_rows(model) is PLAIN
    monkeypatch.setattr(few_rows_module, "_LEAST_WEIGHTS", 0)
    assert isinstance(few_rows(model), FewRows)
    assert isinstance(few_rows(model.bfloat16()), FewRows)
    assert few_rows(model.double()) is PLAIN


def test_without_a_compiler_pytorch_multiplies(monkeypatch, tmp_path):
    monkeypatch.setattr(few_rows_module, "_LEAST_WEIGHTS", 0)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with native.without("rows"):
        assert few_rows(build_model(CONFIG, 1)) is PLAIN


@pytest.mark.parametrize("n_samples", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_pytorchs_matmuls(always, monkeypatch, n_samples, temperature):
    monkeypatch.setattr("pentameter.generation.loop.token_pass", lambda *_: None)
    model = build_model(CONFIG, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim == 2 else 1.0)
    settings = Generation(max_new_tokens=40, num_samples=n_samples, temperature=temperature)

    def tokens(model: GPT) -> Any:
        prompt = np.arange(5, dtype=np.int64)
        return np.stack(list(sampled_tokens(model, prompt, 65, settings)))

    found = tokens(model)
    monkeypatch.setattr("pentameter.generation.loop.few_rows", lambda model: PLAIN)
    assert (found == tokens(model)).all()


def test_neighbours_in_memory_are_one_range():
    memory = torch.zeros(100_000, dtype=torch.uint8)
    begin = memory.data_ptr()
    parts = [memory[40_000:50_000], memory[:1000], memory[1016:2000], memory[500:900]]
    assert memory_ranges(parts) == [(begin, begin + 2000), (begin + 40_000, begin + 50_000)]


def test_numbers_and_addresses_stay_in_huge_pages():
    weights = [torch.randn(512, 1024) for _ in range(12)]
    copies, addresses = [each.clone() for each in weights], [each.data_ptr() for each in weights]
    gather_in_huge_pages(weights)
    assert all(torch.equal(*pair) for pair in zip(weights, copies, strict=True))
    assert [each.data_ptr() for each in weights] == addresses
