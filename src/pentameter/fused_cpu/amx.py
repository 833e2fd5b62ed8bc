"""Kernels for CPUs with AMX, in C++ and in bf16: causal attention, feed-forward layers, weight
gradients, and what joins a sub-layer to the next.

The files in `cpp/` say how they work. `load` builds them where a machine can run them; where
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
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.config.schema import ModelConfig
from pentameter.disk.cache import cache_folder
from pentameter.fused_cpu.heads import Heads
from pentameter.machine.capabilities import Capabilities, find_compiler
from pentameter.model.dropout import keep_bound
from pentameter.planning.architecture import head_size

SOURCES = tuple(sorted(Path(__file__).with_name("cpp").iterdir()))
"""The files to compile (.cpp) and those that they include (.h)."""
FLAGS = ("-O3", "-std=c++17", "-march=sapphirerapids", "-shared", "-fPIC", "-fopenmp")
BUILD_SECONDS = 120  # it takes some
MAX_HEAD = 256
"""Channels of a head that the kernels hold a row of."""

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
    compiled = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    # Several processes may build at once: each writes its own file and puts it in place.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        command = [compiler.command, *FLAGS, *compiled, "-o", str(fresh)]
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


def attention_obstacle(config: ModelConfig) -> str | None:
    """What keeps the kernels from computing an architecture's attention; None where they can."""
    size = head_size(config)
    if size % 32 or size > MAX_HEAD:
        return f"the AMX kernels want heads of a multiple of 32 up to {MAX_HEAD}, not {size}"
    if config.qk_norm == "width":
        return "the AMX kernels norm queries and keys head by head, not all heads together"
    return None


def can_attend(config: ModelConfig, parameters: torch.dtype, dtype: torch.dtype) -> bool:
    """True if the kernels are loaded and take an architecture's attention in this dtype, its
    biases and norms in that of the parameters."""
    return serves(parameters, dtype) and attention_obstacle(config) is None


def serves(parameters: torch.dtype, dtype: torch.dtype) -> bool:
    """True if the kernels are loaded and take parameters and products of these dtypes."""
    return bool(_loaded) and (parameters, dtype) == (torch.float32, torch.bfloat16)


ROWS_PER_CHUNK = 256
"""Rows of a chunk of a weight's gradient: 32 columns of each factor, 16 KiB, fit the L1 cache."""
ROWS_PER_BIAS_SUM = 64
"""Rows of a sum of a bias's gradient where a sub-layer ends."""
MAX_WEIGHT = 2**22
"""Elements of a weight whose gradient is left to the kernels: those of a larger one do not stay in
the cores' caches until all rows are added up, and PyTorch's product is faster."""


class Paired(NamedTuple):
    """A matrix (M, n) as a weight's gradient reads it: ROWS_PER_CHUNK rows after another, in panels
    of 32 columns, in pairs of rows."""

    data: Tensor
    n: int


def can_multiply_over_rows(left: Tensor, right: Tensor) -> bool:
    """True if the kernels are loaded and take leftᵀ · right for left (M, a) and right (M, b)."""
    sizes, fits = (*left.shape, right.shape[1]), left.shape[1] * right.shape[1] <= MAX_WEIGHT
    whole = all(size % 32 == 0 for size in sizes)
    lies = all(x.is_contiguous() and x.dtype is torch.bfloat16 for x in (left, right))
    return bool(_loaded) and fits and whole and lies


def product_over_rows(left: Tensor, right: Tensor | Paired, *, transposed: bool = False) -> Tensor:
    """leftᵀ · right, (a, b) in fp32, for left (M, a) and right (M, b); or its transpose (b, a)."""
    (M, a), paired = left.shape, isinstance(right, Paired)
    b, data = (right.n, right.data) if isinstance(right, Paired) else (right.shape[1], right)
    out = left.new_empty((b, a) if transposed else (a, b), dtype=torch.float32)
    sizes = (ctypes.c_int64(size) for size in (M, a, b, ROWS_PER_CHUNK, paired, transposed))
    _loaded[0].pentameter_weight_gradient(_at(out), _at(left), _at(data), *sizes)
    return out


class Curve(NamedTuple):
    """An activation's table: coefficients (4, 32) of cubic polynomials, the constant ones first,
    and the number of them for each unit of |x|."""

    pieces: Tensor
    per_unit: float


