"""The matmuls of generation on a CPU: a few rows times a weight, by C++ kernels that read the
weight as fast as memory gives it, and with the bits of PyTorch's own.

MKL packs a weight before it multiplies a few rows by it, and on AMD's processors reads it for one
row with SSE alone. The kernels add in MKL's order (`fused_cpu/cpp/few_rows.cpp`), which differs
between processors and numbers of rows; so each shape is tried first, and PyTorch multiplies where
the bits differ. Weights that were published in bf16, and are fp32 here, are kept in bf16 beside,
half the bytes to read: widened on their way they are the same numbers.

Shapes: R rows, K inputs and N outputs of a linear layer.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.fused_cpu import native
from pentameter.machine.capabilities import machine_capabilities
from pentameter.machine.cores_and_memory import host_memory_bytes
from pentameter.model.gpt import GPT, TiedHead
from pentameter.model.matmul import PLAIN, Matmul

MOST_ROWS = 64
"""Most rows that the kernels multiply; more are a matrix product, at which MKL is good."""
_LEAST_WEIGHTS = 2**22
"""Fewest weights of a model for which the kernels are built: smaller ones stay in the processor's
caches, and building takes a second or two."""
_MEMORY_TIMES = 3
"""Weights get copies in bf16 if the machine's memory is this many times theirs in fp32."""
_HUGE_PAGE = 2**21
_GAP = 2**13
"""Most bytes between neighbours in memory, as an allocator leaves between them."""
_COLLAPSE = 25  # MADV_COLLAPSE, which Linux has from 6.1 on
_LANES = 16
_BLOCKS = (192, 256, 336, 384)
"""Inputs that are summed in one chain, as libraries block them: 192 is MKL's on AMD's
processors."""
_ROUNDED = 0.1
_TRIALS = 2

Kernel = Callable[[Tensor, Tensor], Tensor]
"""Function from rows (R, K) in fp32 and a weight (N, K) in fp32 or bf16, both contiguous and on the
CPU, to their product (R, N) in fp32."""


