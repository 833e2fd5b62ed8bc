"""A decorator that has `torch.compile` compile a function by itself, once for each kind of
arguments (shapes, dtypes, numbers).

Importing a file that uses it compiles nothing: the first call does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of `function` with its own code object, to be passed to `torch.compile`.

    PyTorch counts recompilations per code object and gives up after eight, and a process may
    train several models.
    """
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        argdefs=function.__defaults__,
        closure=function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `function` so that it is compiled at its first call for each kind of arguments.

    Arguments are positional. Calls whose tensors have the same shapes, dtypes and `requires_grad`,
    and whose other arguments are equal, use the same compiled code.
    """

    @functools.cache
    def compiled(kind: Hashable) -> Callable[..., Any]:
        # Fused multiply-add: a tenth faster in these kernels, and rounds less.
        options: dict[str, str | int | bool | Callable[..., Any]] = {
            "cpp.enable_floating_point_contract_flag": "fast"
        }
        own = with_own_code(function)
        return torch.compile(own, fullgraph=True, dynamic=False, options=options)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return compiled(_kind(arguments))(*arguments)

    return call


def _kind(argument: Any) -> Hashable:
    """Return a hashable description of an argument on which compiled code depends: shape, dtype and
    `requires_grad` for a tensor, the items' for a tuple or list, any other value itself."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype, argument.requires_grad
    if isinstance(argument, tuple | list):
        return tuple(map(_kind, argument))
    return argument
