"""Sub-layer ends and feed-forward activations on a CPU with AVX2 or AVX-512, computed by the C++
kernels in `cpp/add_norm.cpp` and `cpp/activation.cpp`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.fused_cpu.activations import curve
from pentameter.fused_cpu.kernels import ROWS_PER_SUM
from pentameter.fused_cpu.native import CHANNELS, Struct, call, fields, serves
from pentameter.model.dropout import keep_bound, rows_per_block


class SubLayerEnd(NamedTuple):
    """The constant arguments for x + dropout(y + bias) and the norm that follows: the bias (D,) or
    None, dropout's keys, int32 (B, 2), or None where nothing is dropped, and probability `p`,
    whether the norm subtracts the mean (`centred`), and its epsilon."""

    bias: Tensor | None
    keys: Tensor | None
    p: float
    centred: bool
    eps: float


class _AddNorm(Struct):
    """ctypes form of the C++ struct `AddNorm` in cpp/add_norm.cpp: the arguments of the kernel that
    adds a sub-layer's output to the residual stream and normalises."""

    _fields_ = fields(
        "bias keys",
        int64="M T D in_block centred rows low",
        int32="bound",
        float32="dropout_scale eps",
    )


def can_add_norm(x: Tensor, y: Tensor) -> bool:
    """Return whether the vector library is loaded and takes the residual stream x and a sub-layer's
    output y, (B, T, D) each: x in fp32, y in fp32 or bf16, D divisible by CHANNELS."""
    return serves("vector", x.dtype, y.dtype) and x.shape[-1] % CHANNELS == 0


