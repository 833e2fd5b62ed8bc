"""FLOP/s that MFU is a share of: a GPU's published peak, else the fastest product measured here."""

from __future__ import annotations

import functools
import re
import time

import torch

from pentameter.errors import ConfigError

_CPU_SIZES = (256, 512, 1024, 2048, 4096)
# 8192³ fills every current GPU; smaller ones may already, and fit where memory is short
_GPU_SIZES = (2048, 4096, 8192)

# Dense (not sparse) products per second in TFLOP/s, 16-bit ones accumulating in fp32, from the
# vendors' data sheets and architecture white papers. fp64 is the tensor-core (matrix) figure
# where there is one. AMD MI250 and MI250X: one of the two dies, which is what a device is.
# The first pattern that matches wins.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bGB200\b", {"bf16": 2500, "fp16": 2500}),
    (r"\bB200\b", {"bf16": 2250, "fp16": 2250}),
    (r"\bH[12]00 NVL\b", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60, "fp64": 60}),
    (r"\bH100 PCIe\b", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51.2, "fp64": 51.2}),
    (r"\bH20\b", {"bf16": 148, "fp16": 148, "tf32": 74, "fp32": 44}),
    (r"\bH800\b", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (
        r"\b(H100|H200|GH200)\b",
        {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    ),
    (r"\bA100\b", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5}),
    (r"\bA800\b", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    (r"\bA40\b", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"\bA30\b", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3, "fp64": 10.3}),
    (r"\bA10G\b", {"bf16": 70, "fp16": 70, "tf32": 35}),
    (r"\bA10\b", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    (r"\bRTX 6000 Ada\b", {"bf16": 364.2, "fp16": 364.2, "tf32": 182.1, "fp32": 91.1}),
    (r"\bRTX A6000\b", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    (r"\bL40S\b", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    (r"\bL40\b", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}),
    (r"\bL4\b", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    (r"\bRTX 5090$", {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8}),
    (r"\bRTX 4090$", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    (r"\bRTX 4080$", {"bf16": 97.5, "fp16": 97.5, "tf32": 48.7, "fp32": 48.7}),
    (r"\bRTX 3090 Ti$", {"bf16": 80, "fp16": 80, "tf32": 40, "fp32": 40}),
    (r"\bRTX 3090$", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    (r"\bV100-PCIE\b", {"fp16": 112, "fp32": 14, "fp64": 7}),
    (r"\bV100\b", {"fp16": 125, "fp32": 15.7, "fp64": 7.8}),
    (r"\bT4\b", {"fp16": 65, "fp32": 8.1}),
    (r"\bMI355X\b", {"bf16": 2500, "fp16": 2500}),
    (r"\bMI350X\b", {"bf16": 2300, "fp16": 2300}),
    (
        r"\bMI3(00|25)X\b",
        {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4, "fp64": 163.4},
    ),
    (r"\bMI250X\b", {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9, "fp64": 47.9}),
    (r"\bMI2[15]0\b", {"bf16": 181, "fp16": 181, "fp32": 45.3, "fp64": 45.3}),
    (r"\bMI100\b", {"bf16": 92.3, "fp16": 184.6, "fp32": 46.1}),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """The published dense peak in FLOP/s of a device that its driver calls `device_name` ("NVIDIA
    A100-SXM4-80GB") in a precision of the matrix products; None where none is known.

    A CPU has no figure worth the name, because clocks fall under wide vectors: there MFU is
    counted against the measured product (`product_ceiling`). The same goes for
    a device or a precision that the table lacks.
    """
    found = (teraflops for pattern, teraflops in _PEAKS if re.search(pattern, device_name))
    value = next(found, {}).get(precision)
    return None if value is None else value * 1e12


def product_ceiling(device: torch.device | str, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of the best of several n×n×n products of `dtype`, measured for about `seconds`.

    The best and not the mean: others' load on the machine only ever subtracts. A product counts
    2·n³. Sizes grow up to 4096 on a CPU and 8192 on a GPU, as long as one product leaves time for
    three more. Measured once a process for the same arguments. Raises ConfigError where the device
    cannot multiply this type (float64 on MPS).
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
    repeats, wait = 1, lambda: None
    if torch.device(device).type != "cpu":
        # a GPU is asked for several at once, so that launching them does not count
        repeats, wait = 8, lambda: torch.accelerator.synchronize(device)
    best = float("inf")
    with torch.inference_mode():
        torch.mm(left, right, out=out)  # the first call packs, plans and pages in
        wait()
        deadline = time.perf_counter() + budget_seconds
        while True:
            start = time.perf_counter()
            for _ in range(repeats):
                torch.mm(left, right, out=out)
            wait()
            now = time.perf_counter()
            best = min(best, (now - start) / repeats)
            if now >= deadline:
                return best
