"""Kernels for CPUs with AMX, in C++: causal attention in bf16, and a transposing copy.

`cpp/attention.cpp` says how they work. `load` builds them where a machine can run them; where
nothing is loaded, the step uses PyTorch's products.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from pentameter.disk.cache import cache_folder
from pentameter.machine.capabilities import Capabilities, find_compiler
from pentameter.model.dropout import keep_bound

SOURCES = tuple(Path(__file__).with_name("cpp") / name for name in ("attention.cpp", "tiles.h"))
"""What to compile, and what it includes."""
FLAGS = ("-O3", "-std=c++17", "-march=sapphirerapids", "-shared", "-fPIC", "-fopenmp")
BUILD_SECONDS = 120  # it takes one

_loaded: list[ctypes.CDLL] = []  # at most one


def load(capabilities: Capabilities) -> str | None:
    """Load the AMX kernels, built into the cache at the first call; the reason where that fails.

    Their absence costs time, never a run, so nothing is raised.
    """
    if not capabilities.cpu.amx_bf16:
        return "the CPU has no AMX"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the AMX kernels are for Linux on x86-64"
    try:
        library = ctypes.CDLL(str(_built()))
        works = library.pentameter_amx_works() == 1
    except (OSError, subprocess.SubprocessError) as error:
        return f"the AMX kernels cannot be built: {error}"
    if not works:
        return "the system does not let this process use AMX"
    _loaded[:] = [library]
    return None


def _built() -> Path:
    """The library's path; its name is the hash of the sources, so that none is out of date.

    Raises:
        OSError: the cache cannot be written, or the compiler fails.
    """
    content = b"".join(source.read_bytes() for source in SOURCES) + " ".join(FLAGS).encode()
    library = cache_folder() / "native" / f"amx-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = find_compiler(torch.device("cpu"))
    if not compiler.works or compiler.command is None:
        raise OSError(compiler.reason)
    library.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may build at once: each writes its own file and puts it in place.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        command = [compiler.command, *FLAGS, str(SOURCES[0]), "-o", str(fresh)]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
        )
        if result.returncode != 0:
            raise OSError(next(iter(result.stderr.splitlines()), f"exit {result.returncode}"))
        os.replace(fresh, library)
    return library


def unload() -> None:
    """Use PyTorch's products from now on."""
    _loaded.clear()


def can_attend(dtype: torch.dtype, head_size: int) -> bool:
    """True if the kernels are loaded and take heads of this size in this dtype."""
    return bool(_loaded) and dtype is torch.bfloat16 and head_size % 32 == 0


def can_transpose(x: Tensor) -> bool:
    """True if the kernels are loaded and take x (M, n)."""
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
