"""Faults that a training process plants in itself, before it trains: objects to be called there.

Each is given by plain values, so that it can be sent to a process.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from trials.faults.file_operations import CHANGES, DieAt, act_before_each

PHASES = {
    "preparing": "pentameter.train.start:open_dataset",
    "start": "pentameter.train.start:assemble",
    "load": "pentameter.train.start:load_tensors",
    "step": "pentameter.parallel.engine:Engine.forward_backward",
    "accumulation": "pentameter.parallel.engine:micro_batch",
    "backward": "pentameter.parallel.engine:Engine._reduce_gradients",
    "optimizer": "pentameter.train.loop:update_weights",
    "evaluation": "pentameter.train.boundary:evaluate_all",
    "sampling": "pentameter.train.boundary:sample_text",
    "saving": "pentameter.checkpoint.format.save_phases:write_verified",
    "plan of a save": "pentameter.checkpoint.folders.store:CheckpointStore.plan",
}
"""Phase of a run → the function that does it, as its caller finds it. Of two micro-batches in a
step, the even calls of `accumulation` begin the second."""


def replace(path: str, make: Callable[[Any], Any]) -> None:
    """Put `make(f)` in the place of a function f, `module:name`, which must exist."""
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    setattr(owner, name, make(getattr(owner, name)))


def call_before(phase: str, occurrence: int, act: Callable[[], object]) -> None:
    """Call `act` before the function of `phase` is called for the `occurrence`-th time (from 1)."""
    n_calls = 0

    def make(real):
        def wrapped(*arguments, **options):
            nonlocal n_calls
            n_calls += 1
            if n_calls == occurrence:
                act()
            return real(*arguments, **options)

        return wrapped

    replace(PHASES[phase], make)


@dataclass(frozen=True)
class In:
    """A fault at one point of a run: before the `occurrence`-th call of a phase.

    how: the name of a signal, that this process sends itself (a second one follows after
    `again_seconds`, unless None); or `segfault`, `memory`, which kill it.
    """

    phase: str
    occurrence: int
    how: str
    told: Path | None = None
    """File that gets the moment, in monotonic seconds."""
    again_seconds: float | None = None

    def __call__(self) -> None:
        call_before(self.phase, self.occurrence, self.act)

    def act(self) -> None:
        if self.told is not None:
            self.told.write_text(str(time.monotonic()))
        if self.how == "segfault":
            ctypes.string_at(1)
        elif self.how == "memory":
            _take_memory()
        else:
            number = getattr(signal, self.how)
            os.kill(os.getpid(), number)
            if self.again_seconds is not None:
                time.sleep(self.again_seconds)
                os.kill(os.getpid(), number)


def _take_memory() -> None:
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1 << 20) * 8))


@dataclass(frozen=True)
class DieInSave:
    """SIGKILL before the n-th file-system operation since the plan of the `save`-th checkpoint."""

    save: int
    n: int

    def __call__(self) -> None:
        call_before("plan of a save", self.save, self.arm)

    def arm(self) -> None:
        act_before_each(pytest.MonkeyPatch(), DieAt(self.n))


@dataclass(frozen=True)
class FailInSave:
    """OSError at the n-th change on disk since the plan of the `save`-th checkpoint: once, or from
    then on. Logs are spared, as they have tests of their own."""

    save: int
    n: int
    number: int
    once: bool

    def __call__(self) -> None:
        call_before("plan of a save", self.save, self.arm)

    def arm(self) -> None:
        n_seen = 0

        def act(name: str, arguments: tuple) -> None:
            nonlocal n_seen
            if name not in CHANGES or "checkpoints" not in _path_of(arguments[0]):
                return
            n_seen += 1
            if n_seen == self.n or (n_seen > self.n and not self.once):
                raise OSError(self.number, os.strerror(self.number))

        act_before_each(pytest.MonkeyPatch(), act)


def _path_of(file: object) -> str:
    return os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)


@dataclass(frozen=True)
class SlowDisk:
    """Each file-system operation takes `seconds` more."""

    seconds: float

    def __call__(self) -> None:
        act_before_each(pytest.MonkeyPatch(), lambda *_: time.sleep(self.seconds))


@dataclass(frozen=True)
class LateWrites:
    """What is written beside training is begun `n_steps` steps later, or when training waits for
    it, however fast this machine is."""

    n_steps: int

    def __call__(self) -> None:
        gates: dict[str, threading.Event] = {}
        n_made: Counter[str] = Counter()

        def start(real):
            def start_writing(save, buffers):
                gate = gates[f"save of step {save.step}"] = threading.Event()  # the thread's name
                real(save, buffers)
                join = save._thread.join

                def let_it_write_and_join(*seconds):
                    gate.set()
                    return join(*seconds)

                save._thread.join = let_it_write_and_join

            return start_writing

        def write(real):
            def write_verified(path, chunks):
                name = threading.current_thread().name
                if name in gates:
                    gates[name].wait()
                return real(path, chunks)

            return write_verified

        def step(real):
            def forward_backward(*arguments, **options):
                for name, gate in gates.items():
                    n_made[name] += 1
                    if n_made[name] > self.n_steps:
                        gate.set()
                return real(*arguments, **options)

            return forward_backward

        replace("pentameter.checkpoint.format.save_phases:Save.start_writing", start)
        replace(PHASES["saving"], write)
        replace(PHASES["step"], step)


@dataclass(frozen=True)
class FileSizeLimit:
    """No file may have more than `n_bytes`, as `ulimit -f` has it."""

    n_bytes: int

    def __call__(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.n_bytes, self.n_bytes))


@dataclass(frozen=True)
class Spoil:
    """A value that is not finite, in a step (0-based): of the loss or a gradient, before ranks add
    theirs up, of the first weight, or of the last one, which all logits are multiplied by."""

    step: int
    what: str
    value: float

    def __call__(self) -> None:
        def make(real):
            def wrapped(engine, batch, step, **options):
                with self._spoiled(engine) if step == self.step else nullcontext():
                    return real(engine, batch, step, **options)

            return wrapped

        replace(PHASES["step"], make)

    @contextmanager
    def _spoiled(self, engine: Any) -> Iterator[None]:
        parameters, stages = engine.parameters(), engine._stages
        if self.what == "gradient":
            hook = parameters[0].register_hook(lambda gradient: gradient * self.value)
            yield
            hook.remove()
        elif self.what == "loss":
            train = stages.train
            stages.train = lambda *rows: train(*rows) * self.value
            yield
            stages.train = train
        else:
            self._fill(parameters[0 if self.what == "weight" else -1])
            yield

    def _fill(self, tensor: Any) -> None:
        import torch

        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        with torch.no_grad():
            local.view(-1)[0] = self.value


@dataclass(frozen=True)
class Clock:
    """The wall clock is off by so many seconds; jumping: by another random number at each look."""

    seconds: float
    jumps: bool

    def __call__(self) -> None:
        drawn = random.Random(self.seconds)
        real = time.time

        def shifted() -> float:
            return real() + (drawn.uniform(-1, 1) if self.jumps else 1.0) * self.seconds

        time.time = shifted
        time.time_ns = lambda: int(shifted() * 1e9)
