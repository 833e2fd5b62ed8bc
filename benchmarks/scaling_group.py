"""Processes that run the steps of any layout on demand, started as `pentameter train --nproc` does.

A group holds stages of several plans at once, since starting processes takes longer than a step;
compiled code and the allocator's settings belong to a process, so groups of one process and of
two take turns, one at work while the other waits for orders.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_sides import random_batches
from pentameter.machine.peaks import measure_matmul
from pentameter.optim.build import build_optimizer
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import Plan
from pentameter.processes.group.join import joined_world
from pentameter.processes.group.rank import find_rank
from pentameter.processes.group.world import World
from pentameter.processes.launch.program import Launched, worker_environment
from pentameter.train.compute import choose_compute
from pentameter.train.update import update_weights

ANSWER_SECONDS = 600.0  # a first step may compile
REPEATS = 5  # of a transfer alone; the best counts, as others' load only ever subtracts


@dataclass(frozen=True)
class Turn:
    """What one process reports of its steps, per step.

    `busy` is the processor time of the thread that computes (of all threads' where it has
    several), `background` what gloo's own threads took to move data; `passes`, `passes_busy` and
    `passes_background` are what of the three goes to forward and backward passes.
    """

    seconds: float
    busy: float
    background: float
    passes: float
    passes_busy: float
    passes_background: float
    loss: float
    peak_bytes: int


class Clock:
    """Adds up the time of what runs in it as a context, and the processor time it takes."""

    def __init__(self) -> None:
        self.seconds = self.thread = self.process = 0.0

    def __enter__(self) -> Clock:
        self._add(-1)
        return self

    def __exit__(self, *exception: object) -> None:
        self._add(1)

    def _add(self, sign: int) -> None:
        self.seconds += sign * time.perf_counter()
        self.thread += sign * time.thread_time()
        self.process += sign * time.process_time()

    def figures(self) -> tuple[float, float, float]:
        """Seconds, those of the processor that computing took, and what other threads did."""
        if torch.get_num_threads() > 1:  # which of them compute, nobody can tell
            return self.seconds, self.process, 0.0
        return self.seconds, self.thread, self.process - self.thread


class Runner:
    """The steps of one plan in one process, as the trainer runs them."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.engine = choose_compute(plan, world)
        self.stage = assemble(
            plan, self.engine.device, self.engine.precision,
            compiled=self.engine.compiled, world=world,
        )  # fmt: skip
        self.optimizer = build_optimizer(
            self.stage.named_parameters(), plan.table, plan.config.optimizer
        )
        self.batches = random_batches(plan)

    def turn(self, first: int, n_steps: int, cores: set[int] | None) -> Turn:
        """Steps `first` … first + n_steps - 1, on `cores` (on all when absent)."""
        os.sched_setaffinity(0, cores or set(range(os.cpu_count() or 1)))
        config = self.plan.config
        passes = Clock()
        self.world.barrier()
        with Clock() as whole:
            for number in range(first, first + n_steps):
                batch = self.batches.batch(number, self.stage.rows)
                self.world.barrier()
                with passes:
                    loss = self.stage.forward_backward(batch, number)
                rate = learning_rate(number, config.optimizer, config.schedule)
                update_weights(
                    self.stage, self.optimizer, loss, rate, 1.0, config.optimizer.clip_norm
                )
        seconds, busy, background = (each / n_steps for each in whole.figures())
        of_passes, passes_busy, passes_background = (each / n_steps for each in passes.figures())
        return Turn(
            seconds=seconds,
            busy=busy,
            background=background,
            passes=of_passes,
            passes_busy=passes_busy,
            passes_background=passes_background,
            loss=loss.mean,
            peak_bytes=_peak_resident(),
        )


