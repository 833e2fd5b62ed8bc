"""From gradients to new weights: unscale, norm, clip, step."""

from __future__ import annotations

import math

from torch.nn import Parameter

from pentameter.optim.build import AnyOptimizer, set_learning_rate
from pentameter.optim.clip import clip_gradients, unscale_gradients
from pentameter.parallel.stage import LossSum, Stage


def update_weights(
    stage: Stage,
    optimizer: AnyOptimizer,
    loss: LossSum,
    rate: float,
    loss_scale: float,
    clip_norm: float,
) -> float:
    """The gradient norm before clipping, the same in every process.

    Gradients, which are `loss_scale` times too large, are used up. Where the loss or the norm is
    not finite the weights and the optimizer's state stay as they are.
    """
    unscale_gradients(stage.parameters(), loss_scale)
    norm = stage.gradient_norm()
    norm_value = norm.item()
    if math.isfinite(loss.mean) and math.isfinite(norm_value):
        for parameters in _by_mesh(stage):
            clip_gradients(parameters, norm, clip_norm)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    optimizer.zero_grad(set_to_none=not stage.adds_up_in_place)
    return norm_value


def _by_mesh(stage: Stage) -> list[list[Parameter]]:
    """The parameters in lists that can be updated together: those of different meshes cannot."""
    groups: dict[object, list[Parameter]] = {}
    for parameter in stage.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())
