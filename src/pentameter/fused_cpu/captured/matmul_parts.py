"""PyTorch's matmuls in parts that are made once: rows, columns or matrices of the result side by
side, as many as there are threads.

PyTorch chooses a kernel at every call and divides its blocks anew, in some shapes so that threads
wait for each other. Here each thread goes straight to the matmul of its part
(`cpp/matmul_parts.cpp`), through PyTorch's C interface for compiled models. The bits are those of
the whole: where parts would add numbers up in another order, there are none.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pentameter.fused_cpu import native
from pentameter.fused_cpu.captured.native_calls import NativeCalls
from pentameter.fused_cpu.native import NativeCall, function_address
from pentameter.machine.kernel_checks import LEAST_COMPARED

BLOCK = 32
"""Divisor of the row or column at which a part begins: PyTorch's kernels compute so many at
once."""

LEAST_PRODUCTS = 2**18
"""Number of products of two numbers below which a part is not worth a thread: a few microseconds
of a core, which waking the thread takes, too."""

_N_VALUES = 65_537
"""Number of values of which the matrices consist on which both ways are compared: a prime, so that
their rows differ."""


class _Matmul(NamedTuple):
    """The tensors of out = left · right: matrices (m, n), (m, k) and (k, n), or as many of each in
    a batch, with another dimension before."""

    out: Tensor
    left: Tensor
    right: Tensor

    def parts(self, n_parts: int) -> list[Self]:
        """Return the matmuls of at most `n_parts` parts: matrices of a batch, or whole blocks of
        rows or columns, of which there are more."""
        if self.out.dim() == 3:
            return [
                type(self)(*parts)
                for parts in zip(*(x.tensor_split(n_parts) for x in self), strict=True)
                if len(parts[0])
            ]
        dim = int(self.out.shape[1] > self.out.shape[0])
        n_blocks = -(-self.out.shape[dim] // BLOCK)
        n_parts = max(1, min(n_parts, n_blocks))
        edges = [n_blocks * part // n_parts * BLOCK for part in range(1, n_parts)]
        outs = self.out.tensor_split(edges, dim)
        if dim == 0:
            lefts = self.left.tensor_split(edges)
            return [type(self)(*part, self.right) for part in zip(outs, lefts, strict=True)]
        rights = self.right.tensor_split(edges, 1)
        return [type(self)(out, self.left, right) for out, right in zip(outs, rights, strict=True)]


class _Handles:
    """Handles of PyTorch's C interface for the memory of tensors, which they do not hold."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        handles = list(map(_handle, tensors))
        weakref.finalize(self, _delete, handles).atexit = False
        self.array = (ctypes.c_void_p * len(handles))(*handles)


def in_parts(out: Tensor, left: Tensor, right: Tensor) -> NativeCall | None:
    """Return a call that writes left · right to `out`, with at most a part for each thread. Shapes
    are those of `torch.mm` or `torch.bmm`. The call knows where the tensors lie, and does not hold
    them. None if PyTorch is to compute it whole: in other dtypes than the vector library's, without
    that or PyTorch's C interface, or where bits would differ."""
    if not native.serves("vector", torch.float32, out.dtype) or not _has_c_interface():
        return None
    whole = _Matmul(out, left, right)
    n_products = out.numel() * left.shape[-1]
    parts = whole.parts(max(1, min(torch.get_num_threads(), n_products // LEAST_PRODUCTS)))
    kinds = tuple((x.shape, x.stride()) for x in whole)
    if len(parts) > 1 and not _is_equal(kinds, out.dtype, len(parts)):
        return None
    return _call(parts)


def _call(parts: Sequence[_Matmul]) -> NativeCall:
    """Return the call that computes all parts."""
    pytorch = _c_interface()
    is_batch = parts[0].out.dim() == 3
    matmul = pytorch.aoti_torch_cpu_bmm_out if is_batch else pytorch.aoti_torch_cpu_mm_out
    function = native.function("vector", "matmul_parts", n_pointers=2, n_numbers=1)
    handles = _Handles(x for part in parts for x in part)
    arguments = function_address(matmul), ctypes.addressof(handles.array), len(parts)
    return NativeCall(function_address(function), arguments, handles, is_checked=True)


@functools.cache
def _is_equal(
    kinds: Sequence[tuple[Sequence[int], Sequence[int]]], dtype: torch.dtype, n_parts: int
) -> bool:
    """Return whether a matmul with these shapes and strides of out, left and right has the same
    bits whole and in parts."""
    made = _Matmul(*(torch.empty_strided(shape, strides, dtype=dtype) for shape, strides in kinds))
    n_values = min(_N_VALUES, max(made.left.numel(), made.right.numel()))
    n_trials = -(-LEAST_COMPARED // made.out.numel()) if dtype.itemsize == 2 else 1
    generator = torch.Generator().manual_seed(0)
    for _ in range(n_trials):
        for x in (made.left, made.right):
            values = torch.randn(n_values, generator=generator).to(dtype)
            x.copy_(values.repeat(-(-x.numel() // n_values))[: x.numel()].view(x.shape))
        NativeCalls([_call(made.parts(n_parts))])()
        if not torch.equal(made.out, torch.matmul(made.left, made.right)):
            return False
    return True


def _has_c_interface() -> bool:
    try:
        return hasattr(_c_interface(), "aoti_torch_cpu_mm_out")
    except OSError:
        return False


@functools.cache
def _c_interface() -> ctypes.CDLL:
    """Return PyTorch's library, which is loaded, with the functions of
    torch/csrc/inductor/aoti_torch/c/shim.h. Raises OSError if it lies elsewhere."""
    return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))


def _handle(x: Tensor) -> int:
    """Return a new handle of PyTorch's C interface for the memory of x."""
    pytorch, sizes, handle = _c_interface(), ctypes.c_int64 * x.dim(), ctypes.c_void_p()
    dtype = getattr(pytorch, f"aoti_torch_dtype_{str(x.dtype).removeprefix('torch.')}")()
    error = pytorch.aoti_torch_create_tensor_from_blob(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.dim()),
        sizes(*x.shape), sizes(*x.stride()), ctypes.c_int64(0),
        dtype, pytorch.aoti_torch_device_type_cpu(), -1, ctypes.byref(handle),
    )  # fmt: skip
    if error != 0 or handle.value is None:
        raise RuntimeError(f"PyTorch cannot make a tensor of shape {tuple(x.shape)} in memory")
    return handle.value


def _delete(handles: Sequence[int]) -> None:
    for handle in handles:
        _c_interface().aoti_torch_delete_tensor_object(ctypes.c_void_p(handle))
