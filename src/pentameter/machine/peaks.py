"""The rate in FLOP/s that MFU is relative to: a GPU's published peak, or a matmul measured here."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pentameter.config.schema import MatmulPrecision
from pentameter.errors import ConfigError
from pentameter.estimating.seconds.cluster import device_of_driver

_CPU_SIZES = (256, 512, 1024, 2048, 4096)
# 8192³ fills every current GPU; smaller ones may already, and fit where memory is short
_GPU_SIZES = (2048, 4096, 8192)


def peak_flops(
    device_name: str, precision: str, matmul_precision: MatmulPrecision | None = None
) -> float | None:
    """Return the published peak of a device in FLOP/s, for dense matmuls with the settings
    `train.precision` and `train.matmul_precision`; None if the device or precision is not in the
    table. device_name: as the driver calls it ("NVIDIA A100-SXM4-80GB").

    A CPU has no meaningful figure, because clocks fall under wide vectors. MFU is then relative to
    a measured matmul (`measure_matmul`), as it is for anything that the table lacks.
    """
    device = device_of_driver(device_name)
    return None if device is None else device.peak_flops(precision, matmul_precision)


def measure_matmul(device: torch.device | str, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Return the best FLOP/s among several n×n×n matmuls in `dtype`, measured for about `seconds`.

    The best and not the mean: other load only ever subtracts. A matmul counts 2·n³. Sizes grow up
    to 4096 on a CPU and 8192 on a GPU, as long as one matmul leaves time for three more. Raises
    ConfigError if the device cannot multiply this dtype (float64 on MPS).
    """
    device = str(device)
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
    """Return the shortest time in seconds for one n×n×n matmul, repeated for `budget_seconds`."""
    generator = torch.Generator().manual_seed(n)
    # random, since a GPU slows down for what switches many transistors; in bands, since drawing
    # 4096² numbers takes longer than multiplying them
    left, right = (
        torch.randn(n, 64, generator=generator).to(device=device, dtype=dtype).repeat(1, n // 64)
        for _ in range(2)
    )
    out = torch.empty_like(left)
    is_cpu = torch.device(device).type == "cpu"
    repeats = 1 if is_cpu else 8  # of a GPU several at once, so that launching does not count

    def multiply(repeats: int = repeats) -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=out)
        if not is_cpu:
            torch.accelerator.synchronize(device)

    with torch.inference_mode():
        multiply(1)  # the first call packs, plans and pages in
        return shortest_seconds(multiply, budget_seconds) / repeats


def shortest_seconds(act: Callable[[], object], seconds: float, least_turns: int = 1) -> float:
    """Run `act` again and again for `seconds`, and at least `least_turns` times. Return the
    shortest time in seconds."""
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < least_turns or time.perf_counter() < deadline:
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return min(times)
