"""Memory that PyTorch hands out without values holds NaN, so that who reads it before writing does
so in every run of a test, not in the one where malloc gave back something else than zeros."""

import ctypes
import functools

import torch
from torch.utils._device import _device_constructors


def fill_unset_memory():
    """From now on `torch.empty` and its like give NaN in this process, or large integers."""
    _device_constructors()  # looked up by `with torch.device(…)` once, by what they are now
    for owner, name in (
        *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
        *((torch.Tensor, name) for name in ("new_empty", "new_empty_strided")),
    ):
        setattr(owner, name, _filling(getattr(owner, name)))


def _filling(make):
    @functools.wraps(make)
    def filled(*arguments, **named):
        made = make(*arguments, **named)
        if not torch.compiler.is_compiling() and type(made) is torch.Tensor and made.is_cpu:
            # Not by an operation, which modes would see, and autograd.
            memory = made.untyped_storage()
            number = 0xFF if made.is_floating_point() or made.is_complex() else 0x7F
            ctypes.memset(memory.data_ptr(), 1 if made.dtype is torch.bool else number, len(memory))
        return made

    return filled