class FeedForwardLayer(NamedTuple):
    """A feed-forward layer: weights `up` (N, D) and `down` (D, n) in bf16, the bias (N) in fp32,
    and the table of its activation, None for ReLU². Where N is 2 · n, of every 32 rows of `up` the
    first 16 are the gate's."""

    up: Tensor
    bias: Tensor | None
    down: Tensor
    curve: Curve | None


class _FeedForward(ctypes.Structure):
    """`FeedForward` of cpp/feed_forward.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("up", "down", "bias", "pieces")),
        *((name, ctypes.c_int64) for name in ("M", "D", "N", "n", "gated", "rows", "chunk")),
        ("per_unit", ctypes.c_float),
    )


def can_feed_forward(x: Tensor, down: Tensor) -> bool:
    """True if the kernels are loaded and take a feed-forward layer of x (…, D), `down` (D, n) being
    the parameter that reads the channels between its products."""
    sizes = (x.numel() // x.shape[-1], *down.shape)
    whole = all(size % 32 == 0 for size in sizes) and x.is_contiguous()
    return serves(down.dtype, x.dtype) and whole and down.numel() <= MAX_WEIGHT


def feed_forward(layer: FeedForwardLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's output for x (…, D), without a bias of `down`, and what its backward reads."""
    job, out = _feed_forward(layer, x), torch.empty_like(x)
    kept = x.new_empty(job.M * job.N)
    _loaded[0].pentameter_feed_forward(ctypes.byref(job), *map(_at, (out, kept, x)))
    return out, kept


def feed_forward_backward(
    layer: FeedForwardLayer, g: Tensor, kept: Tensor
) -> tuple[Tensor, Paired, Paired, Tensor | None]:
    """The gradients of x and of its product with `up`; what `down` reads; and the gradient of the
    bias, if there is one. `g` is the output's gradient and `kept` what `feed_forward` gave."""
    job, g_x = _feed_forward(layer, g), torch.empty_like(g)
    g_h, y = g.new_empty(job.M * job.N), g.new_empty(job.M * job.n)
    g_bias = g.new_empty(job.M // 32, job.N, dtype=torch.float32)
    to = (ctypes.c_void_p * 4)(*map(_at, (g_x, g_h, y, g_bias)))
    _loaded[0].pentameter_feed_forward_backward(ctypes.byref(job), to, _at(g), _at(kept))
    return g_x, Paired(g_h, job.N), Paired(y, job.n), None if layer.bias is None else g_bias.sum(0)


def _feed_forward(layer: FeedForwardLayer, x: Tensor) -> _FeedForward:
    (N, D), n = layer.up.shape, layer.down.shape[1]
    M, rows = x.numel() // D, ROWS_PER_CHUNK
    # Two blocks of rows for each core, and none too large for its cache. No result depends on it.
    while rows > 32 and (2 * torch.get_num_threads() * rows > M or rows * N > 2**19):
        rows //= 2
    pieces, per_unit = (None, 0.0) if layer.curve is None else layer.curve
    addresses = map(_at, (layer.up, layer.down, layer.bias, pieces))
    sizes = (M, D, N, n, n != N, rows, ROWS_PER_CHUNK)
    return _FeedForward(*addresses, *sizes, per_unit)


class SubLayerEnd(NamedTuple):
    """The end of a sub-layer: the bias of its output, dropout's keys (B, 2) and probability, and
    whether the next norm subtracts the mean, and what it adds to the mean square."""

    bias: Tensor | None
    keys: Tensor
    p: float
    centred: bool
    eps: float


class _AddNorm(ctypes.Structure):
    """`AddNorm` of cpp/add_norm.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias", "keys")),
        *((name, ctypes.c_int64) for name in ("M", "T", "D", "centred", "rows")),
        ("bound", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("dropout_scale", "eps")),
    )


def can_add_norm(x: Tensor, y: Tensor) -> bool:
    """True if the kernels are loaded and take the residual stream x and y (B, T, D)."""
    return serves(x.dtype, y.dtype) and x.shape[-1] % 16 == 0


def add_norm(how: SubLayerEnd, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + dropout(y + bias), its norm in y's dtype, and the norm's mean and scale, (B, T, 1)."""
    x, y = x.contiguous(), y.contiguous()
    out, normed = torch.empty_like(x), torch.empty_like(y)
    mean, scale = (x.new_empty(*x.shape[:-1], 1) for _ in range(2))
    _loaded[0].pentameter_add_norm(
        ctypes.byref(_add_norm(how, x)), *map(_at, (out, normed, mean, scale, x, y))
    )
    return out, normed, mean, scale


def add_norm_backward(
    how: SubLayerEnd, g: Tensor | None, g_norm: Tensor, out: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x, y and, if there is one, the bias. `g` is that of `out`, if it has one."""
    g, g_norm = None if g is None else g.contiguous(), g_norm.contiguous()
    g_x, g_y = torch.empty_like(out), torch.empty_like(g_norm)
    job = _add_norm(how, out)
    sums = out.new_empty(-(-job.M // job.rows), job.D)
    given = map(_at, (g_x, g_y, sums, g, g_norm, out, mean, scale))
    _loaded[0].pentameter_add_norm_backward(ctypes.byref(job), *given)
    return g_x, g_y, None if how.bias is None else sums.sum(0)


def _add_norm(how: SubLayerEnd, x: Tensor) -> _AddNorm:
    B, T, D = x.shape
    scale = 1 / (1 - how.p) if how.p else 0.0
    addresses = map(_at, (how.bias, how.keys))
    sizes = (B * T, T, D, how.centred, ROWS_PER_BIAS_SUM)
    return _AddNorm(*addresses, *sizes, keep_bound(how.p), scale, how.eps)


class _Part(ctypes.Structure):
    """`Part` of cpp/heads.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "bias", "norm")),
        *((name, ctypes.c_int64) for name in ("row", "head", "turns")),
    )


