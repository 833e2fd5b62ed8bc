"""Kernels for CPUs with AMX, in C++: causal attention in bf16, and a transposing copy.

`cpp/attention.cpp` says how they work. `fused_cpu/build.py` builds them where a machine can run
them and hands the library to `load`; where nothing is loaded, the step uses PyTorch's products.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from pentameter.model.dropout import keep_bound

SOURCES = tuple(Path(__file__).with_name("cpp") / name for name in ("attention.cpp", "tiles.h"))
"""What to compile, and what it includes."""

_loaded: list[ctypes.CDLL] = []  # at most one


def load(path: Path) -> bool:
    """Use the library at `path` from now on, if this machine can run it.

    Raises:
        OSError: it is no library of these kernels.
    """
    library = ctypes.CDLL(str(path))
    works: bool = library.pentameter_amx_works() == 1
    if works:
        _loaded[:] = [library]
    return works


def unload() -> None:
    """Go back to PyTorch's products."""
    _loaded.clear()


def can_attend(dtype: torch.dtype, head_size: int) -> bool:
    """Whether the kernels are loaded and take heads of this size in this dtype."""
    return bool(_loaded) and dtype is torch.bfloat16 and head_size % 32 == 0


def can_transpose(x: Tensor) -> bool:
    """Whether the kernels are loaded and take x (M, n)."""
    whole = x.shape[0] % 32 == 0 and x.shape[1] % 32 == 0 and x.is_contiguous()
    return bool(_loaded) and x.dtype is torch.bfloat16 and whole


def transpose_into(out: Tensor, x: Tensor) -> None:
    """Write x (M, n) to out (n, M), which may have longer rows in memory: a multiple of 64."""
    M, n = x.shape
    sizes = (ctypes.c_int64(size) for size in (M, n, out.stride(0)))
    _loaded[0].pentameter_transpose(_at(out), _at(x), *sizes)


def attention_forward(
    qkv: Tensor, bias: Tensor | None, n_heads: int, keys: Tensor, context_length: int, p: float
) -> tuple[Tensor, Tensor]:
    """y (B, T, H·K) and the logarithms of each row's sum of weights, for qkv (B, T, H·3·K)."""
    B, T, width = qkv.shape
    y = qkv.new_empty(B, T, width // 3)
    logs = torch.empty(B, n_heads, -(-T // 32) * 32, dtype=torch.float32)
    _loaded[0].pentameter_attention_forward(
        *map(_at, (y, logs, qkv, bias, keys)), *_numbers(qkv, n_heads, context_length, p)
    )
    return y, logs


def attention_backward(
    g: Tensor,
    y: Tensor,
    logs: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    n_heads: int,
    keys: Tensor,
    context_length: int,
    p: float,
) -> Tensor:
    """The gradient (B, T, H·3·K) of qkv, given that of y, `g` (B, T, H·K)."""
    g_qkv = torch.empty_like(qkv)
    _loaded[0].pentameter_attention_backward(
        *map(_at, (g_qkv, g, y, logs, qkv, bias, keys)),
        *_numbers(qkv, n_heads, context_length, p),
    )
    return g_qkv


def _at(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _numbers(
    qkv: Tensor, n_heads: int, context_length: int, p: float
) -> tuple[ctypes.c_int | ctypes.c_float, ...]:
    B, T, width = qkv.shape
    sizes = (B, T, n_heads, width // (3 * n_heads), context_length, keep_bound(p))
    return *map(ctypes.c_int, sizes), ctypes.c_float(1 / (1 - p) if p else 0.0)