class Worker:
    """What a process of a group does, one method for each order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runners: dict[str, Runner] = {}

    def build(self, name: str, plan: Plan) -> str:
        """Make the stage of a plan; how it runs, in words."""
        self.runners[name] = runner = Runner(plan, self.world)
        engine = runner.engine
        how = f"compiled ({engine.compile_reason})" if engine.compiled else "eager"
        return f"{engine.precision}, {how}, threads: {torch.get_num_threads()}"

    def drop(self, name: str) -> None:
        """Forget a plan's stage."""
        del self.runners[name]

    def turn(self, name: str, first: int, n_steps: int, pinned: bool) -> Turn:
        """Steps of a plan; pinned, each process keeps to one core."""
        n_cores = os.cpu_count() or 1
        return self.runners[name].turn(
            first, n_steps, {self.world.rank % n_cores} if pinned else None
        )

    def held(self, plan: Plan) -> tuple[int, int]:
        """Bytes of all tensors of this process in the third step of a plan, at the most, and by how
        much its memory has grown, as the kernel counts it."""
        from live_bytes import LiveBytes  # of tests/parallel

        before = _peak_resident()
        with LiveBytes() as live:
            runner = Runner(plan, self.world)
            runner.turn(0, 2, None)
            live.most = 0
            runner.turn(2, 1, None)
        return live.most, _peak_resident() - before

    def product(self, dtype: torch.dtype) -> float:
        """FLOP/s of matrix products of this process, while the group's others multiply too."""
        self.world.barrier()
        return measure_matmul("cpu", dtype, 1.0)

    def all_reduce(self, n_bytes: int) -> float:
        """Seconds of the sum of a tensor over the group, nothing else going on."""
        tensor = torch.zeros(n_bytes // 4)
        return self._best(lambda: dist.all_reduce(tensor))

    def send(self, n_bytes: int) -> float:
        """Seconds of a tensor's way from the first process to the second, and back, halved."""
        tensor = torch.zeros(n_bytes // 4)
        here, there = self.world.rank, 1 - self.world.rank

        def there_and_back() -> None:
            for source in (0, 1):
                if here == source:
                    dist.send(tensor, there)
                else:
                    dist.recv(tensor, there)

        return self._best(there_and_back) / 2

    def _best(self, action: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(REPEATS):
            self.world.barrier()
            start = time.perf_counter()
            action()
            best = min(best, time.perf_counter() - start)
        return best


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(pipe: Connection) -> None:
    """Carry out orders (method of Worker, its arguments) until told to stop."""
    launched = find_rank()
    try:
        with joined_world("cpu", launched) as world:
            worker = Worker(world)
            while (order := pipe.recv()) is not None:
                method, *arguments = order
                pipe.send(getattr(worker, method)(*arguments))
    except EOFError:  # nobody asks any more
        pass
    except Exception:
        pipe.send(RuntimeError(traceback.format_exc()))


class Group:
    """Processes of this machine that work together; as a context, it ends them."""

    def __init__(self, n_processes: int) -> None:
        self.n_processes = n_processes
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(n_processes):
            pipe, other = context.Pipe()
            process = context.Process(target=serve, args=(other,), daemon=True)
            environment = worker_environment(Launched(rank, n_processes), Path(folder))
            with _environment(environment if n_processes > 1 else dict(os.environ)):
                process.start()
            other.close()  # so that a process that dies is the end of its pipe
            self._pipes.append(pipe)
            self._stack.callback(_end, process)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it may have ended already
                pipe.send(None)
        self._stack.close()

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """What each process of the group answers to an order, by rank."""
        for pipe in self._pipes:
            pipe.send((method, *arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(ANSWER_SECONDS):
                raise RuntimeError(f"process {rank} has not answered for {ANSWER_SECONDS:g} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"process {rank} ended without a word") from None
            if isinstance(answers[-1], Exception):
                raise answers[-1]
        return answers


def _end(process: Any) -> None:
    process.join(timeout=10)
    if process.is_alive():
        process.terminate()
        process.join()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """With these environment variables, which a process started meanwhile takes over."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
