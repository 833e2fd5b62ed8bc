"""The matmuls of linear layers, plain or sharded, and of the head's loss, behind one class.

Whoever multiplies by a layer's weight does it by a `Matmul`: the model's modules, tensor-parallel
layers that communicate between a matmul and its gradients, adapters. So a new arithmetic, such as a
narrower dtype, is one subclass.

Shapes: K inputs and N outputs; R rows, one per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Matmul:
    """A linear layer's matmul, x · weightᵀ, and the two in its backward pass, in their inputs'
    dtype.

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
        given the gradient g (R, N) of x · weightᵀ."""
        if weight_grad.dtype == x.dtype:
            self.weight_gradient(g, x, weight_grad)
        else:
            weight_grad.add_(self.precise_weight_gradient(g, x))
        return self.input_gradient(g, weight)


PLAIN = Matmul()
"""The `Matmul` that modules use unless given another."""


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matmul with x (any shape) is computed: autocast's if it is
    enabled for x's device, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