class _Job(ctypes.Structure):
    """`Job` of cpp/heads.h."""

    _fields_ = (
        *((name, _Part) for name in ("q", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "keys")),
        *((name, ctypes.c_int64) for name in ("B", "T", "H", "G", "K", "half", "stride")),
        ("bound", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("dropout_scale", "norm_eps")),
    )


def attention_forward(heads: Heads, keys: Tensor, stride: int, p: float) -> tuple[Tensor, Tensor]:
    """y (B, T, H·K) and the logarithms of each row's sum of weights; dropout with probability p,
    its elements numbered by `stride`, the model's context length."""
    B, T, H, K = heads.q.data.shape
    y = heads.q.data.new_empty(B, T, H * K)
    logs = torch.empty(B, H, -(-T // 32) * 32, dtype=torch.float32)
    job = _job(heads, keys, stride, p)
    _loaded[0].pentameter_attention_forward(ctypes.byref(job), _at(y), _at(logs))
    return y, logs


def attention_backward(
    to: tuple[Tensor, Tensor, Tensor],
    g: Tensor,
    y: Tensor,
    logs: Tensor,
    heads: Heads,
    keys: Tensor,
    stride: int,
    p: float,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of queries, keys and values to `to`, which lie as their data do, given
    that of y, `g` (B, T, H·K); return those of the norms' weights of queries and keys, (K,)."""
    B, _, H, K = heads.q.data.shape
    norms = [g.new_zeros(B * n, K, dtype=torch.float32) for n in (H, heads.k.data.shape[2])]
    addresses = [_at(x) for x in (*to, *norms)]
    job = _job(heads, keys, stride, p)
    _loaded[0].pentameter_attention_backward(
        ctypes.byref(job), (ctypes.c_void_p * 5)(*addresses), _at(g), _at(y), _at(logs)
    )
    return norms[0].sum(0), norms[1].sum(0)


def _job(heads: Heads, keys: Tensor, stride: int, p: float) -> _Job:
    B, T, H, K = heads.q.data.shape
    rotation = heads.rotation
    turns = rotation is not None or heads.q.norm is not None
    parts = [
        _Part(
            *map(_at, (part.data, part.bias, part.norm)),
            part.data.stride(1 if T > 1 else 0),  # views of one row lie at any stride
            part.data.stride(2),
            turns and part is not heads.v,
        )
        for part in (heads.q, heads.k, heads.v)
    ]
    angles = (None, None) if rotation is None else rotation
    sizes = (B, T, H, heads.k.data.shape[2], K)
    half = 0 if rotation is None else rotation.cosine.shape[1]
    scale = 1 / (1 - p) if p else 0.0
    return _Job(
        *parts, *map(_at, (*angles, keys)), *sizes, half, stride, keep_bound(p), scale, heads.eps
    )


def _at(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())