def add_norm(how: SubLayerEnd, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x' = x + dropout(y + bias) (B, T, D), x' normalised in y's dtype (B, T, D), and the
    norm's mean and scale (B, T, 1), for x and y (B, T, D). how: the bias, dropout and norm."""
    x, y = x.contiguous(), y.contiguous()
    out, normed = torch.empty_like(x), torch.empty_like(y)
    mean, scale = (x.new_empty(*x.shape[:-1], 1) for _ in range(2))
    call("vector", "add_norm", _add_norm(how, y), out, normed, mean, scale, x, y)
    return out, normed, mean, scale


def add_norm_backward(
    how: SubLayerEnd, g: Tensor | None, g_norm: Tensor, out: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gradients for x and y, (B, T, D) each, and for the bias, (D,) or None.

    how: the bias, dropout and norm that `add_norm` was called with. g: the gradient for `out`
    (B, T, D), `add_norm`'s first result; None if nothing reads `out` further. g_norm: the gradient
    for the normalised result (B, T, D). mean, scale: from `add_norm`.
    """
    g, g_norm = None if g is None else g.contiguous(), g_norm.contiguous()
    g_x, g_y = torch.empty_like(out), torch.empty_like(g_norm)
    job = _add_norm(how, g_norm)
    sums = out.new_empty(-(-job.M // job.rows), job.D)
    call("vector", "add_norm_backward", job, g_x, g_y, sums, g, g_norm, out, mean, scale)
    return g_x, g_y, None if how.bias is None else sums.sum(0)


def can_norm(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the vector library is loaded, and can normalise or drop the residual stream x
    (B, T, D) in fp32, with the norm in `dtype` and D divisible by CHANNELS."""
    return serves("vector", x.dtype, dtype) and x.shape[-1] % CHANNELS == 0


def norm(x: Tensor, centred: bool, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (B, T, D) normalised in `dtype`, without the norm's weight and bias, and the mean
    and scale (B, T, 1) that backward needs. centred, eps: whether the norm subtracts the mean, and
    its epsilon."""
    x = x.contiguous()
    normed = torch.empty_like(x, dtype=dtype)
    mean, scale = (x.new_empty(*x.shape[:-1], 1) for _ in range(2))
    job = _add_norm(SubLayerEnd(None, None, 0.0, centred, eps), normed)
    call("vector", "add_norm", job, None, normed, mean, scale, x, None)
    return normed, mean, scale


def norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, centred: bool, eps: float
) -> Tensor:
    """Return x's gradient (B, T, D), given g, that of `norm`'s first result. x, centred, eps:
    `norm`'s arguments; mean, scale: its other results."""
    x, g = x.contiguous(), g.contiguous()
    g_x = torch.empty_like(x)
    job = _add_norm(SubLayerEnd(None, None, 0.0, centred, eps), g)
    call("vector", "add_norm_backward", job, g_x, None, None, None, g, x, mean, scale)
    return g_x


def dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """Return x (B, T, D) in fp32 after dropout with probability p above 0 and the mask that `keys`,
    int32 (B, 2), determine."""
    x = x.contiguous()
    y = torch.empty_like(x)
    call("vector", "dropout", _add_norm(SubLayerEnd(None, keys, p, False, 0.0), x), y, x)
    return y


def _add_norm(how: SubLayerEnd, y: Tensor) -> _AddNorm:
    """Return the arguments of the C++ function `pentameter_add_norm`, or of its backward one, for
    the constants `how`. Only sizes and dtype are read of y (B, T, D), which may be y's gradient."""
    B, T, D = y.shape
    scale = 1 / (1 - how.p) if how.p else 0.0
    sizes = (B * T, T, D, rows_per_block(T, D) or T)
    flags = (how.centred, ROWS_PER_SUM, y.dtype is torch.bfloat16)
    return _AddNorm(how.bias, how.keys, *sizes, *flags, keep_bound(how.p), scale, how.eps)


_TABLE = 0
_FORMULAS = {"relu2": 1, "relu": 2, "swiglu": 3, "gelu": 4, "geglu": 4, "gelu_tanh": 5}
"""Maps a value of `model.feed_forward.activation` to its number in cpp/activation.cpp, for fp32 and
for ReLU²; other bf16 activations use a table (number _TABLE)."""


class _Activation(Struct):
    """ctypes form of the C++ struct `Activation` in cpp/activation.cpp: the arguments of the kernel
    of activation functions."""

    _fields_ = fields("bias pieces", int64="M N n rows low kind", float32="per_unit")


def can_activate(h: Tensor, bias: Tensor | None, gated: bool) -> bool:
    """Return whether the vector library is loaded and takes h (…, N), the first linear's output,
    with the bias (N,): h contiguous, in fp32 or bf16, the bias in fp32 or None, and the
    activation's width (N, or N / 2 if `gated`) divisible by CHANNELS."""
    n = h.shape[-1] // (1 + gated)
    parameters = torch.float32 if bias is None else bias.dtype
    return serves("vector", parameters, h.dtype) and n % CHANNELS == 0 and h.is_contiguous()


def activate(h: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
    """Return f(h + bias) (…, n) in h's dtype, for h (…, N) and bias (N,) or None. kind: f's name in
    `model.feed_forward.activation`. If `gated`, N = 2 · n, and the result is f(first half) times
    the second half; else n = N."""
    job = _activation(h, bias, kind, gated)
    y = h.new_empty(*h.shape[:-1], job.n)
    call("vector", "activate", job, y, h)
    return y


def activation_gradients(
    g: Tensor, h: Tensor, bias: Tensor | None, kind: str, gated: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (h's gradient (…, N), the activation's output (…, n) computed again, the bias's
    gradient (N,), or None without a bias).

    g: the output's gradient (…, n). h, bias, kind, gated: as passed to `activate`: the first
    linear's output (…, N), its bias, the activation's name, and whether half the channels are a
    gate.
    """
    job, g = _activation(h, bias, kind, gated), g.contiguous()
    g_h, y = torch.empty_like(h), torch.empty_like(g)
    sums = h.new_empty(-(-job.M // job.rows), job.N, dtype=torch.float32)
    call("vector", "activation_gradients", job, g_h, y, sums, g, h)
    return g_h, y, None if bias is None else sums.sum(0)


def _activation(h: Tensor, bias: Tensor | None, kind: str, gated: bool) -> _Activation:
    """Return the C++ call's arguments for h (…, N), its bias, the activation's name and whether
    half the channels are a gate."""
    N = h.shape[-1]
    low = h.dtype is torch.bfloat16
    table = curve(kind) if low else None
    number = _FORMULAS[kind] if table is None else _TABLE
    pieces, per_unit = (None, 0.0) if table is None else table
    sizes = (h.numel() // N, N, N // (1 + gated), ROWS_PER_SUM, low, number)
    return _Activation(bias, pieces, *sizes, per_unit)
