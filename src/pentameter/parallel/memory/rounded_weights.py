"""Weights rounded for matmuls once per step instead of once per pass, kept next to the master
weights.

During a step, modules hold leaf tensors in the matmul dtype in place of their parameters. Any
gradient that autograd adds to a leaf is added at once to the master parameter's, in its own dtype:
bit by bit the same sum as when every pass rounds and every gradient is widened first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pentameter.parallel.gradients import local


class RoundedWeights(contextlib.AbstractContextManager[None]):
    """Context manager for a step's forward and backward passes: inside it, weights that only
    matmuls read are rounded to `dtype`. Does nothing without units.

    `units` pairs modules with whether only matmuls read their parameters; those with False, even
    nested in others, are left as they are. Inside the context the modules hold rounded leaf tensors
    in place of their parameters; these are created at the first entry and kept. Hooks on the
    parameters do not fire there, because autograd reaches the leaves instead.
    """

    def __init__(
        self, units: Sequence[tuple[nn.Module, bool]] = (), dtype: torch.dtype = torch.float32
    ) -> None:
        self._dtype = dtype
        self._slots: list[tuple[nn.Module, str, Parameter]] = []
        self._leaves: list[Parameter] = []
        others = {each for unit, rounds in units if not rounds for each in unit.modules()}
        owners = dict.fromkeys(  # units may lie within each other
            each for unit, rounds in units if rounds for each in unit.modules()
        )
        for owner in owners:
            if owner not in others:
                own = owner.named_parameters(recurse=False)
                self._slots += [(owner, name, parameter) for name, parameter in own]

    def __enter__(self) -> None:
        """Round the master weights into the leaves, and set these on the modules in place of the
        parameters."""
        self._round()
        for (owner, name, _), leaf in zip(self._slots, self._leaves, strict=True):
            setattr(owner, name, leaf)

    def __exit__(self, *_: object) -> None:
        """Set the master parameters, which hold the gradients, on the modules again."""
        for (owner, name, parameter), leaf in zip(self._slots, self._leaves, strict=True):
            setattr(owner, name, parameter)
            leaf.grad = None  # left by a step that failed

    def collect(self) -> None:
        """Add gradients that rounded leaves still hold to the parameters' `.grad`, and clear them.
        Needed after a pass that writes `.grad` without autograd's hooks, as the second half of a
        split backward pass does."""
        for (_, _, parameter), leaf in zip(self._slots, self._leaves, strict=False):
            if leaf.grad is not None:
                _pass_on(parameter, leaf)

    @torch.no_grad()
    def _round(self) -> None:
        """Copy the master weights into the leaves, creating leaves at the first call."""
        if len(self._leaves) < len(self._slots):
            self._leaves = [self._leaf(parameter) for _, _, parameter in self._slots]
            return
        for index, ((_, _, parameter), leaf) in enumerate(
            zip(self._slots, self._leaves, strict=True)
        ):
            if leaf.requires_grad == parameter.requires_grad:
                local(leaf).copy_(local(parameter))
            else:  # it was frozen or unfrozen since
                self._leaves[index] = self._leaf(parameter)

    def _leaf(self, parameter: Parameter) -> Parameter:
        """Create a leaf tensor with the parameter's shape and rounded values; a hook adds its
        gradient to the parameter's."""
        leaf = Parameter(parameter.detach().to(self._dtype), parameter.requires_grad)
        if parameter.requires_grad:
            leaf.register_post_accumulate_grad_hook(partial(_pass_on, parameter))
        return leaf


def _pass_on(parameter: Parameter, leaf: Tensor) -> None:
    """Add a rounded leaf's gradient to the parameter's, same shape, in place, and drop it."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        local(parameter.grad).add_(local(gradient))
