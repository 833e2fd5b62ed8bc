"""From gradients to new weights: unscale, norm, clip, step."""

from __future__ import annotations

import math

from pentameter.optim.build import AnyOptimizer, set_learning_rate
from pentameter.parallel.engine import Engine, LossSum


def update_weights(
    engine: Engine,
    optimizer: AnyOptimizer,
    loss: LossSum,
    rate: float,
    loss_scale: float,
    clip_norm: float,
) -> float:
    """Make an optimizer step from the gradients of `engine`, and return their norm before clipping,
    the same in every process.

    The gradients, which are `loss_scale` times too large, are used up. Where the loss or the norm
    is not finite the weights and the optimizer's state stay as they are. Collective.
    """
    engine.unscale_gradients(loss_scale)
    norm = engine.gradient_norm()
    norm_value = norm.item()
    if math.isfinite(loss.mean) and math.isfinite(norm_value):
        engine.clip_gradients(norm, clip_norm)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    engine.zero_gradients()
    return norm_value
