"""The fastest square matrix product a device really does: the other denominator of MFU."""

from __future__ import annotations

import functools
import time

import torch

from pentameter.errors import ConfigError

_CPU_SIZES = (256, 512, 1024, 2048, 4096)
# 8192³ fills every current GPU; smaller ones may already, and fit where memory is short
_GPU_SIZES = (2048, 4096, 8192)


def product_ceiling(device: torch.device | str, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of the best of several n×n×n products.

    Args:
        device: where to multiply.
        dtype: of both factors and of the result.
        seconds: to spend on it, about. Sizes grow up to 4096 on a CPU and 8192 on a GPU, as long
            as one product leaves time for three more.

    The best and not the mean: others' load on the machine only ever subtracts. A product counts
    2·n³. Measured once a process for the same arguments.

    Raises:
        ConfigError: the device cannot multiply this type (float64 on MPS).
    """
    return _measured(str(device), dtype, seconds)


@functools.cache
def _measured(device: str, dtype: torch.dtype, seconds: float) -> float:
    best = 0.0
    sizes = _CPU_SIZES if torch.device(device).type == "cpu" else _GPU_SIZES
    deadline = time.perf_counter() + seconds
    last_seconds = 0.0
    for n, next_n in zip(sizes, (*sizes[1:], None), strict=True):
        try:
            last_seconds = _best_seconds(device, dtype, n, seconds / (2 * len(sizes)))
        except torch.OutOfMemoryError:
            break
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"{device} does not multiply {dtype}: {error}") from error
        best = max(best, 2 * n**3 / last_seconds)
        left = deadline - time.perf_counter()
        if next_n is None or 4 * last_seconds * (next_n / n) ** 3 > left:
            # the largest size that fits gets all the time that is left
            if left > last_seconds:
                best = max(best, 2 * n**3 / _best_seconds(device, dtype, n, left))
            break
    return best


def _best_seconds(device: str, dtype: torch.dtype, n: int, budget_seconds: float) -> float:
    """The shortest time of one n×n×n product, repeated until the budget is spent."""
    generator = torch.Generator().manual_seed(n)
    # random, since a GPU slows down for what switches many transistors; in bands, since drawing
    # 4096² numbers takes longer than multiplying them
    left, right = (
        torch.randn(n, 64, generator=generator).to(device=device, dtype=dtype).repeat(1, n // 64)
        for _ in range(2)
    )
    out = torch.empty_like(left)
    # a GPU is asked for several at once, so that launching them does not count
    repeats = 1 if torch.device(device).type == "cpu" else 8
    best = float("inf")
    with torch.inference_mode():
        torch.mm(left, right, out=out)  # the first call packs, plans and pages in
        _wait_for(device)
        deadline = time.perf_counter() + budget_seconds
        while True:
            start = time.perf_counter()
            for _ in range(repeats):
                torch.mm(left, right, out=out)
            _wait_for(device)
            now = time.perf_counter()
            best = min(best, (now - start) / repeats)
            if now >= deadline:
                return best


def _wait_for(device: str) -> None:
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