class FewRows(Matmul):
    """The Matmul of generation: by PyTorch or, for up to MOST_ROWS rows in fp32 without bias, by
    the kernels, if these have shown the same bits for that shape. With gradients, by PyTorch.

    The library `rows` (`fused_cpu/native.py`) must be loaded. `narrows`: whether weights that hold
    bf16 numbers alone get a copy in bf16.
    """

    def __init__(self, *, narrows: bool = True) -> None:
        function = native.function
        self._one_row = function("rows", "one_row", n_pointers=3, n_numbers=3)
        self._few_rows = function("rows", "few_rows", n_pointers=4, n_numbers=5)
        self._narrowed = function("rows", "narrowed", n_pointers=2, n_numbers=1)
        self._like_rows = 1
        self._narrows = narrows
        self._copies: dict[int, tuple[Tensor, int, Tensor | None]] = {}
        self._kernels: dict[tuple[int, ...], Kernel | None] = {}
        self._transposed = torch.empty(0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x · weightᵀ + bias (…, N), for x (…, K), weight (N, K) and bias (N,) or None."""
        N, K = weight.shape
        n_rows = x.numel() // K
        if (
            bias is not None
            or not 0 < n_rows <= MOST_ROWS
            or x.dtype is not torch.float32
            or torch.is_grad_enabled()
        ):
            return F.linear(x, weight, bias)
        like_rows = max(n_rows, self._like_rows)
        key = like_rows, N, K
        if key not in self._kernels:
            self._kernels[key] = self._kernel(like_rows, weight)
        kernel = self._kernels[key]
        if kernel is None or not (x.is_contiguous() and weight.is_contiguous()):
            return F.linear(x, weight)
        return kernel(x, self.least(weight))

    @contextmanager
    def adding_like(self, n_rows: int) -> Iterator[None]:
        """Inside the `with` block, add fewer rows than n_rows as PyTorch adds n_rows, where the
        kernels can, so that all of them round alike."""
        before, self._like_rows = self._like_rows, n_rows
        try:
            yield
        finally:
            self._like_rows = before

    def least(self, weight: Tensor) -> Tensor:
        """Return a weight in bf16 if all its numbers are, else itself. The copy is made once, and
        anew after a change of the weight in place."""
        if not self._narrows or weight.dtype is torch.bfloat16 or weight.is_inference():
            return weight  # changes of inference tensors are not counted
        of, version, copy = self._copies.get(id(weight), (None, -1, None))
        if of is not weight or version != weight._version:
            copy = torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False)
            if not self._narrowed(copy.data_ptr(), weight.data_ptr(), weight.numel()):
                copy = None
            self._copies[id(weight)] = weight, weight._version, copy
        return weight if copy is None else copy

    def _kernel(self, n_rows: int, weight: Tensor) -> Kernel | None:
        """Return a kernel that gives n_rows rows times `weight` (N, K) the bits of PyTorch's
        matmul; None if there is none, or if the numbers do not tell."""
        K = weight.shape[1]
        if weight.dtype is not torch.float32 or not weight.is_contiguous() or K % 4:
            return None
        kernels: list[Kernel] = [partial(self._by_blocks, block) for block in _BLOCKS]
        if n_rows == 1:
            kernels.insert(0, self._by_lanes)
        rows = [_made_up(n_rows, K, seed) for seed in range(_TRIALS)]
        if not all(_is_rounded(x, weight) for x in rows):
            return None
        expected = [F.linear(x, weight) for x in rows]
        for kernel in kernels:
            pairs = zip(rows, expected, strict=True)
            if all(torch.equal(kernel(x, weight), y) for x, y in pairs):
                return kernel
        return None

    def _by_lanes(self, x: Tensor, weight: Tensor) -> Tensor:
        N, K = weight.shape
        y = x.new_empty((*x.shape[:-1], N))
        narrow = weight.dtype is torch.bfloat16
        self._one_row(y.data_ptr(), x.data_ptr(), weight.data_ptr(), N, K, narrow)
        return y

    def _by_blocks(self, block: int, x: Tensor, weight: Tensor) -> Tensor:
        N, K = weight.shape
        R = x.numel() // K
        y = x.new_empty((*x.shape[:-1], N))
        n_padded = -(-R // _LANES) * _LANES * K
        if self._transposed.numel() < n_padded:
            self._transposed = torch.empty(n_padded)
        addresses = (each.data_ptr() for each in (y, x, self._transposed, weight))
        self._few_rows(*addresses, R, N, K, block, weight.dtype is torch.bfloat16)
        return y


def _made_up(n_rows: int, K: int, seed: int) -> Tensor:
    """Return rows (n_rows, K) in fp32 of which every bit counts."""
    numbers = torch.arange(n_rows * K, dtype=torch.float64)
    return torch.sin(numbers * (1 + seed) + 1).float().view(n_rows, K)


def _is_rounded(x: Tensor, weight: Tensor) -> bool:
    """Return True if the product of rows x (R, K) and a weight (N, K) shows in which order it was
    added: many outputs are not the exact ones, as they are if the weight is zero or has few
    bits."""
    some = weight[:256]
    exact = (x.double() @ some.double().t()).float()
    return bool((F.linear(x, some) != exact).double().mean() > _ROUNDED)


def few_rows(model: GPT) -> Matmul:
    """Return the Matmul by which a model generates: FewRows if its weights are on the CPU, all fp32
    or all bf16, and large, and the kernels can be built; else PyTorch's."""
    weights = [each for each in model.parameters() if each.ndim == 2]
    kinds = {(each.device.type, each.dtype) for each in weights}
    known = {("cpu", torch.float32)}, {("cpu", torch.bfloat16)}
    if kinds not in known or sum(each.numel() for each in weights) < _LEAST_WEIGHTS:
        return PLAIN
    if not native.is_loaded("rows") and native.load("rows", machine_capabilities()) is not None:
        return PLAIN
    n_bytes = sum(each.nbytes for each in weights)
    return FewRows(narrows=_MEMORY_TIMES * n_bytes < (host_memory_bytes() or 0))


def multiply_by(model: nn.Module, matmul: Matmul) -> list[nn.Module]:
    """Have the linear layers and the tied head of `model` multiply by `matmul`, in place, but those
    whose forward a run has replaced; return them."""
    changed = []
    for module in model.modules():
        target: Any = module
        if matmul is PLAIN or "forward" in vars(module):
            continue
        if type(module).forward is nn.Linear.forward:
            target.forward = partial(_linear, matmul, module)
        elif isinstance(module, TiedHead):
            target.forward = partial(module.forward, matmul=matmul)
        else:
            continue
        changed.append(module)
    return changed


@contextmanager
def multiplying_by(model: nn.Module, matmul: Matmul) -> Iterator[None]:
    """Have a model multiply as by `multiply_by` inside the `with` block."""
    changed = multiply_by(model, matmul)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _linear(matmul: Matmul, linear: Any, x: Tensor) -> Tensor:
    """Return a linear layer's output (…, N) for x (…, K), computed by `matmul`."""
    return matmul.linear(x, linear.weight, linear.bias)


def gather_in_huge_pages(weights: Iterable[Tensor]) -> None:
    """Have Linux keep these weights in huge pages of memory, 2 MiB each, as much of them as fills
    such pages and as there are any: a core that looks a page up for each 4 KiB reads weights at
    little more than half the speed of memory. Numbers and addresses stay. Elsewhere, and for what
    lies in huge pages already, nothing happens."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in memory_ranges(weights):
        first, last = -(-begin // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if first < last:
            madvise(first, last - first, _COLLAPSE)


def memory_ranges(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the addresses (begin, end) of the memory that tensors on the host take, in order;
    neighbours as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors):
        if found and begin - found[-1][1] <= _GAP:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
