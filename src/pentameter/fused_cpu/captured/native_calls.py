"""Calls of C++ functions that are made again one after another without Python between them
(`cpp/calls.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from pentameter.fused_cpu import native
from pentameter.fused_cpu.native import NativeCall, Struct, fields

MOST_ARGUMENTS = 12
"""The largest number of arguments of such a function, MOST in cpp/calls.cpp."""


class _Call(Struct):
    """ctypes form of the C++ struct `Call` in cpp/calls.cpp."""

    _fields_ = fields("function arguments", int64="n checked")


class NativeCalls:
    """A function that makes these calls, one after another. The vector library must be loaded."""

    def __init__(self, calls: Sequence[NativeCall]) -> None:
        assert all(len(each.arguments) <= MOST_ARGUMENTS for each in calls)
        words = [(ctypes.c_int64 * len(each.arguments))(*each.arguments) for each in calls]
        self._held = calls, words
        made = zip(calls, words, strict=True)
        self._calls = (_Call * len(calls))(
            *(_Call(x.function, ctypes.addressof(own), len(own), x.is_checked) for x, own in made)
        )
        self._make = native.function("vector", "make_calls", n_pointers=1, n_numbers=1)

    def __call__(self) -> None:
        """Make the calls. Raises RuntimeError if one that is checked fails; none follows it."""
        if (error := self._make(self._calls, len(self._calls))) != 0:
            raise RuntimeError(f"a C++ function of the fused step failed: {error}")
