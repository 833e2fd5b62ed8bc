"""Checks whether a device computes and remembers correctly, and how fast: a matmul whose result is
known, and memory that is written and read back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

N = 256
"""Order of the Hadamard matrix: its products are whole numbers up to 256, exact in every dtype."""
CPU_ROWS, GPU_ROWS = 2**10, 2**18
CPU_BYTES, GPU_BYTES = 2**23, 2**28
"""Memory that is written and read back: beyond a core's own caches, or a GPU's."""
REPEATS = 3


@dataclass(frozen=True)
class Health:
    """A rank's measurements of its own machine: speeds, each the best of REPEATS, and faults, as
    phrases. A frozen record."""

    product_flops: float
    """FLOP/s of a matmul."""
    copied_bytes_per_second: float
    """Rate at which memory is copied."""
    link_seconds: dict[str, float] = field(default_factory=dict)
    """Mesh dimension → seconds to exchange a message with the neighbours in its group."""
    faults: tuple[str, ...] = ()
    """Phrases without a subject, such as `computes wrong products: 3 of 262,144 elements differ`;
    () if all is well."""


def measure_health(device: torch.device, dtype: torch.dtype) -> Health:
    """Check a device: multiply in `dtype` and copy memory there, time both, and compare the results
    with what they must be. Return the speeds and the faults."""
    flops, wrong_products = _products(device, dtype)
    rate, wrong_bytes = _memory(device)
    faults = [
        f"{what}: {n_wrong:,} of {n:,} {unit} differ"
        for what, unit, (n_wrong, n) in (
            ("computes wrong products", "elements", wrong_products),
            ("reads other bytes than it wrote", "words", wrong_bytes),
        )
        if n_wrong
    ]
    return Health(flops, rate, faults=tuple(faults))


def best_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Call `work` once, then REPEATS times; return the least time in seconds. Waits for a GPU."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    timed()  # the first call packs, plans and pages in
    return min(timed() for _ in range(REPEATS))


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the product left (rows, N) · right (N, N): the matmul whose result is checked."""
    return torch.mm(left, right)


def copy(written: Tensor, pattern: Tensor) -> None:
    """Write `pattern` (n,) into the memory that is checked, `written` (n,)."""
    written.copy_(pattern)


def _products(device: torch.device, dtype: torch.dtype) -> tuple[float, tuple[int, int]]:
    """Return (FLOP/s of a matmul, (wrong elements, all elements) of its result).

    With H a Hadamard matrix, of 1 and -1, H · H is N times the identity. The rows on the left are
    rows of H in a random order, so each row of the product has one element N and is 0 elsewhere:
    everything else that is multiplied cancels out.
    """
    n_rows = CPU_ROWS if device.type == "cpu" else GPU_ROWS
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    hadamard = reduce(torch.kron, [pair] * (N.bit_length() - 1))
    order = torch.randint(N, (n_rows,), generator=torch.Generator().manual_seed(0))
    right = hadamard.to(device, dtype)
    left, order = right[order.to(device)], order.to(device)
    with torch.inference_mode():
        seconds = best_seconds(device, lambda: multiply(left, right))
        found = multiply(left, right).float()
        found[torch.arange(n_rows, device=device), order] -= N
        n_wrong = int(torch.count_nonzero(found).item())  # a NaN is not zero either
    return 2 * n_rows * N * N / seconds, (n_wrong, found.numel())


def _memory(device: torch.device) -> tuple[float, tuple[int, int]]:
    """Return (bytes copied per second, (words that read back wrong, all words)). A pattern and then
    its complement are written, so that each bit is 0 once and 1 once."""
    n = (CPU_BYTES if device.type == "cpu" else GPU_BYTES) // 8
    pattern = torch.arange(n, device=device).mul_(0x9E3779B97F4A7C1)
    written = torch.empty_like(pattern)
    seconds = best_seconds(device, lambda: copy(written, pattern))
    n_wrong = 0
    for _ in range(2):
        copy(written, pattern)
        n_wrong += int(torch.count_nonzero(written != pattern).item())
        pattern.bitwise_not_()
    return 8 * n / seconds, (n_wrong, 2 * n)
