"""Functions that `torch.compile` compiles one by one, separately for each kind of arguments.

Importing a file that uses this compiles nothing: the first call does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with its own copy of the code object, to be compiled.

    PyTorch counts recompilations per code object and gives up after eight, and a process may train
    several models.
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
    """Return `function`, compiled at its first call for each kind of arguments.

    Each kind (shapes, types, numbers) gets its own code. Importing this file compiles nothing.
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
    """Return the properties of an argument that its compilation depends on."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype, argument.requires_grad
    if isinstance(argument, tuple | list):
        return tuple(map(_kind, argument))
    return argument
