"""Matmuls of rows that are sorted by group, each with the matrix of its group, as experts need
them, and their gradients.

There are two forms, each of custom operations, since a result's shape does not depend on the
groups' sizes, so that compiled code need not know them. The plain form multiplies one group after
another, in any dtype on any device; the host must know where groups end, and on a GPU waits for it.
The other form multiplies all groups at once, by `torch.nn.functional.grouped_mm`, and the host
waits for nothing. `at_once_obstacle` says when a run cannot have it.

Shapes: K inputs and N outputs of a matrix; E groups; R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pentameter.config.schema import ModelConfig
from pentameter.machine.capabilities import GpuCapabilities
from pentameter.model.attention.checked_attention import row_error


class Groups(NamedTuple):
    """The ends of each group's rows in a tensor that is sorted by group (of experts, for example);
    made by `groups_of`."""

    ends: Tensor
    """The index after each group's last row (E,): int32 on the rows' device if `at_once`, else
    int64 on the CPU."""
    at_once: bool = False
    """Whether all groups are multiplied at once, on a GPU."""
    holds_all: bool = False
    """Whether no row lies behind the last group's end, known without a look at `ends`."""


def groups_of(rows: Tensor, ends: Tensor, *, at_once: bool, holds_all: bool) -> Groups:
    """Return the Groups of rows (R, …) for the index `ends`, int64 (E,), after each group's last
    row, on the rows' device or on the CPU. Unless the groups are multiplied `at_once`, the host
    waits here for `ends` of a GPU, and nowhere else."""
    if at_once:
        return Groups(ends.to(rows.device, torch.int32, non_blocking=True), True, holds_all)
    return Groups(ends if ends.device.type == "cpu" else ends_on_host(ends), False, holds_all)


READS = (torch.Tag.cudagraph_unsafe,)
"""Tags of operations that read numbers on the host, so that no CUDA graph may record them: between
two of its parts they run anew each time."""


@torch.library.custom_op("pentameter::ends_on_host", mutates_args=(), tags=READS)
def ends_on_host(ends: Tensor) -> Tensor:
    """Return `ends` (E,) of a GPU on the CPU, for which the host waits. A custom operation, by
    whose name recomputation keeps the result."""
    return ends.cpu()


@ends_on_host.register_fake
def _(ends: Tensor) -> Tensor:
    return torch.empty_like(ends, device="cpu")


# -- one group after another ----------------------------------------------------------------------


@torch.library.custom_op("pentameter::grouped_linear", mutates_args=(), tags=READS)
def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Return x · weight[e]ᵀ + bias[e] (R, N) for rows x (R, K) sorted by group e, weight (E, N, K),
    bias (E, N) or None, all in one dtype. ends, int64 (E,) on the CPU: the index after each group's
    last row. Rows behind the last end give 0."""
    y = x.new_empty(len(x), weight.shape[1])
    for group, rows in enumerate(_slices(ends)):
        for part in _row_blocks(rows, x):
            if bias is None:
                torch.mm(x[part], weight[group].t(), out=y[part])
            else:
                torch.addmm(bias[group], x[part], weight[group].t(), out=y[part])
    y[_slices(ends)[-1].stop :].zero_()
    return y


@torch.library.custom_op("pentameter::grouped_input_gradient", mutates_args=(), tags=READS)
def grouped_input_gradient(g: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient for x (R, K), given the result's gradient g (R, N), weight (E, N, K) and
    the index `ends` (E,) after each group's last row; 0 for rows behind the last end."""
    gradient = g.new_empty(len(g), weight.shape[2])
    for group, rows in enumerate(_slices(ends)):
        for part in _row_blocks(rows, g):
            torch.mm(g[part], weight[group], out=gradient[part])
    gradient[_slices(ends)[-1].stop :].zero_()
    return gradient


