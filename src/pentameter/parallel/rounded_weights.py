"""Weights rounded for products once a step, not in every pass, beside those that are updated.

While a step runs, modules have leaves in the products' dtype in the place of their parameters. What
autograd adds to a leaf goes at once to the gradient of the whole parameter, in its own dtype: the
same sum, bit by bit, as where every pass rounds and every gradient is widened first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pentameter.parallel.gradients import local
from pentameter.parallel.model_source import ModelSource
from pentameter.parallel.precision import arithmetic
from pentameter.planning.plan import Plan


def rounded_weights(
    source: ModelSource, models: Iterable[nn.Module], plan: Plan, precision: str
) -> RoundedWeights:
    """The RoundedWeights of these slices, within which the passes of a step run; of nothing, unless
    the plan's rules round weights once."""
    dtype = arithmetic(precision).autocast
    if dtype is None or not plan.rules.rounds_once(plan.n_micro_batches):
        return RoundedWeights([], torch.float32)
    units = [unit for model in models for unit in source.gathered_units(model)]
    return RoundedWeights(units, dtype)


class RoundedWeights(contextlib.AbstractContextManager[None]):
    """The parameters of `units`, which products alone read, rounded to `dtype`.

    `units` are modules, and whether products alone read their parameters, as
    `ModelSource.gathered_units` returns them; those of other units within are left as they are.
    Within its `with` the modules compute with the leaves, which are made in the first one and stay.
    Hooks on the parameters do not run in it: autograd comes to the leaves.
    """

    def __init__(self, units: Sequence[tuple[nn.Module, bool]], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places: list[tuple[nn.Module, str, Parameter]] = []
        self._leaves: list[Parameter] = []
        others = {id(each) for unit, rounds in units if not rounds for each in unit.modules()}
        for unit in (unit for unit, rounds in units if rounds):
            for owner in unit.modules():
                if id(owner) not in others:
                    own = owner.named_parameters(recurse=False)
                    self._places += [(owner, name, parameter) for name, parameter in own]

    def __enter__(self) -> None:
        """Round the weights, and let modules have them."""
        self._round()
        for (owner, name, _), leaf in zip(self._places, self._leaves, strict=True):
            setattr(owner, name, leaf)

    def __exit__(self, *_: object) -> None:
        """Give the modules their parameters back, which have the gradients."""
        for (owner, name, parameter), leaf in zip(self._places, self._leaves, strict=True):
            setattr(owner, name, parameter)
            leaf.grad = None  # that a step which failed has left

    def collect(self) -> None:
        """Pass on what was added to leaves otherwise than by autograd, which no hook sees."""
        for (_, _, parameter), leaf in zip(self._places, self._leaves, strict=False):
            if leaf.grad is not None:
                _pass_on(parameter, leaf)

    @torch.no_grad()
    def _round(self) -> None:
        if len(self._leaves) < len(self._places):
            self._leaves = [self._leaf(parameter) for _, _, parameter in self._places]
            return
        for index, ((_, _, parameter), leaf) in enumerate(
            zip(self._places, self._leaves, strict=True)
        ):
            if leaf.requires_grad == parameter.requires_grad:
                local(leaf).copy_(local(parameter))
            else:  # it was frozen since, or is no more
                self._leaves[index] = self._leaf(parameter)

    def _leaf(self, parameter: Parameter) -> Parameter:
        leaf = Parameter(parameter.detach().to(self._dtype), parameter.requires_grad)
        if parameter.requires_grad:
            leaf.register_post_accumulate_grad_hook(partial(_pass_on, parameter))
        return leaf


def _pass_on(parameter: Parameter, leaf: Tensor) -> None:
    """Add the gradient of a rounded leaf to that of the parameter, in place, and forget it."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        local(parameter.grad).add_(local(gradient))
