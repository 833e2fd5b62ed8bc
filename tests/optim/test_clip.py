"""Norms, clipping and the fp16 loss scale."""

import pytest
import torch

from pentameter.optim.clip import LossScale, clip_gradients, gradient_norm, unscale_gradients


def parameters_with_gradients():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[1].grad = torch.tensor([0.0, 4.0])
    return parameters  # the third has no gradient


def test_norm_is_over_all_parameters_together():
    assert gradient_norm(parameters_with_gradients()).item() == 5.0


def test_clipping_shrinks_to_the_limit_and_no_further():
    parameters = parameters_with_gradients()
    clip_gradients(parameters, gradient_norm(parameters), 1.0)
    assert gradient_norm(parameters).item() == pytest.approx(1.0, rel=1e-6)
    clip_gradients(parameters, gradient_norm(parameters), 10.0)
    assert gradient_norm(parameters).item() == pytest.approx(1.0, rel=1e-6)


def test_zero_does_not_clip():
    parameters = parameters_with_gradients()
    clip_gradients(parameters, gradient_norm(parameters), 0.0)
    assert gradient_norm(parameters).item() == 5.0


def test_unscaling_undoes_a_scaled_loss():
    parameters = parameters_with_gradients()
    for parameter in parameters[:2]:
        parameter.grad *= 1024
    unscale_gradients(parameters, 1024.0)
    assert gradient_norm(parameters).item() == 5.0


def test_loss_scale_halves_on_overflow_and_doubles_after_enough_good_steps():
    scale = LossScale(scale=8.0, growth_interval=3)
    scale.update(finite=False)
    assert scale.scale == 4.0
    for _ in range(3):
        scale.update(finite=True)
    assert scale.scale == 8.0
    for _ in range(20):
        scale.update(finite=False)
    assert scale.scale == 1.0