@torch.library.custom_op("pentameter::grouped_weight_gradient", mutates_args=(), tags=READS)
def grouped_weight_gradient(g: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient for the weight (E, N, K), given g (R, N), x (R, K) and the index `ends`
    (E,) after each group's last row; 0 for empty groups."""
    gradient = g.new_empty(len(ends), g.shape[1], x.shape[1])
    for group, rows in enumerate(_slices(ends)):
        n_missing = _whole_blocks(rows, g) - (rows.stop - rows.start)
        left, right = g[rows], x[rows]
        if n_missing:  # padding copies, even by no rows
            left, right = (F.pad(each, (0, 0, 0, n_missing)) for each in (left, right))
        torch.mm(left.t(), right, out=gradient[group])
    return gradient


@torch.library.custom_op("pentameter::grouped_bias_gradient", mutates_args=(), tags=READS)
def grouped_bias_gradient(g: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient for the bias (E, N), given g (R, N) and the index `ends` (E,) after each
    group's last row."""
    return torch.stack([g[rows].sum(0) for rows in _slices(ends)])


def _slices(ends: Tensor) -> list[slice]:
    """Return each group's rows as a slice, for the index `ends` (E,) after each group's last
    row."""
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


ROWS_PER_BLOCK = 32
"""Rows of a group are multiplied in multiples of this number, on a CPU with 16-bit numbers. oneDNN
compiles a kernel for each new number of rows, which takes longer than the matmul itself, and groups
have other numbers of rows in each step."""


def _whole_blocks(rows: slice, x: Tensor) -> int:
    """Return the number of `rows`, rounded up to a multiple of ROWS_PER_BLOCK if x needs it."""
    n = rows.stop - rows.start
    needs_blocks = x.device.type == "cpu" and x.dtype.itemsize == 2
    return -(-n // ROWS_PER_BLOCK) * ROWS_PER_BLOCK if needs_blocks else n


def _row_blocks(rows: slice, x: Tensor) -> list[slice]:
    """Return slices of x (R, …) that together cover a group's `rows`; each has a multiple of
    ROWS_PER_BLOCK rows where x needs that. The last slice may then reach into the next group's
    rows; what is computed wrongly there is overwritten, as that group is multiplied later. Where x
    ends too early for that, the rows after the last whole block are a slice of their own."""
    stop = rows.start + _whole_blocks(rows, x)
    if stop <= len(x):
        return [slice(rows.start, stop)]
    middle = stop - ROWS_PER_BLOCK
    return [slice(rows.start, middle), slice(middle, rows.stop)]


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_input_gradient.register_fake
def _(g: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], weight.shape[2])


@grouped_weight_gradient.register_fake
def _(g: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return g.new_empty(ends.shape[0], g.shape[1], x.shape[1])


@grouped_bias_gradient.register_fake
def _(g: Tensor, ends: Tensor) -> Tensor:
    return g.new_empty(ends.shape[0], g.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ends = inputs
    ctx.save_for_backward(x, weight, ends)
    ctx.has_bias = bias is not None


def _differentiate(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x (R, K), weight (E, N, K) and bias (E, N) for g (R, N)."""
    x, weight, ends = ctx.saved_tensors
    g = g.contiguous()
    wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
    return (
        grouped_input_gradient(g, weight, ends) if wants_x else None,
        grouped_weight_gradient(g, x, ends) if wants_weight else None,
        grouped_bias_gradient(g, ends) if wants_bias and ctx.has_bias else None,
        None,
    )


grouped_linear.register_autograd(_differentiate, setup_context=_save)

# -- all groups at once ---------------------------------------------------------------------------


@torch.library.custom_op("pentameter::grouped_linear_at_once", mutates_args=())
def grouped_linear_at_once(x: Tensor, weight: Tensor, ends: Tensor, holds_all: bool) -> Tensor:
    """Return x · weight[e]ᵀ (R, N), differentiable, for rows x (R, K) sorted by group e and weight
    (E, N, K), both bf16, with K and N multiples of LENGTHS. ends, int32 (E,) on their device: the
    index after each group's last row. Rows behind the last end give 0; `holds_all` says that there
    are none."""
    return rows_at_once(x, weight.mT, ends, holds_all)


@torch.library.custom_op("pentameter::grouped_input_gradient_at_once", mutates_args=())
def grouped_input_gradient_at_once(
    g: Tensor, weight: Tensor, ends: Tensor, holds_all: bool
) -> Tensor:
    """Return the gradient for x (R, K), given the result's gradient g (R, N), and `weight`, `ends`
    and `holds_all` as in `grouped_linear_at_once`; 0 for rows behind the last end."""
    return rows_at_once(g, weight, ends, holds_all)


@torch.library.custom_op("pentameter::grouped_weight_gradient_at_once", mutates_args=())
def grouped_weight_gradient_at_once(g: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient for the weight (E, N, K), given g (R, N), x (R, K) and `ends` as in
    `grouped_linear_at_once`; 0 for empty groups."""
    if not len(x):
        return g.new_zeros(len(ends), g.shape[1], x.shape[1])
    return F.grouped_mm(_aligned(g).mT, _aligned(x), offs=ends)


def rows_at_once(rows: Tensor, matrices: Tensor, ends: Tensor, holds_all: bool) -> Tensor:
    """Return rows (R, K) times their group's matrix, of matrices (E, K, N): (R, N), and 0 for rows
    behind the last of `ends` (E,), which `grouped_mm` leaves unwritten (pytorch #193633); they cost
    a pass over the result, unless it `holds_all`. The host waits for nothing."""
    if not len(rows):
        return rows.new_zeros(0, matrices.shape[2])
    y = F.grouped_mm(_aligned(rows), _aligned(matrices), offs=ends)
    if holds_all:
        return y
    behind = torch.arange(len(y), dtype=ends.dtype, device=ends.device) >= ends[-1]
    return y.masked_fill_(behind[:, None], 0)


def _aligned(x: Tensor) -> Tensor:
    """Return x, copied if it does not begin at a multiple of 16 bytes, as `grouped_mm` needs."""
    is_aligned = x.device.type != "cuda" or x.data_ptr() % 16 == 0
    return x if is_aligned else x.clone()


@grouped_linear_at_once.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, holds_all: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_input_gradient_at_once.register_fake
def _(g: Tensor, weight: Tensor, ends: Tensor, holds_all: bool) -> Tensor:
    return g.new_empty(g.shape[0], weight.shape[2])


@grouped_weight_gradient_at_once.register_fake
def _(g: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return g.new_empty(ends.shape[0], g.shape[1], x.shape[1])


def _save_at_once(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.holds_all = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_at_once(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x (R, K) and weight (E, N, K) for g (R, N)."""
    x, weight, ends = ctx.saved_tensors
    g = g.contiguous()
    wants_x, wants_weight, *_ = ctx.needs_input_grad
    return (
        grouped_input_gradient_at_once(g, weight, ends, ctx.holds_all) if wants_x else None,
        grouped_weight_gradient_at_once(g, x, ends) if wants_weight else None,
        None,
        None,
    )


grouped_linear_at_once.register_autograd(_differentiate_at_once, setup_context=_save_at_once)


# -- may a run multiply all groups at once? -------------------------------------------------------

GENERATIONS = (9, 10)
"""Major compute capabilities for which PyTorch has a kernel of `grouped_mm`. Elsewhere the host
waits and multiplies one group after another (_grouped_mm_cuda in ATen's GroupedBlas.cpp)."""
LENGTHS = 8
"""Divisor of the lengths of a matrix's rows and columns: 16 bytes of bf16."""
MOST_GROUPS = 1023
"""Groups that the kernel takes."""
MOST_ROUNDINGS = 4.0
"""Maximum error of a number in a result, in bf16 roundings of the largest number in its row. Sums
are in float32, and rounded once."""


def at_once_obstacle(
    model: ModelConfig, n_experts: int, width: int, dtype: torch.dtype, gpu: GpuCapabilities
) -> str | None:
    """Return a phrase that says why the matmuls of a model's experts cannot run at once on `gpu`;
    None if they can. A rank has `n_experts` of them, with inner `width`, or this much of it.
    Matmuls are in `dtype`."""
    capability = gpu.compute_capability
    if capability is None or capability // 10 not in GENERATIONS:
        needed = " or ".join(f"{each}.x" for each in GENERATIONS)
        return f"PyTorch's kernel is for compute capability {needed}, not {gpu.architecture}"
    if dtype is not torch.bfloat16:
        return f"they are in {str(dtype).removeprefix('torch.')}, PyTorch's kernel in bfloat16"
    if model.bias:
        return "model.bias=true"
    for name, size in (("model.d_model", model.d_model), ("an expert's width on a rank", width)):
        if size % LENGTHS:
            return f"{name}={size} is no multiple of {LENGTHS}"
    return None if n_experts <= MOST_GROUPS else f"{n_experts} experts, more than {MOST_GROUPS}"


def at_once_disagreement(
    n_experts: int, n_inputs: int, n_outputs: int, device: torch.device
) -> str | None:
    """Multiply a few rows at once on `device`, by bf16 matrices of this size, with groups that are
    empty and rows behind the last end. Return a phrase about the first result or gradient that
    differs by more than rounding from the plain form in float64; None if all are right. What the
    kernel raises is raised, and so is RuntimeError if the host waited for the device."""
    n_experts = min(n_experts, 8)
    sizes = [130, 0, 1, 0, 64, 37, 8, 0][:n_experts]
    ends = torch.tensor(sizes).cumsum(0)
    shapes = ((300, n_inputs), (n_experts, n_outputs, n_inputs), (300, n_outputs))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(each, generator=generator).to(device, torch.bfloat16) for each in shapes]
    x, weight, g = drawn
    there = groups_of(x, ends.to(device), at_once=True, holds_all=False).ends
    with _refusing_waits(device):
        found = [
            rows_at_once(x, weight.mT, there, False),
            rows_at_once(g, weight, there, False),
            grouped_weight_gradient_at_once(g, x, there),
        ]
    x, weight, g = (each.double() for each in drawn)
    expected = [
        grouped_linear(x, weight, None, ends),
        grouped_input_gradient(g, weight, ends),
        grouped_weight_gradient(g, x, ends),
    ]
    bound = MOST_ROUNDINGS * torch.finfo(torch.bfloat16).eps / 2
    for name, one, other in zip(("y", "dx", "dW"), found, expected, strict=True):
        if not (off := row_error(one, other)) <= bound:  # true for nan, too
            return f"their {name} is off by {off:.1e}, more than {bound:.1e}"
    return None


@contextmanager
def _refusing_waits(device: torch.device) -> Iterator[None]:
    """Context manager: inside it, PyTorch raises where the host would wait for a GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
