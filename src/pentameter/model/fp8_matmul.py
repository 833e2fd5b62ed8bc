"""Matmuls of linear layers in 8 bits: output and gradient of the input from numbers of
`torch.float8_e4m3fn`, the weight's gradient in the products' own dtype.

Each row of a factor, along which a matmul sums, has a scale of its own, a power of two. So a
token's result depends on no other token, and micro-batches and layouts change nothing; and since a
product of powers of two only moves an exponent, results are scaled after the matmul without loss.
Weight gradients sum over tokens, whose scales would differ from layout to layout.

Shapes: R rows, K inputs and N outputs of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pentameter.model.matmul import PLAIN, Matmul, matmul_dtype

DIVISOR = 16
"""Divides the sides of matrices that GPUs multiply in 8 bits; others are filled up with zeros."""
LEAST_CAPABILITY = 89
"""Compute capability times ten of the first NVIDIA GPUs that multiply in 8 bits."""
_TOP = 128.0
"""A row's largest number is scaled to at least this and less than twice of it; 448 is e4m3's."""
_LEAST = 2.0**-100


@dataclass(frozen=True)
class Fp8Matmul(Matmul):
    """The Matmul in 8 bits, for linear layers in blocks. It emulates the numbers where the device
    is a CPU: the same roundings, multiplied in `products`. Whatever is asked for in another dtype,
    as samples in the weights', stays plain."""

    products: torch.dtype

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x · weightᵀ + bias (…, N), differentiable, for x (…, K), weight (N, K) and bias
        (N,) or None; in 8 bits unless N is 1, as it is for a gate."""
        dtype = matmul_dtype(x)
        if dtype is not self.products or len(weight) == 1:
            return F.linear(x, weight, bias)
        y: Tensor = _Linear.apply(x.to(dtype).flatten(0, -2), weight.to(dtype))
        y = y.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(dtype)


class _Linear(Function):
    """Autograd function for x · weightᵀ (R, N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return x · weightᵀ (R, N) for x (R, K) and weight (N, K) in one dtype."""
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x (R, K), in 8 bits, and of weight (N, K), for g (R, N)."""
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        return (
            _product(g, weight.t()) if wants_x else None,
            PLAIN.weight_gradient(g, x) if wants_weight else None,
        )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a · bᵀ (M, N) for a (M, K) and b (N, K), both rounded to 8 bits, in their dtype."""
    (a8, a_unit), (b8, b_unit) = _in_8_bits(a), _in_8_bits(b)
    return (fp8_product(a8, b8, a.dtype) * (a_unit * b_unit.t())).to(a.dtype)


def _in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (M, K) rounded to 8 bits, and the power of two that is each row's unit (M, 1), in
    float32. A row with a number that is not finite becomes NaN."""
    largest = x.abs().amax(1, keepdim=True).float().clamp_min(_LEAST)
    exponent = largest.view(torch.int32) & 0x7F800000  # without the mantissa: rounded down to 2^n
    unit = exponent.view(torch.float32) / _TOP
    return (x * (1 / unit)).to(torch.float8_e4m3fn).contiguous(), unit


@torch.library.custom_op("pentameter::fp8_product", mutates_args=())
def fp8_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a · bᵀ (M, N) in `dtype` for a (M, K) and b (N, K) in 8 bits. A custom operation, as
    compiled code knows no such matmul for a CPU."""
    if a.device.type == "cpu":
        return a.to(dtype) @ b.to(dtype).t()
    n, k = -len(b) % DIVISOR, -a.shape[1] % DIVISOR
    if n or k:
        a = F.pad(a.view(torch.uint8), (0, k)).view(a.dtype)
        b = F.pad(b.view(torch.uint8), (0, k, 0, n)).view(b.dtype)
    one = torch.ones((), device=a.device)
    how = F.ScalingType.TensorWise
    y = F.scaled_mm(a, b.t(), one, how, one, how, output_dtype=dtype)
    return y[:, : y.shape[1] - n].contiguous()


@fp8_product.register_fake
def _(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def fp8_obstacle(products: torch.dtype, device: torch.device, capability: int | None) -> str | None:
    """Return the reason that a device cannot multiply in 8 bits, None if it can: a CPU emulates
    them, and a GPU needs a compute `capability` (times ten; None for an AMD chip) of
    LEAST_CAPABILITY, bf16 `products`, and to agree with float64 in a trial."""
    if device.type == "cpu":
        return None
    if capability is None or capability < LEAST_CAPABILITY:
        return "that needs an NVIDIA GPU of compute capability 8.9 or higher"
    if products is not torch.bfloat16:
        return "a GPU does so with train.precision='bf16' alone"
    return _disagreement(device)


def _disagreement(device: torch.device) -> str | None:
    """Try output and gradients on a device. Return a phrase that says by how much one differs from
    float64's, emulated on a CPU from the same 16-bit numbers; None if none does."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (208, 90), "weight": (330, 90), "g": (208, 330)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    drawn = {name: each.bfloat16() for name, each in drawn.items()}
    drawn["x"][:7] *= 2.0**20  # rows of other sizes
    found = results(*(each.to(device) for each in drawn.values()))
    expected = results(*(each.double() for each in drawn.values()))
    for name, one, other in zip(("output", "input's", "weight's"), found, expected, strict=True):
        off = (one.double().cpu() - other).norm(dim=1) / other.norm(dim=1)
        if not (worst := off.max().item()) <= 2.0**-8:
            what = name if name == "output" else f"{name} gradient"
            return f"in a trial its {what} was off by {worst:.1e} of float64's"
    return None


def results(x: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output x · weightᵀ (R, N) in 8 bits, and the gradients of x (R, K) and weight
    (N, K) for the gradient g (R, N), all in the arguments' dtype."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = Fp8Matmul(x.dtype).linear(x, weight)
    x_gradient, weight_gradient = torch.autograd.grad(y, (x, weight), g)
    return y.detach(), x_gradient, weight_gradient
