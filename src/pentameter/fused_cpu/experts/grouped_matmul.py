"""Matmuls of rows that are sorted by group, each with the weight of its group, and their gradients:
by the C++ kernels in `cpp/grouped_tiles.cpp` (AMX) or `cpp/grouped_matmul.cpp`, by PyTorch's
grouped matmul, or by the operations of the plain model: by the first of these that supports the
operands.

Shapes: P places of rows, E groups; group e ends before place `ends[e]`, int64 (E,), a multiple of
ROWS_PER_BLOCK. Rows behind the last end belong to no group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pentameter.fused_cpu.native import Name, Struct, call, fields, serves
from pentameter.model.grouped_matmul import (
    ROWS_PER_BLOCK,
    grouped_input_gradient,
    grouped_linear,
    grouped_weight_gradient,
)

FEATURES = 32
"""Divisor that the C++ kernels need of the numbers of inputs and outputs."""
MAX_TILED = 1 << 18
"""Largest number of elements in an expert's matrix that the AMX kernels multiply. They read it once
for every 32 rows; for larger matrices PyTorch's products of larger blocks are faster."""


class _GroupedMatmul(Struct):
    """ctypes form of the C++ struct `GroupedMatmul` in cpp/grouped_matmul.h: the sizes of one
    matmul by expert."""

    _fields_ = fields("ends", int64="R E n_in n_out block")


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Multiply rows by the weight of their group: return (P, outputs) for `rows` (P, inputs),
    `weight` (E, outputs, inputs) and `bias` (E, outputs) or None. `ends` (E,) is the index after
    each group's last row; rows behind the last one give 0."""
    if bias is not None:
        return grouped_linear(rows, weight, bias.to(rows.dtype), ends)
    if (kernels := _kernels_for(weight.shape, rows, weight)) is not None:
        y, words = rows.new_empty(len(rows), weight.shape[1]), torch.empty_like(weight)
        call(kernels, "grouped_linear", _job(ends, len(rows), weight.shape), y, words, rows, weight)
        return y
    if _pytorch_takes(rows, weight):
        return _with_zeros(F.grouped_mm(rows, weight.mT, offs=ends.int()), ends)
    return grouped_linear(rows, weight, None, ends)


def input_gradient(g: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient (P, inputs) of the rows that `linear` multiplied, given the gradient g
    (P, outputs) of its result; `weight` and `ends` as passed to it."""
    if (kernels := _kernels_for(weight.shape, g, weight)) is not None:
        g_rows, words = g.new_empty(len(g), weight.shape[2]), torch.empty_like(weight)
        job = _job(ends, len(g), weight.shape)
        call(kernels, "grouped_input_gradient", job, g_rows, words, g, weight)
        return g_rows
    if _pytorch_takes(g, weight):
        return _with_zeros(F.grouped_mm(g, weight, offs=ends.int()), ends)
    return grouped_input_gradient(g, weight, ends)


def weight_gradient(g: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient (E, outputs, inputs) of the weight in `linear`, for the result's gradient
    g (P, outputs) and rows (P, inputs), in g's dtype or fp32; 0 for a group without rows."""
    shape = len(ends), g.shape[1], rows.shape[1]
    if (kernels := _kernels_for(shape, g, rows)) is not None:
        g_weight = g.new_empty(shape, dtype=torch.float32)
        call(kernels, "grouped_weight_gradient", _job(ends, len(g), shape), g_weight, g, rows)
        return g_weight
    if _pytorch_takes(g, rows):
        return F.grouped_mm(g.mT, rows, offs=ends.int())
    return grouped_weight_gradient(g, rows, ends)


def _kernels_for(shape: tuple[int, ...], *operands: Tensor) -> Name | None:
    """Return the library whose kernels multiply these operands; None if PyTorch is faster, or no
    library is loaded that can. `shape` is the weight's, (E, outputs, inputs). Operands must be
    contiguous bf16, and FEATURES must divide all widths. AMX takes matrices up to MAX_TILED;
    vector, without AMX, needs a CPU that multiplies pairs of bf16 numbers."""
    dtype = operands[0].dtype
    if not all(_fits_kernel(x) for x in operands):
        return None
    if serves("AMX", torch.float32, dtype):
        return "AMX" if shape[1] * shape[2] <= MAX_TILED else None
    if serves("vector", torch.float32, dtype) and _multiplies_pairs():
        return "vector"
    return None


def _multiplies_pairs() -> bool:
    """Return whether the vector library was compiled for a CPU that multiplies pairs of bf16
    numbers in one instruction."""
    return bool(call("vector", "multiplies_pairs"))


def _fits_kernel(x: Tensor) -> bool:
    """Return True if the C++ kernels take x as an operand of `linear` or of its gradients:
    contiguous bf16, at an address that 4 divides, with widths that FEATURES divides."""
    features = x.shape[1:]  # of a weight both dimensions
    divides = all(size % FEATURES == 0 for size in features)
    is_aligned = x.is_contiguous() and x.data_ptr() % 4 == 0  # read as words of two numbers
    return x.dtype is torch.bfloat16 and divides and is_aligned


def _pytorch_takes(*operands: Tensor) -> bool:
    """Return whether PyTorch's grouped matmul supports these operands: not float64, nor rows whose
    length is not a multiple of 16 bytes. Called directly it saves the overhead of our custom
    operations and of their views, a tenth of a product (3,072 tokens, 8 experts of 256)."""
    return all(
        x.dtype is not torch.float64 and x.shape[-1] * x.itemsize % 16 == 0 for x in operands
    )


def _with_zeros(y: Tensor, ends: Tensor) -> Tensor:
    """Return y (P, outputs) with 0, in place, behind the last of `ends` (E,), where PyTorch's
    grouped matmul leaves it unwritten."""
    y[int(ends[-1]) :].zero_()
    return y


def _job(ends: Tensor, n_rows: int, shape: tuple[int, ...]) -> _GroupedMatmul:
    """Return the sizes for the C++ call: `n_rows` rows, and a weight with this `shape` (E, outputs,
    inputs). `ends` (E,) is the index after each expert's last row."""
    E, n_out, n_in = shape
    return _GroupedMatmul(ends, n_rows, E, n_in, n_out, ROWS_PER_BLOCK)
