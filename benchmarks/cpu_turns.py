"""The sides of `train_cpu.py`, and a turn of one of them: alone, and timed once it has settled.

A step is slow at first: code is compiled, heaps grow, pages are faulted in. On two cores a plain
step needs about ten of them. So a turn warms up until the processor time of a step, which other
programs change less than its seconds, has settled by the rule of `settled`, and only then counts.
A turn has a process of its own, which is gone before the next begins, with its memory and threads.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cpu_peers import HUGGING_FACE, NANOGPT, Side, Train, one_by_one, plain
from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.machine.capabilities import machine_capabilities
from pentameter.machine.choices import choose_precision
from pentameter.machine.load.other_programs import OtherPrograms
from pentameter.machine.peaks import measure_matmul
from pentameter.optim.build import build_optimizer, set_learning_rate
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.assemble import assemble
from pentameter.parallel.precision import arithmetic
from pentameter.planning.plan import Plan
from pentameter.train.compute import choose_compute

LEAST_STEPS = 12
MOST_STEPS = 40
MOST_SECONDS = 150  # once there are the least steps
WINDOW = 4  # steps that are compared with one another, and with as many before them
SPREAD = 0.05
TREND = 0.02

SETTLED = (
    f"at least {LEAST_STEPS} steps (or as many as asked for), the processor time of the last "
    f"{WINDOW} within {100 * SPREAD:.0f} % of one another and their median at most "
    f"{100 * TREND:.0f} % below that of the {WINDOW} before; "
    f"at most {MOST_STEPS}, or {MOST_SECONDS} s"
)
"""The rule of `settled`, for people."""


@dataclass(frozen=True)
class Turn:
    """The steps of one side in one process. `how` says how they were computed, `cpu_seconds` are
    those of all its threads in each of the counted `seconds`, and `other_cores` is how many cores
    other programs kept busy meanwhile."""

    how: str
    losses: list[float]
    warm_up_seconds: list[float]
    seconds: list[float]
    cpu_seconds: list[float]
    settled: bool
    peak_bytes: int
    other_cores: float


def settled(seconds: Sequence[float], least_steps: int = LEAST_STEPS) -> bool:
    """Whether the processor times of steps so far obey the rule SETTLED (but for its ends)."""
    if len(seconds) < max(least_steps, WINDOW + 1):
        return False
    last, before = seconds[-WINDOW:], seconds[-2 * WINDOW : -WINDOW]
    steady = max(last) <= (1 + SPREAD) * min(last)
    return steady and median(last) >= (1 - TREND) * median(before)


Step = Callable[[int], float]
"""Trains the step of this number and returns its mean loss."""


def ours(plan: Plan, checkout: Path | None) -> tuple[str, Train]:
    """How the step of this package is computed, and what trains by it as the trainer does."""
    how, step = step_of(plan, _batches(plan))
    return how, one_by_one(step)


def step_of(plan: Plan, batch: Callable[[int], Any]) -> tuple[str, Step]:
    """How the step of this package is computed, and the step; `batch` gives that of its number."""
    engine = choose_compute(plan)
    stage = assemble(plan, engine.device, engine.precision, compiled=engine.compiled)
    config = plan.config.optimizer
    optimizer = build_optimizer(stage.named_parameters(), plan.table, config)

    def step(number: int) -> float:
        loss = stage.forward_backward(batch(number), number).mean
        stage.clip_gradients(stage.gradient_norm(), config.clip_norm)
        set_learning_rate(optimizer, learning_rate(number, config, plan.config.schedule))
        optimizer.step()
        stage.router_balance.move()
        optimizer.zero_grad(set_to_none=True)
        return loss

    compiled = "compiled" if engine.compiled else "eager"
    return f"{engine.precision}, {compiled}: {engine.compile_reason}", step


class Clock:
    """The time of each step: of the first `n_warm_up`, and of `n_steps` that count after them. It
    says each on stderr, after `name`: a turn takes minutes, and may be cut."""

    def __init__(self, name: str, n_steps: int, least_steps: int = LEAST_STEPS) -> None:
        self.name, self.n_steps, self.least_steps = name, n_steps, least_steps
        self.n_warm_up = 0  # until they are over
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._start = time.perf_counter(), time.process_time()

    def after(self, loss: float) -> bool:
        """Whether another step is wanted after one of this loss, which is over."""
        now = time.perf_counter(), time.process_time()
        self.losses.append(loss)
        self.seconds.append(now[0] - self._start[0])
        self.cpu_seconds.append(now[1] - self._start[1])
        self._start = now
        seconds, cpu_seconds = self.seconds[-1], self.cpu_seconds[-1]
        print(f"{self.name} {seconds:.2f} s, {cpu_seconds:.2f} of processors", file=sys.stderr)
        if not self.n_warm_up and (settled(self.cpu_seconds, self.least_steps) or self._is_late()):
            self.n_warm_up = len(self.seconds)
        return not self.n_warm_up or len(self.seconds) < self.n_warm_up + self.n_steps

    def _is_late(self) -> bool:
        n_steps = len(self.seconds)
        return n_steps >= MOST_STEPS or (
            n_steps >= self.least_steps and sum(self.seconds) > MOST_SECONDS
        )


SIDES: dict[str, Side] = {
    "plain": plain,
    **NANOGPT,
    **HUGGING_FACE,
    **dict.fromkeys(("ours", "modern", "dense", "mixture"), ours),
}
"""Side → what makes its step."""


def take_turn(
    side: str,
    plan: Plan,
    n_steps: int,
    checkout: Path | None = None,
    least_steps: int = LEAST_STEPS,
) -> Turn:
    """A turn of a side in a process of its own: warmed up until it has settled, for `least_steps`
    or more, then `n_steps`."""
    return _alone(_turn, side, plan, n_steps, checkout, least_steps)


def measure_ceiling(plan: Plan) -> tuple[str, float]:
    """The precision that `plan` trains in on this CPU, and the FLOP/s of its products here."""
    return _alone(_ceiling, plan)


def _alone(function: Callable[..., Any], *arguments: object) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result()


def _turn(side: str, plan: Plan, n_steps: int, checkout: Path | None, least_steps: int) -> Turn:
    others = OtherPrograms()
    with redirect_stdout(sys.stderr):  # nanoGPT and the Trainer print
        how, train = SIDES[side](plan, checkout)
        clock = Clock(side, n_steps, least_steps)
        train(clock.after)
    n_warm_up = clock.n_warm_up
    return Turn(
        how,
        clock.losses,
        clock.seconds[:n_warm_up],
        clock.seconds[n_warm_up:],
        clock.cpu_seconds[n_warm_up:],
        settled(clock.cpu_seconds[:n_warm_up], least_steps),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        others.cores(lambda own: [own]),
    )


def _ceiling(plan: Plan) -> tuple[str, float]:
    device = torch.device("cpu")
    precision, _ = choose_precision(plan.config.train.precision, device, machine_capabilities())
    return precision, measure_matmul(device, arithmetic(precision).products, 2.0)


def _batches(plan: Plan) -> Callable[[int], Any]:
    """Number → the step's batch of the run itself, so that all sides learn from the same text."""
    split = open_dataset(plan.config.data).split("train")
    return training_batches(plan.config, split).batch
