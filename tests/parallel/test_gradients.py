"""Norms, clipping and unscaling."""

import pytest
import torch
from on_meta import META
from torch.utils._python_dispatch import TorchDispatchMode  # documented by this path

from pentameter.parallel.gradients import clip, norm_here, unscale


def parameters_with_gradients():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[1].grad = torch.tensor([0.0, 4.0])
    return parameters  # the third has no gradient


def test_norm_is_over_all_parameters_together():
    assert norm_here(parameters_with_gradients()).item() == 5.0


def test_clipping_shrinks_to_the_limit_and_no_further():
    parameters = parameters_with_gradients()
    clip(parameters, norm_here(parameters), 1.0)
    assert norm_here(parameters).item() == pytest.approx(1.0, rel=1e-6)
    clip(parameters, norm_here(parameters), 10.0)
    assert norm_here(parameters).item() == pytest.approx(1.0, rel=1e-6)


def test_zero_does_not_clip():
    parameters = parameters_with_gradients()
    clip(parameters, norm_here(parameters), 0.0)
    assert norm_here(parameters).item() == 5.0


def test_unscaling_undoes_a_scaled_loss():
    parameters = parameters_with_gradients()
    for parameter in parameters[:2]:
        parameter.grad *= 1024
    unscale(parameters, 1024.0)
    assert norm_here(parameters).item() == 5.0


class Counting(TorchDispatchMode):
    """Counts operations."""

    n_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n_operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", META], ids=str)
def test_unscaling_is_one_operation_for_all(device):
    parameters = [torch.nn.Parameter(torch.zeros(2, device=device)) for _ in range(50)]
    for parameter in parameters:
        parameter.grad = torch.ones(2, device=device)
    with Counting() as counting:
        unscale(parameters, 1024.0)
    assert counting.n_operations == 1
