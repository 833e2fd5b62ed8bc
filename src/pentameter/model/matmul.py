"""The matmuls of linear layers, plain or sharded, and of the head's loss, behind one class.

Whoever multiplies by a layer's weight does it by a `Matmul`: the model's modules, tensor-parallel
layers that communicate between a matmul and its gradients, adapters. So a new arithmetic, such as a
narrower dtype, is one subclass.

Shapes: K inputs and N outputs; R rows, of tokens; E groups of rows, which have a matrix each
(`grouped_matmul.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pentameter.model.compiled import constant, uncompiled
from pentameter.model.grouped_matmul import Groups, grouped_linear, grouped_linear_at_once


class Matmul:
    """A run's way to multiply by the weight of a linear layer: x · weightᵀ, and the two matmuls of
    its backward pass. This class multiplies by PyTorch's own matmul, in the dtype of the inputs.

    A subclass for another arithmetic overrides `linear`, `input_gradient` and `weight_gradient`.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x · weightᵀ + bias (…, N), differentiable, for x (…, K), weight (N, K) and bias
        (N,) or None. Under autocast it is computed in autocast's dtype."""
        return F.linear(x, weight, bias)

    def adding_like(self, n_rows: int) -> AbstractContextManager[None]:
        """Inside the `with` block, add fewer rows than n_rows as n_rows are added, where this
        Matmul can, so that all of them round alike. PyTorch's cannot."""
        return nullcontext()

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
        self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups
    ) -> Tensor:
        """Return x · weight[e]ᵀ + bias[e] (R, N), differentiable, for rows x (R, K) sorted by group
        e, weight (E, N, K) and bias (E, N) or None; rows that belong to none of the `groups` give
        0. Under autocast it is computed in autocast's dtype."""
        dtype = matmul_dtype(x)
        x, weight = x.to(dtype), weight.to(dtype)
        if groups.at_once:
            assert bias is None  # refused by `at_once_obstacle`
            return grouped_linear_at_once(x, weight, groups.ends, groups.holds_all)
        return grouped_linear(x, weight, None if bias is None else bias.to(dtype), groups.ends)


class PreciseSums(Matmul):
    """The plain Matmul for GPUs, which multiply 16-bit matrices and add the product to an fp32 one:
    a weight's gradient is not rounded to 16 bits before it is added, and takes no operation and no
    memory of its own."""

    @uncompiled  # within compiled code the sum would be made beside the total
    def differentiate(self, g: Tensor, x: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
        """Return the gradient for x (R, K), and add the weight's gradient to `weight_grad` (N, K)
        in place, in fp32 and in one matmul, given the gradient g (R, N) of x · weightᵀ."""
        if weight_grad.dtype == x.dtype:
            return super().differentiate(g, x, weight, weight_grad)
        torch.addmm(weight_grad, g.t(), x, out_dtype=weight_grad.dtype, out=weight_grad)
        return self.input_gradient(g, weight)


PLAIN = Matmul()
"""The `Matmul` that modules use unless given another."""
PRECISE_SUMS = PreciseSums()


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
@constant
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
    """Return the gradients of a (M, K) and b (K, N), given the gradient g (M, N) of their
    product."""
    a, b = ctx.saved_tensors
    wants_a, wants_b = ctx.needs_input_grad
    return (
        exact_product(g, b.t()) if wants_a else None,
        exact_product(a.t(), g) if wants_b else None,
    )


exact_product.register_autograd(_differentiate_product, setup_context=_save_factors)
