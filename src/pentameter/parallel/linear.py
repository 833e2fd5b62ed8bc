"""What a module computes in place of its own `forward`: the styles of a layout's roles, and linear
layers in a run's arithmetic, with their adapters. The one way in which these come into a model.

Shapes: K inputs and N outputs of a layer, or of this rank's shard of it; r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pentameter.model.experts import GroupedLinear
from pentameter.model.gpt import GPT, TiedHead
from pentameter.model.loss import HeadLoss
from pentameter.model.matmul import PLAIN, Matmul
from pentameter.parallel.gradients import local
from pentameter.planning.adapters import A
from pentameter.planning.architecture import Operation, Role
from pentameter.planning.gpt import operations

Forward = Callable[..., Tensor]


def replace_forward(module: nn.Module, forward: Forward) -> None:
    """Set a module's `forward`, in place. Its parameters, its hooks and the names in its
    `state_dict()` stay."""
    target: Any = module
    target.forward = forward


def install_styles(
    model: GPT,
    styles: Mapping[Role, Callable[..., Forward]],
    of_loss: Callable[..., Forward],
    context: Any,
) -> None:
    """Replace the forward of each operation's module by the one that its role's style makes, and
    the loss's by that of `of_loss`, in place, given `context`; operations whose role has no style
    stay unchanged."""
    for op in slice_operations(model):
        if op.role is not None and op.role in styles:
            module = model.get_submodule(op.name)
            replace_forward(module, styles[op.role](context, module, op))
    if model.is_last:
        replace_forward(model.head_loss, of_loss(context, model.head_loss))


def slice_operations(model: GPT) -> Sequence[Operation]:
    """Return the operations in a slice's layers."""
    return operations(model.config, range(*model.layers))


def use_matmul(model: nn.Module, matmul: Matmul) -> None:
    """Have linear layers, experts, head and loss multiply by `matmul`, in place."""
    if matmul is PLAIN:  # as they do by themselves
        return
    for module in model.modules():
        if isinstance(module, TiedHead | HeadLoss | GroupedLinear):
            replace_forward(module, partial(module.forward, matmul=matmul))
        elif type(module).forward is nn.Linear.forward:
            replace_forward(module, partial(_linear, matmul, module))


def _linear(matmul: Matmul, linear: Any, x: Tensor) -> Tensor:
    """Return a linear layer's output (…, N) for x (…, K)."""
    return matmul.linear(x, linear.weight, linear.bias)


def adapt(linear: Any, factor: float, matmul: Matmul) -> None:
    """Have a linear layer with LoRA matrices add `factor` times their output, in place."""
    linear.lora_factor = factor
    forward = linear.forward
    replace_forward(linear, lambda x: adapted(matmul, linear, x, forward(x)))


def adapted(matmul: Matmul, linear: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return y (…, N), the output of a linear layer or of this rank's shard for x (…, K), plus
    that of its adapter, factor · B A x, if it has one."""
    if not hasattr(linear, A):
        return y
    a, b = linear.lora_a, linear.lora_b  # (r, K), (N, r)
    if not isinstance(x, DTensor):  # PyTorch's styles pass DTensors, ours local shards
        a, b = local(a), local(b)
    return y + linear.lora_factor * matmul.linear(matmul.linear(x, a), b)
