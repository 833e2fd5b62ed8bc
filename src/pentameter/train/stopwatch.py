"""How fast a run goes, and when it will be done."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Self

from pentameter.parallel.compute import Compute
from pentameter.planning.plan import Plan

WINDOW_STEPS = 20


class Stopwatch:
    """Times steps: `with stopwatch: step()`. Uses the monotonic clock, so no rate is negative."""

    def __init__(self, plan: Plan, compute: Compute) -> None:
        self._tokens_per_step = plan.tokens_per_step
        self._flops_per_token = plan.flops_per_token
        self._ceiling_flops = compute.ceiling_flops * plan.layout.world_size
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._n_steps = 0
        self._start = 0.0
        self.step_seconds = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.step_seconds = time.perf_counter() - self._start
        self._n_steps += 1
        if self._n_steps == 2:
            self._recent.clear()  # the first step compiled, and says nothing about the rest
        self._recent.append(self.step_seconds)

    def tokens_per_second(self, n_targets: int) -> float:
        """Of the latest step, which trained on `n_targets` tokens: padding does not count."""
        return n_targets / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """FLOPs done per second by the latest step, padding included, ÷ the ceiling of all devices;
        None if unknown."""
        flops = self._tokens_per_step * self._flops_per_token
        return flops / self.step_seconds / self._ceiling_flops if self._ceiling_flops else None

    def eta_seconds(self, steps_left: int) -> float:
        """Time the remaining steps will take at the median pace of the latest ones."""
        return steps_left * median(self._recent)
