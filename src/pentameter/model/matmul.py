"""The matmuls of linear layers, plain or sharded, and of the head's loss, behind one class.

Whoever multiplies by a layer's weight does it by a `Matmul`: the model's modules, tensor-parallel
layers that communicate between a matmul and its gradients, adapters. So a new arithmetic, such as a
narrower dtype, is one subclass.

Shapes: K inputs and N outputs; R rows, of tokens; E groups of rows, which have a matrix each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Matmul:
    """The run's way to multiply by a linear layer's weight: x · weightᵀ, and the two matmuls in its
    backward pass, in their inputs' dtype. This is the plain one.

    A subclass for another arithmetic overrides `linear`, `input_gradient` and `weight_gradient`.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x · weightᵀ + bias (…, N), differentiable, for x (…, K), weight (N, K) and bias
        (N,) or None. Under autocast it is computed in autocast's dtype."""
        return F.linear(x, weight, bias)

    def input_gradient(self, g: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """Return x's gradient g · weight (…, K), for g (…, N) and weight (N, K). With `total`
        (R, K), add it to `total` in place and return that, for g (R, N)."""
        return g @ weight if total is None else total.addmm_(g, weight)

    def weight_gradient(self, g: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        """Return the weight's gradient gᵀ · x (N, K), for g (R, N) and x (R, K). With `total`
        (N, K), add it to `total` in place and return that."""
        return g.t() @ x if total is None else total.addmm_(g.t(), x)

    def precise_weight_gradient(self, g: Tensor, x: Tensor) -> Tensor:
        """Return the weight's gradient gᵀ · x (N, K), for g (R, N) and x (R, K), in float32 or
        higher; fp16 inputs are scaled so that the sum over rows does not overflow."""
        precise = torch.promote_types(x.dtype, torch.float32)
        if x.dtype != torch.float16:
            return self.weight_gradient(g, x).to(precise)
        # A token in every row sums R entries of x: beyond 65,504, and no loss scale would help.
        scale = 2.0 ** -(len(x) // 256).bit_length()
        return self.weight_gradient(g, x * scale).to(precise).div_(scale)

    def differentiate(self, g: Tensor, x: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
        """Return the gradient for x (R, K), and add the weight's to `weight_grad` (N, K) in place,
        given the gradient g (R, N) of x · weightᵀ. If `weight_grad` has another dtype than x, the
        weight's gradient is computed in float32 or higher."""
        if weight_grad.dtype == x.dtype:
            self.weight_gradient(g, x, weight_grad)
        else:
            weight_grad.add_(self.precise_weight_gradient(g, x))
        return self.input_gradient(g, weight)

    def grouped_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor
    ) -> Tensor:
        """Return x · weight[e]ᵀ + bias[e] (R, N), differentiable, for rows x (R, K) sorted by group
        e, weight (E, N, K) and bias (E, N) or None. ends, int64 (E,): the index after each group's
        last row; rows behind the last end give 0. Under autocast it is computed in autocast's
        dtype."""
        dtype = matmul_dtype(x)
        bias = None if bias is None else bias.to(dtype)
        return grouped_linear(x.to(dtype), weight.to(dtype), bias, ends)


PLAIN = Matmul()
"""The `Matmul` that modules use unless given another."""


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matmul with x (any shape) is computed: autocast's if it is
    enabled for x's device, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# -- float32 where others are rounded -------------------------------------------------------------


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias (…, N), differentiable, for x (…, K), weight (N, K) and bias (N,)
    or None. Float32 is multiplied in float32, and so are its gradients, even where other matmuls of
    that dtype are rounded to TF32 (precision tf32, `train.matmul_precision`)."""
    if x.dtype is not torch.float32 or not _float32_is_rounded():
        return F.linear(x, weight, bias)
    y: Tensor = exact_product(x.flatten(0, -2), weight.t())
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


# A constant of a compiled graph, which has a guard on it: a trace cannot ask for a word of torch's.
@torch.compiler.assume_constant_result
def _float32_is_rounded() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


@torch.library.custom_op("pentameter::exact_product", mutates_args=())
def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b (M, N) for a (M, K) and b (K, N), multiplied in their own dtype, not in TF32. A
    custom operation, so that PyTorch's global precision is set at the moment of the multiplication,
    also in compiled code and in backward passes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return a @ b
    finally:
        torch.set_float32_matmul_precision(before)


@exact_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _save_factors(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_product(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a (M, K) and b (K, N) for g (M, N)."""
    a, b = ctx.saved_tensors
    wants_a, wants_b = ctx.needs_input_grad
    return (
        exact_product(g, b.t()) if wants_a else None,
        exact_product(a.t(), g) if wants_b else None,
    )


exact_product.register_autograd(_differentiate_product, setup_context=_save_factors)


# -- groups of rows -------------------------------------------------------------------------------


@torch.library.custom_op("pentameter::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Return x · weight[e]ᵀ + bias[e] (R, N) for rows x (R, K) sorted by group e, weight (E, N, K),
    bias (E, N) or None, all in one dtype. ends, int64 (E,): the index after each group's last row.
    Rows behind the last end give 0.

    A custom operation, since its result's shape does not depend on the groups' sizes, so that
    compiled code need not know them. `torch.nn.functional.grouped_mm` refuses float64, and leaves
    the rows behind the last end unwritten (torch 2.13).
    """
    y = x.new_empty(len(x), weight.shape[1])
    for group, rows in enumerate(_slices(ends)):
        for part in _row_blocks(rows, x):
            if bias is None:
                torch.mm(x[part], weight[group].t(), out=y[part])
            else:
                torch.addmm(bias[group], x[part], weight[group].t(), out=y[part])
    y[_slices(ends)[-1].stop :].zero_()
    return y


@torch.library.custom_op("pentameter::grouped_input_gradient", mutates_args=())
def grouped_input_gradient(g: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient for x (R, K), given the result's gradient g (R, N), weight (E, N, K) and
    the index `ends` (E,) after each group's last row; 0 for rows behind the last end."""
    gradient = g.new_empty(len(g), weight.shape[2])
    for group, rows in enumerate(_slices(ends)):
        for part in _row_blocks(rows, g):
            torch.mm(g[part], weight[group], out=gradient[part])
    gradient[_slices(ends)[-1].stop :].zero_()
    return gradient


@torch.library.custom_op("pentameter::grouped_weight_gradient", mutates_args=())
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


@torch.library.custom_op("pentameter::grouped_bias_gradient", mutates_args=())
def grouped_bias_gradient(g: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient for the bias (E, N), given g (R, N) and the index `ends` (E,) after each
    group's last row."""
    return torch.stack([g[rows].sum(0) for rows in _slices(ends)])


def _slices(ends: Tensor) -> list[slice]:
    """Return each group's rows as a slice, for the index `ends` (E,) after each group's last row.
    On a GPU the host waits for `ends`."""
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
    """Return slices of x (R, …) that together cover a group's `rows`, in whole blocks where x needs
    it. The last slice may reach into the rows behind, whose wrong results the next group,
    multiplied later, overwrites. Where x ends too early for that, the rows after the last whole
    block are a slice of their own."""
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
