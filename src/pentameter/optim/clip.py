"""Gradient norm, clipping, and the scale that keeps fp16 gradients representable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from pentameter.config.section import NonNegative, Positive, PositiveFloat


def gradient_norm(parameters: Iterable[Parameter]) -> Tensor:
    """The Euclidean norm of all gradients together, 0-dim; a parameter without one counts 0."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def unscale_gradients(parameters: Iterable[Parameter], scale: float) -> None:
    """Divide every gradient by the loss scale, in place; a scale of 1 touches nothing."""
    if scale == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(1.0 / scale)


def clip_gradients(parameters: Iterable[Parameter], norm: Tensor, clip_norm: float) -> None:
    """Shrink all gradients together so that their norm, now `norm`, is at most `clip_norm`.

    A `clip_norm` of 0 does not clip. The norm is given, not recomputed: under a mesh only its
    owner knows how to count each element once.
    """
    if clip_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018): a step whose gradients overflow
    halves the scale and is skipped; `growth_interval` good steps in a row double it.

    The overflow test is the gradient norm itself, which every rank already agrees on.
    """

    scale: PositiveFloat = 2.0**16
    good_steps: NonNegative = 0
    growth_interval: Positive = 2000

    def update(self, *, finite: bool) -> None:
        """Record whether the step's gradients were finite."""
        if not finite:
            self.scale = max(1.0, self.scale / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0
