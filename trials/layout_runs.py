"""Whole runs on any layout: the trainer in processes of their own, and what it leaves behind.

Workers wait for jobs and meet in a new process group for each, over loopback. They are forked from
a server that has imported torch and computed nothing, so no thread pool is lost in the fork.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.errors import PentameterError
from pentameter.machine.fastest_matmul import ceiling
from pentameter.machine.peaks import measure_matmul
from pentameter.processes.group.world import World

_context = multiprocessing.get_context("forkserver")
TIMEOUT_SECONDS = 120.0
TINY = Config.model_validate(
    {
        "name": "tiny",
        "model": {"context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 16},
        "data": {"corpus": "grammar", "grammar": {"n_characters": 3000}},
        "train": {
            "steps": 8,
            "batch_size": 8,
            "eval_interval": None,
            "precision": "fp32",
            "compile": False,
            "device": "cpu",
        },
        "checkpoint": {"interval": 3},
        "log": {"interval": 1},
    }
)
"""A run of eight steps."""
ALONE: Mapping[str, Any] = {
    f"parallel.{key}": value
    for key, value in {
        "data": None,
        "zero": 0,
        "replicate": 1,
        "tensor": 1,
        "sequence": False,
        "pipeline": 1,
        "schedule": "1f1b",
        "virtual_stages": 1,
    }.items()
}
"""Overrides that leave one process; `partition` may stay."""


@dataclass(frozen=True)
class Ended:
    """How a run ended in one of its processes."""

    step: int
    reason: str
    state: dict[str, Any]
    """What the process remembers of it, but for times."""


@dataclass(frozen=True)
class Run:
    """A run that is over, and its folder."""

    folder: Path
    ends: list[Ended]

    @property
    def end(self) -> Ended:
        """How it ended, in every process alike."""
        assert all(end == self.ends[0] for end in self.ends), self.ends
        return self.ends[0]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl with that event."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["event"] == kind]

    def numbers(self, key: str = "loss", kind: str = "train") -> list[float]:
        """A number of each of these events, in order."""
        return [event[key] for event in self.events(kind)]

    def samples(self) -> dict[str, str]:
        """Name and text of every sample."""
        return {path.name: path.read_text() for path in (self.folder / "samples").iterdir()}

    def log(self) -> str:
        """What the console would have said."""
        return (self.folder / "log.txt").read_text()

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Weights and optimizer state of a checkpoint, whole."""
        checkpoint = open_checkpoint(self.folder / "checkpoints" / f"step-{step:08d}")
        return {
            f"{group}/{name}": tensor[...]
            for group in ("model", "optimizer")
            for name, tensor in checkpoint.tensors(group).items()
        }


MEETINGS = 10
"""Runs after which processes are replaced: groups stay to the end of a process, and their idle
threads wake up a hundred times a second."""


class Runs:
    """Starts runs; the processes exist while the block runs, and are made when needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._numbers = count()
        self._n_done = 0

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def new_folder(self) -> Path:
        """A path that is not used yet."""
        return self._folder / f"run-{next(self._numbers)}"

    def train(self, config: Config, size: int = 1, **options: Any) -> Run:
        """Train `config` as it is, as `size` processes; `options` are `train_here`'s."""
        folder = options.pop("folder", None) or self.new_folder()
        return Run(folder, self.do(size, train_here, config, folder, **options))

    def do(self, size: int, work: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What `work(world, *arguments, **options)` returned in each process, by rank.

        A failure of one fails here, with its traceback.
        """
        self._n_done += 1
        if self._n_done % MEETINGS == 0:
            self._end()
        meeting = str(self._folder / f"meeting-{next(self._numbers)}")
        while len(self._workers) < size:
            self._workers.append(self._start())
        connections = [connection for _, connection in self._workers[:size]]
        for rank, connection in enumerate(connections):
            world = World(rank, size, rank, size, timeout_seconds=TIMEOUT_SECONDS)
            connection.send((work, arguments, options, world, meeting))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        failures: list[str] = []
        while len(results) < size:
            ready = wait([c for r, c in enumerate(connections) if r not in results], 1.0)
            for rank, connection in enumerate(connections):
                if connection not in ready:
                    continue
                try:
                    results[rank], failure = connection.recv()
                except EOFError:
                    results[rank], failure = None, "ended without a word"
                if failure:
                    failures.append(f"rank {rank} of {size}:\n{failure}")
                    deadline = min(deadline, time.monotonic() + 2)  # the others may say why
            if len(results) < size and time.monotonic() > deadline:
                failures.append(f"only ranks {sorted(results)} of {size} answered")
                break
        if failures:
            self._end()
        assert not failures, "\n".join(failures)
        return [results[rank] for rank in range(size)]

    def _start(self) -> tuple[BaseProcess, Connection]:
        own, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs, self._folder), daemon=True)
        process.start()
        theirs.close()
        return process, own

    def _end(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()


def _serve(connection: Connection, folder: Path) -> None:
    from pentameter.train import compute

    gc.freeze()  # what the server has imported need not be searched for cycles
    # A run measures the machine when it starts, for longer than it trains here.
    compute.ceiling = partial(ceiling, measure=partial(measure_matmul, seconds=0.01))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            work, arguments, options, world, meeting = connection.recv()
        except EOFError:
            return
        try:
            result = _in_group(world, meeting, lambda: work(world, *arguments, **options))  # noqa: B023
            connection.send((result, None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
            os._exit(1)


def _in_group(world: World, meeting: str, work: Callable[[], Any]) -> Any:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=world.rank, world_size=world.size
    )
    result = work()
    dist.barrier()
    dist.destroy_process_group()
    return result


# -- jobs ---------------------------------------------------------------------------------------


def train_here(
    world: World,
    config: Config,
    folder: Path,
    hook: Callable[..., object] | None = None,
    **options: Any,
) -> Ended:
    """Train in this process, one of the world's; `hook(world)` makes a hook of the trainer."""
    from pentameter.train.loop import Trainer
    from pentameter.train.state import TrainState

    hooks = () if hook is None else (hook(world),)
    trainer = Trainer(config, run_dir=folder, quiet=True, world=world, hooks=hooks, **options)
    try:
        end = trainer.fit()
        state, reason = trainer.run.state, end.reason
    except PentameterError as error:
        # What refuses to start has no run, and made no step.
        state = trainer.run.state if hasattr(trainer, "run") else TrainState()
        reason = f"{type(error).__name__}: {error}"
    record = state.to_json()
    del record["train_seconds"], record["epoch"]["seconds"]
    return Ended(state.step, reason, record)


# -- configurations -----------------------------------------------------------------------------


def changed(config: Config | str, *changes: Mapping[str, Any]) -> Config:
    """A configuration or a preset with dotted changes, the last of a key's counting."""
    return load_config(config, {key: value for each in changes for key, value in each.items()})


def replay_here(world: World, folder: Path, step: int, layout: str | None = None) -> dict[str, Any]:
    """The result of a replay, on every rank. Here, as workers know this module by its name."""
    from pentameter.replay.replay_step import replay_step

    return replay_step(folder, step, layout, world, lambda _: None).to_json()
