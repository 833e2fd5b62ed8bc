"""The option `--sweep`: a run for each combination of values, trained in reused worker
processes."""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO

from pentameter import formatting
from pentameter.config.fields import leaves
from pentameter.config.naming import name_of
from pentameter.disk.atomic import make_folder
from pentameter.errors import (
    ConfigError,
    InterruptedRunError,
    PentameterError,
    TrainingFailedError,
    did_you_mean,
    terminal_message,
)
from pentameter.machine.child import ChildEndedError, PythonChild
from pentameter.machine.cores import environment_of_one
from pentameter.processes.launch.stop_signals import handling_stop_signals
from pentameter.record.reading import read_run

MOST_RUNS = 1000
"""Largest number of runs in a sweep."""


@dataclass(frozen=True)
class SweepRun:
    """One run in a sweep."""

    label: str
    """The run's name and folder, from its values: `learning_rate-0.001_seed-1`."""
    overrides: list[str]
    """The run's values as command-line options."""

    def copied_below(self, copy_to: str | None) -> SweepRun:
        """Return the run with a folder of its own below the sweep's `checkpoint.copy_to`, if it is
        given: a folder takes the copies of one run."""
        if copy_to is None:
            return self
        own = f"--checkpoint.copy_to={copy_to.rstrip('/')}/{self.label}"
        return replace(self, overrides=[*self.overrides, own])


def sweep_runs(swept: Sequence[str], overrides: Sequence[str]) -> list[SweepRun]:
    """Return a sweep's runs, one for each combination of values. Each text in `swept` reads
    `KEY=VALUE,VALUE`, with `;` between values that contain commas.

    `overrides` are the options common to all runs. Raises ConfigError for a key that is unknown,
    without values, named twice or also overridden, for values that give two runs one name, and for
    more than MOST_RUNS runs.
    """
    values: dict[str, list[str]] = {}
    for text in swept:
        key, equals, listed = text.removeprefix("--").partition("=")
        key = key.strip().replace("-", "_")
        found = [each.strip() for each in listed.split(";" if ";" in listed else ",")]
        if not equals or not all(found):
            raise ConfigError(f"--sweep {text!r} must read KEY=VALUE,VALUE, as seed=1,2,3")
        if key not in leaves():
            hint = did_you_mean(key, leaves())
            raise ConfigError(f"--sweep {text!r}: {key} is no key of the configuration{hint}")
        if key in values:
            raise ConfigError(f"--sweep names {key} twice; list all of its values in one")
        if len(set(found)) < len(found):
            raise ConfigError(f"--sweep {text!r} names a value twice")
        values[key] = found
    for option in overrides:
        name = option.partition("=")[0].removeprefix("--").replace("-", "_")
        if option.startswith("--") and name in values:
            raise ConfigError(f"{option} is swept, too: keep one of --{name} and --sweep {name}=…")
    combinations = list(itertools.product(*values.values()))
    if len(combinations) > MOST_RUNS:
        raise ConfigError(f"--sweep gives {len(combinations):,} runs; at most {MOST_RUNS:,} go")
    last = [key.rpartition(".")[2] for key in values]
    short = [one if last.count(one) == 1 else key for one, key in zip(last, values, strict=True)]
    runs: dict[str, SweepRun] = {}
    for chosen in combinations:
        parts = zip(short, chosen, strict=True)
        label = name_of("_".join(f"{key}-{value}" for key, value in parts))
        if label in runs:
            raise ConfigError(f"--sweep gives two runs the name {label}; change a value's text")
        options = [f"--{key}={value}" for key, value in zip(values, chosen, strict=True)]
        runs[label] = SweepRun(label, options)
    return list(runs.values())


