"""PyTorch's optimizers without what imports its compiler.

`torch.optim` keeps its methods out of compiled code, and for that imports the compiler once an
optimizer is made: a second of a start on some hosts, four on others, also where nothing is
compiled. The updates here are PyTorch's own functions, below those decorators.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch


def _update(rule: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the `step` of one of PyTorch's optimizers, which records no gradients."""
    step: Callable[..., Any] = torch.no_grad()(unwrap(rule.step))
    return step


class PlainRule(torch.optim.Optimizer):
    """Base class for optimizers that do not import PyTorch's compiler."""

    add_param_group: Any = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad: Any = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict: Any = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict: Any = unwrap(torch.optim.Optimizer.load_state_dict)


class SGD(PlainRule, torch.optim.SGD):
    """`torch.optim.SGD`."""

    step: Any = _update(torch.optim.SGD)


class Adam(PlainRule, torch.optim.Adam):
    """`torch.optim.Adam`."""

    step: Any = _update(torch.optim.Adam)


class AdamW(PlainRule, torch.optim.AdamW):
    """`torch.optim.AdamW`."""

    step: Any = _update(torch.optim.AdamW)


class Muon(PlainRule, torch.optim.Muon):
    """`torch.optim.Muon`."""

    step: Any = _update(torch.optim.Muon)


ADAM = (Adam, AdamW, torch.optim.Adam, torch.optim.AdamW)
"""The classes that update by Adam's rule, with their own state alone: a subclass may keep more."""
