"""Sub-layer ends and feed-forward activations on a CPU with AVX2 or AVX-512, by `cpp/add_norm.cpp`
and `cpp/activation.cpp`."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.fused_cpu.activations import curve
from pentameter.fused_cpu.native import CHANNELS, address, library, serves
from pentameter.model.dropout import keep_bound

ROWS_PER_BIAS_SUM = 64
"""Batch rows per partial sum in a bias gradient."""


class SubLayerEnd(NamedTuple):
    """A sub-layer's end: its output's bias, dropout's keys (B, 2) and probability, whether the next
    norm subtracts the mean, and its epsilon."""

    bias: Tensor | None
    keys: Tensor
    p: float
    centred: bool
    eps: float


class _AddNorm(ctypes.Structure):
    """`AddNorm` in cpp/add_norm.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias", "keys")),
        *((name, ctypes.c_int64) for name in ("M", "T", "D", "centred", "rows", "low")),
        ("bound", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("dropout_scale", "eps")),
    )


def can_add_norm(x: Tensor, y: Tensor) -> bool:
    """Return whether the kernels are loaded and take the residual stream x and y (B, T, D)."""
    return serves("vector", x.dtype, y.dtype) and x.shape[-1] % CHANNELS == 0


def add_norm(how: SubLayerEnd, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x + dropout(y + bias), its norm in y's dtype, and the norm's mean and scale (B, T, 1),
    for x and y (B, T, D)."""
    x, y = x.contiguous(), y.contiguous()
    out, normed = torch.empty_like(x), torch.empty_like(y)
    mean, scale = (x.new_empty(*x.shape[:-1], 1) for _ in range(2))
    library("vector").pentameter_add_norm(
        ctypes.byref(_add_norm(how, y)), *map(address, (out, normed, mean, scale, x, y))
    )
    return out, normed, mean, scale


def add_norm_backward(
    how: SubLayerEnd, g: Tensor | None, g_norm: Tensor, out: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gradients for x, y and the bias, if any. g: `out`'s gradient (B, T, D), if any;
    g_norm: the norm's."""
    g, g_norm = None if g is None else g.contiguous(), g_norm.contiguous()
    g_x, g_y = torch.empty_like(out), torch.empty_like(g_norm)
    job = _add_norm(how, g_norm)
    sums = out.new_empty(-(-job.M // job.rows), job.D)
    given = map(address, (g_x, g_y, sums, g, g_norm, out, mean, scale))
    library("vector").pentameter_add_norm_backward(ctypes.byref(job), *given)
    return g_x, g_y, None if how.bias is None else sums.sum(0)


def _add_norm(how: SubLayerEnd, y: Tensor) -> _AddNorm:
    B, T, D = y.shape
    scale = 1 / (1 - how.p) if how.p else 0.0
    addresses = map(address, (how.bias, how.keys))
    sizes = (B * T, T, D, how.centred, ROWS_PER_BIAS_SUM, y.dtype is torch.bfloat16)
    return _AddNorm(*addresses, *sizes, keep_bound(how.p), scale, how.eps)


_TABLE = 0
_FORMULAS = {"relu2": 1, "relu": 2, "swiglu": 3, "gelu": 4, "geglu": 4, "gelu_tanh": 5}
"""`model.activation` → its number in cpp/activation.cpp when no table is read."""


class _Activation(ctypes.Structure):
    """`Activation` in cpp/activation.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias", "pieces")),
        *((name, ctypes.c_int64) for name in ("M", "N", "n", "rows", "low", "kind")),
        ("per_unit", ctypes.c_float),
    )


def can_activate(h: Tensor, bias: Tensor | None, gated: bool) -> bool:
    """Return whether the kernels are loaded and take h (…, N), the first linear's output, and the
    bias (N)."""
    n = h.shape[-1] // (1 + gated)
    parameters = torch.float32 if bias is None else bias.dtype
    return serves("vector", parameters, h.dtype) and n % CHANNELS == 0 and h.is_contiguous()


def activate(h: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
    """Return the same as `activations.activate`: (…, n)."""
    job = _activation(h, bias, kind, gated)
    y = h.new_empty(*h.shape[:-1], job.n)
    library("vector").pentameter_activate(ctypes.byref(job), address(y), address(h))
    return y


def activation_gradients(
    g: Tensor, h: Tensor, bias: Tensor | None, kind: str, gated: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return h's gradient (…, N), given `activate`'s output gradient g, that output again, and the
    bias's gradient if there is one."""
    job, g = _activation(h, bias, kind, gated), g.contiguous()
    g_h, y = torch.empty_like(h), torch.empty_like(g)
    sums = h.new_empty(-(-job.M // job.rows), job.N, dtype=torch.float32)
    library("vector").pentameter_activation_gradients(
        ctypes.byref(job), *map(address, (g_h, y, sums, g, h))
    )
    return g_h, y, None if bias is None else sums.sum(0)


def _activation(h: Tensor, bias: Tensor | None, kind: str, gated: bool) -> _Activation:
    N = h.shape[-1]
    low = h.dtype is torch.bfloat16
    table = curve(kind) if low else None
    number = _FORMULAS[kind] if table is None else _TABLE
    pieces, per_unit = (None, 0.0) if table is None else table
    sizes = (h.numel() // N, N, N // (1 + gated), ROWS_PER_BIAS_SUM, low, number)
    return _Activation(address(bias), address(pieces), *sizes, per_unit)