def train_sweep(
    runs: Sequence[SweepRun], arguments: Sequence[str], folder: Path, at_once: int, function: str
) -> None:
    """Train a sweep's runs, `at_once` at a time, each in its own folder inside `folder`, and print
    a line for each.

    arguments: `train`'s command line, common to all runs. function: "module:name" of a function
    that returns, in a worker process, the function that trains.

    A worker trains one run after another, so that imports and compilation are paid for once. A run
    that fails leaves the others alone; the first failure is raised at the end. Raises
    InterruptedRunError if a signal stopped the sweep.
    """
    make_folder(folder)
    n_workers = min(at_once, len(runs))
    sweep = _Sweep(runs, arguments, folder, n_workers, function)
    with handling_stop_signals(sweep.pass_signal_on), ThreadPoolExecutor(n_workers) as pool:
        list(pool.map(sweep.work, range(1, n_workers + 1)))  # raises what a thread raised
    if sweep.stopped_by is not None:
        raise InterruptedRunError(
            f"the sweep was stopped by {sweep.stopped_by}; the same command goes on"
        )
    if sweep.failures:
        raise sweep.failures[0]


class _Sweep:
    """A running sweep: waiting runs, worker processes, and failures so far. One thread per worker
    calls `work`.

    `arguments` are common to all runs, whose folders are made in `folder`; `at_once` runs train at
    a time, in processes that call `function` ("module:name").
    """

    def __init__(
        self,
        runs: Sequence[SweepRun],
        arguments: Sequence[str],
        folder: Path,
        at_once: int,
        function: str,
    ) -> None:
        self.failures: list[PentameterError] = []
        self.stopped_by: str | None = None
        self._arguments, self._folder, self._function = arguments, folder, function
        self._at_once = at_once
        self._workers: dict[int, PythonChild] = {}
        self._waiting = deque(runs)
        self._n_runs, self._n_ended = len(runs), itertools.count(1)

    def work(self, number: int) -> None:
        """Train waiting runs in worker process `number` until none is left or a signal came."""
        output = self._folder / f"worker-{number}.txt"
        with output.open("wb") as file:
            while self.stopped_by is None and self._waiting:
                with suppress(IndexError):  # another thread took the last
                    self._train(self._waiting.popleft(), number, file)
        if worker := self._workers.pop(number, None):
            worker.close()

    def _train(self, run: SweepRun, number: int, output: IO[bytes]) -> None:
        """Train a run in worker process `number`, whose output goes to `output`, and print its
        result. A failure is added to `failures`."""
        if number not in self._workers:
            self._workers[number] = PythonChild(
                self._function, environment=environment_of_one(self._at_once), output=output
            )
        where, failure = self._folder / run.label, None
        named = [f"--name={run.label}", f"--run-dir={where}"]
        try:
            self._workers[number].ask([*self._arguments, *run.overrides, *named])
        except PentameterError as error:
            failure = error
        except ChildEndedError as error:
            del self._workers[number]
            failure = TrainingFailedError(f"its process {error}; see {output.name}")
        if self.stopped_by is not None:
            return
        said = _in_words(where) if failure is None else f"failed: {failure}"
        print(f"{next(self._n_ended)}/{self._n_runs}  {run.label}  {terminal_message(said)}")
        if failure is not None:
            self.failures.append(failure)

    def pass_signal_on(self, number: int, frame: FrameType | None) -> None:
        """At the first stop signal, send SIGTERM to the workers, whose runs save and stop; at the
        second, kill them."""
        is_first = self.stopped_by is None
        self.stopped_by = self.stopped_by or signal.Signals(number).name
        for worker in [*self._workers.values()]:
            if is_first:
                worker.process.send_signal(signal.SIGTERM)
            else:
                worker.kill()


def _in_words(run: Path) -> str:
    """Return a line about a finished run in the folder `run`: best validation loss and training
    time."""
    record = read_run(run)
    best = record.best()
    loss = "" if best is None else f"val loss {best.loss:.4f} at step {best.step}, "
    return f"{loss}{formatting.duration(record.training_seconds)} of training"
