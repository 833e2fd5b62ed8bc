"""Turns of two sides on one device: each in a process of its own, one at work while one waits.

A process of its own because compiled code, settings of the arithmetic and peak memory belong to a
process. The side that waits holds only its weights and optimizer state.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from gpu_sides import SIDES, Ours, Plain
from pentameter.planning.plan import Plan


class OutOfDeviceMemoryError(Exception):
    """A side did not fit beside the other; a smaller micro-batch may."""


@dataclass(frozen=True)
class Turn:
    """What a side reports after its steps."""

    seconds: float  # per step
    loss: float  # of the last step
    peak_bytes: int
    n_parameters: int
    profile: str | None = None


@dataclass(frozen=True)
class Machine:
    """What both sides run on."""

    device: torch.device
    precision: str
    compiled: bool


# In the process of a side


def serve(pipe: Connection, name: str, plan: Plan, machine: Machine) -> None:
    """Answer (first step, number of steps, whether to profile) with a Turn, until told to stop."""
    try:
        side = SIDES[name](plan, machine.device, machine.precision, compiled=machine.compiled)
        while (order := pipe.recv()) is not None:
            pipe.send(take_turn(side, machine.device, *order))
    except Exception as error:
        no_room = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
        kind = OutOfDeviceMemoryError if no_room else RuntimeError
        pipe.send(kind(f"{name}: {error if no_room else traceback.format_exc()}"))
        with contextlib.suppress(EOFError):
            while pipe.recv() is not None:  # a pipe closed on an unread order takes its word back
                continue


def take_turn(
    side: Ours | Plain, device: torch.device, first: int, n_steps: int, profiled: bool
) -> Turn:
    """Steps `first` … first + n_steps; the first of them is not timed."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    side.step(first)  # it compiles, takes back the memory that was given up, and wakes the clocks
    wait_for(device)
    table = None
    start = time.perf_counter()
    if profiled:
        table = profile(side, device, range(first + 1, first + 1 + n_steps))
    else:
        for number in range(first + 1, first + 1 + n_steps):
            loss = side.step(number)
    wait_for(device)
    seconds = (time.perf_counter() - start) / n_steps
    if profiled:
        loss = side.step(first + 1 + n_steps)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()  # the other side may need the room
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Turn(seconds, float(loss), peak, side.n_parameters, table)


def profile(side: Ours | Plain, device: torch.device, numbers: range) -> str:
    """The operations that take longest in these steps, as a table."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    order = "self_cpu_time_total"
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        order = "self_device_time_total"
    with torch.profiler.profile(activities=activities) as profiler:
        for number in numbers:
            side.step(number)
        wait_for(device)
    averages = profiler.key_averages()
    return averages.table(sort_by=order, row_limit=25, max_name_column_width=70)


def wait_for(device: torch.device) -> None:
    """Return when the device has done all it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# In the process that measures


class Sides:
    """Both sides in their processes; as a context, it ends them."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: dict[str, Connection] = {}
        self.processes = []
        for name in SIDES:
            self.pipes[name], other = context.Pipe()
            process = context.Process(target=serve, args=(other, name, plan, machine), daemon=True)
            process.start()
            other.close()  # so that a side that dies is the end of its pipe
            self.processes.append(process)

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):  # it may have ended already
                pipe.send(None)
        for process in self.processes:
            process.join(timeout=30)
            if process.is_alive():
                process.terminate()
                process.join()

    def warm_up(self, n_steps: int) -> None:
        """Have both sides compile and run their first steps, at the same time."""
        for pipe in self.pipes.values():
            pipe.send((0, n_steps, False))
        for name in self.pipes:
            self._answer(name)

    def turn(self, name: str, first: int, n_steps: int, *, profiled: bool = False) -> Turn:
        """The named side's turn, while the other one waits."""
        with contextlib.suppress(OSError):  # its end is told below
            self.pipes[name].send((first, n_steps, profiled))
        return self._answer(name)

    def _answer(self, name: str) -> Turn:
        try:
            answer = self.pipes[name].recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the process of {name!r} ended without a word") from None
        if isinstance(answer, Exception):
            raise answer
        return answer
