"""The matmuls of linear layers, plain or sharded, and of the head's loss.

Whoever multiplies by a layer's weight does it by a `Matmul`: the model's modules, layouts that
communicate between a matmul and its gradients, adapters. So another arithmetic is one class.

Shapes: K inputs and N outputs; R rows, of tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Matmul:
    """x · weightᵀ and the two matmuls of its backward pass, in the dtype of their inputs.

    A subclass that computes otherwise overrides `linear`, `input_gradient` and `weight_gradient`.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x · weightᵀ + bias (…, N), differentiable, for x (…, K), weight (N, K) and bias
        (N,). Under autocast it is computed in `matmul_dtype`."""
        return F.linear(x, weight, bias)

    def input_gradient(self, g: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """Return g · weight (…, K) for g (…, N) and weight (N, K); or add it to `total` (R, K) in
        place, for g (R, N)."""
        return g @ weight if total is None else total.addmm_(g, weight)

    def weight_gradient(self, g: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        """Return gᵀ · x (N, K) for g (R, N) and x (R, K); or add it to `total` (N, K) in place."""
        return g.t() @ x if total is None else total.addmm_(g.t(), x)

    def precise_weight_gradient(self, g: Tensor, x: Tensor) -> Tensor:
        """Return gᵀ · x (N, K) for g (R, N) and x (R, K), in float32 or higher."""
        precise = torch.promote_types(x.dtype, torch.float32)
        if x.dtype != torch.float16:
            return self.weight_gradient(g, x).to(precise)
        # A token in every row sums R entries of x: beyond 65,504, and no loss scale would help.
        scale = 2.0 ** -(len(x) // 256).bit_length()
        return self.weight_gradient(g, x * scale).to(precise).div_(scale)

    def differentiate(self, g: Tensor, x: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
        """Return the gradient for x (R, K), and add the weight's to `weight_grad` (N, K), given
        the gradient g (R, N) of x · weightᵀ."""
        if weight_grad.dtype == x.dtype:
            self.weight_gradient(g, x, weight_grad)
        else:
            weight_grad.add_(self.precise_weight_gradient(g, x))
        return self.input_gradient(g, weight)


PLAIN = Matmul()
"""What modules multiply by unless told otherwise."""


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matmul reads x (any shape): autocast's where it is on, else that
    of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
