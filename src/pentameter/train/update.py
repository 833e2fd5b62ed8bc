"""From gradients to new weights: unscale, norm, clip, step."""

from __future__ import annotations

import math

from torch.nn import Parameter

from pentameter.optim.build import AnyOptimizer, set_learning_rate
from pentameter.optim.clip import clip_gradients, unscale_gradients
from pentameter.parallel.engine import Engine, LossSum


def update_weights(
    engine: Engine,
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
    unscale_gradients(engine.parameters(), loss_scale)
    norm = engine.gradient_norm()
    norm_value = norm.item()
    if math.isfinite(loss.mean) and math.isfinite(norm_value):
        for parameters in _by_mesh(engine):
            clip_gradients(parameters, norm, clip_norm)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    optimizer.zero_grad(set_to_none=not engine.adds_up_in_place)
    return norm_value


def _by_mesh(engine: Engine) -> list[list[Parameter]]:
    """The parameters in lists that can be updated together: those of different meshes cannot."""
    groups: dict[object, list[Parameter]] = {}
    for parameter in engine.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())
