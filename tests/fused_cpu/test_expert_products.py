"""Grouped matmuls of the fused step's experts, by PyTorch or by our operations."""

from __future__ import annotations

import pytest
import torch

from pentameter.fused_cpu.experts import _input_gradient, _multiplied, _weight_gradient
from pentameter.model.matmul import (
    grouped_input_gradient,
    grouped_linear,
    grouped_weight_gradient,
)

ENDS = [[32, 32, 64, 96], [0, 64, 64, 128], [0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("widths", [(64, 32), (20, 48), (33, 17)])
@pytest.mark.parametrize("ends", ENDS)
def test_products_have_the_bits_of_our_operations(dtype, widths, ends):
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
        (_multiplied(rows, weight, None, ends), grouped_linear(rows, weight, None, ends)),
        (_input_gradient(g, weight, ends), grouped_input_gradient(g, weight, ends)),
        (_weight_gradient(g, rows, ends), grouped_weight_gradient(g, rows, ends)),
    ]
    for found, expected in pairs:
        assert torch.equal(found, expected)
    for found, _ in pairs[:2]:
        assert not found[ends[-1] :].any()
