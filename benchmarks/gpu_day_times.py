"""Times on the device of a GPU day, in milliseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpu_turns import wait_for

WARM_RUNS = 3


def in_turns(
    forms: Mapping[str, Callable[[], Any]], device: torch.device, n: int = 12
) -> dict[str, Any]:
    """Return each form's median time over n runs, the forms taking turns; the first line of its
    error for a form that fails."""
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, work in forms.items():
        try:
            for _ in range(WARM_RUNS):
                work()
            wait_for(device)
            times[name] = []
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    for _ in range(n if device.type == "cuda" else 2):
        for name, taken in times.items():
            taken.append(_once(forms[name], device))
    return {name: round(statistics.median(each), 4) for name, each in times.items()} | failed


def milliseconds(work: Callable[[], Any], device: torch.device, n: int = 12) -> Any:
    """Return the median time of `work` over n runs, as `in_turns` does."""
    return in_turns({"work": work}, device, n)["work"]


def _once(work: Callable[[], Any], device: torch.device) -> float:
    """Return the time of one run: by CUDA events, or on a CPU by the clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    wait_for(device)
    return first.elapsed_time(last)
