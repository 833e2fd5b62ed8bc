"""Grouped matmuls of the fused step's experts, by the kernels, by PyTorch or by our operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import check_same_on_any_threads

from pentameter.fused_cpu import native
from pentameter.fused_cpu.experts import grouped_matmul
from pentameter.fused_cpu.experts.grouped_matmul import input_gradient, linear, weight_gradient
from pentameter.model.grouped_matmul import (
    grouped_input_gradient,
    grouped_linear,
    grouped_weight_gradient,
)

ENDS = [[32, 32, 64, 96], [0, 64, 64, 128], [0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("widths", [(64, 32), (20, 48), (33, 17)])
@pytest.mark.parametrize("ends", ENDS)
def test_without_kernels_products_have_the_bits_of_our_operations(dtype, widths, ends):
    """Also for widths that PyTorch's grouped matmul refuses, for an expert without rows, and behind
    the last end, where it writes nothing."""
    n_inputs, n_outputs = widths
    generator = torch.Generator().manual_seed(3)
    ends = torch.tensor(ends)
    rows, weight, g = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((128, n_inputs), (4, n_outputs, n_inputs), (128, n_outputs))
    )
    torch.full((1 << 20,), torch.nan)  # freed at once: memory for results, not of zeros
    pairs = [
        (linear(rows, weight, None, ends), grouped_linear(rows, weight, None, ends)),
        (input_gradient(g, weight, ends), grouped_input_gradient(g, weight, ends)),
        (weight_gradient(g, rows, ends), grouped_weight_gradient(g, rows, ends)),
    ]
    for found, expected in pairs:
        assert torch.equal(found, expected)
    for found, _ in pairs[:2]:
        assert not found[ends[-1] :].any()


def kernels_used(patch):
    """Let the kernels multiply on any CPU, and PyTorch nothing."""
    patch.setattr(grouped_matmul, "_multiplies_pairs", lambda: True)
    patch.setattr(grouped_matmul, "_pytorch_takes", lambda *operands: pytest.fail("not a kernel"))


def random_operands(seed, n_rows, E, n_in, n_out):
    """Rows, weight and the result's gradient, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (n_rows, n_in), (E, n_out, n_in), (n_rows, n_out)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 10), min_size=1, max_size=4),
    st.integers(0, 50),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 1 << 30),
)
def test_kernels_multiply_each_groups_rows(kernels, blocks, n_behind, n_in, n_out, seed):
    """Groups without rows, more rows than are summed at once, and widths that fill no tile."""
    ends = torch.tensor(blocks).cumsum(0) * 32
    n_rows, n_in, n_out = int(ends[-1]) + n_behind, 32 * n_in, 32 * n_out
    rows, weight, g = random_operands(seed, n_rows, len(blocks), n_in, n_out)
    torch.full((1 << 20,), torch.nan)  # freed at once: memory for results, not of zeros
    with pytest.MonkeyPatch.context() as patch:
        kernels_used(patch)
        y, g_rows = linear(rows, weight, None, ends), input_gradient(g, weight, ends)
        g_weight = weight_gradient(g, rows, ends)
    assert (y.dtype, g_rows.dtype, g_weight.dtype) == (rows.dtype, rows.dtype, torch.float32)
    assert not y[ends[-1] :].any()
    assert not g_rows[ends[-1] :].any()
    rows, weight, g = (each.double() for each in (rows, weight, g))
    for e, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        # bf16 rounds by 4e-3, fp32 sums by 1e-7 for each of up to 320 terms.
        close = {"rtol": 4e-3, "atol": 1e-4}
        torch.testing.assert_close(y[begin:end].double(), rows[begin:end] @ weight[e].t(), **close)
        torch.testing.assert_close(g_rows[begin:end].double(), g[begin:end] @ weight[e], **close)
        exact = g[begin:end].t() @ rows[begin:end]
        torch.testing.assert_close(g_weight[e].double(), exact, rtol=1e-5, atol=1e-4)


def test_no_product_depends_on_threads(kernels, monkeypatch):
    kernels_used(monkeypatch)
    ends = torch.tensor([320, 320, 352, 640])
    rows, weight, g = random_operands(5, 700, 4, 64, 96)

    def computed():
        gradients = input_gradient(g, weight, ends), weight_gradient(g, rows, ends)
        return (linear(rows, weight, None, ends), *gradients)

    check_same_on_any_threads(computed)


def test_what_the_kernels_do_not_take_is_left_to_others(loaded, monkeypatch):
    def takes(rows, weight):
        return grouped_matmul._kernels_for(weight.shape, rows, weight) is not None

    native.unload("AMX")
    rows, weight, _ = random_operands(1, 64, 2, 32, 64)
    monkeypatch.setattr(grouped_matmul, "_multiplies_pairs", lambda: True)
    assert takes(rows, weight)
    assert not takes(rows.float(), weight.float())
    assert not takes(rows[:, :16].contiguous(), weight[..., :16].contiguous())
    assert not takes(rows, weight[..., ::2])
    monkeypatch.setattr(grouped_matmul, "_multiplies_pairs", lambda: False)
    assert not takes(rows, weight)


def test_tiles_leave_large_matrices_to_pytorch(tiles, monkeypatch):
    rows, weight, _ = random_operands(1, 64, 2, 32, 64)
    assert grouped_matmul._kernels_for(weight.shape, rows, weight) == "AMX"
    monkeypatch.setattr(grouped_matmul, "MAX_TILED", 32 * 64 - 1)
    assert grouped_matmul._kernels_for(weight.shape, rows, weight) is None
