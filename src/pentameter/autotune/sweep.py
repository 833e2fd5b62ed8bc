"""A sweep: a run for each combination of values, trained by a few processes, and compared."""

from __future__ import annotations

import itertools
import shutil
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pentameter import formatting
from pentameter.config.fields import leaves
from pentameter.config.files.load import Overrides, flat_overrides, load_config
from pentameter.config.model.former_keys import former_path, present_pairs
from pentameter.config.naming import name_of
from pentameter.config.schema import Config
from pentameter.disk.atomic import make_folder
from pentameter.errors import (
    ConfigError,
    InterruptedRunError,
    PentameterError,
    TrainingFailedError,
    did_you_mean,
    printable,
    remark,
    terminal_message,
)
from pentameter.machine.child import ChildEndedError, PythonChild
from pentameter.machine.cores_and_memory import environment_of_one
from pentameter.processes.launch.stop_signals import handling_stop_signals
from pentameter.record.reading import holds_run, read_run
from pentameter.report.pages.page import write_report
from pentameter.report.text.comparison import comparison_lines
from pentameter.report.watch.comparison import compare_runs, write_comparison
from pentameter.train.keep.own_configuration import configuration_to_train

MOST_RUNS = 1000
"""Largest number of runs in a sweep."""
Say = Callable[[str], object]


@dataclass(frozen=True)
class SweepRun:
    """One run in a sweep: its name, `learning_rate-0.001_seed-1`, its folder, and its values by
    dotted path."""

    label: str
    folder: Path
    settings: Mapping[str, Any]


def sweep(
    source: Config | str | Path,
    values: Mapping[str, Sequence[Any]],
    overrides: Overrides = (),
    *,
    run_dir: Path | str | None = None,
    at_once: int = 1,
    resume: str = "auto",
    init_from: Path | str | None = None,
    force: bool = False,
    quiet: bool = False,
) -> list[Path]:
    """Train a run for each combination of values in processes of this machine, compare the runs in
    `run_dir`/compare.html, and return their folders, in the order of the values.

    source, overrides: what all runs have in common, as a `Trainer` takes it.
    values: dotted key → the values that it is to have in turn.
    run_dir: the folder in which each run has one; runs/NAME-sweep by default.
    at_once: so many runs train at a time, and divide the cores.
    resume, init_from, force: as for a `Trainer`. Runs that are complete are not trained again.
    quiet: print nothing.

    What is wrong with any configuration is raised before the first run. A run that fails leaves the
    others alone; the first failure is raised at the end. Raises InterruptedRunError if a signal
    stopped the sweep, which the same call continues.
    """
    weights = None if init_from is None else Path(init_from)
    source, overrides = configuration_to_train(source, overrides, weights)
    common = flat_overrides(overrides)

    def load(settings: Mapping[str, Any]) -> Config:
        return load_config(source, {**common, **settings})

    runs = sweep_runs(
        flat_overrides(values), common, load, None if run_dir is None else Path(run_dir)
    )

    def request(run: SweepRun) -> dict[str, Any]:
        return {
            "config": load({**run.settings, "name": run.label}),
            "run_dir": run.folder,
            "resume": resume,
            "init_from": weights,
            "force": force,
        }

    say: Say = (lambda line: None) if quiet else print
    train_sweep(runs, at_once, "pentameter.autotune.sweep:sweep_worker", request, say)
    return [run.folder for run in runs]


def sweep_runs(
    values: Mapping[str, Sequence[Any]],
    overrides: Mapping[str, Any],
    load: Callable[[Mapping[str, Any]], Config],
    folder: Path | None = None,
) -> list[SweepRun]:
    """Return a sweep's runs, one for each combination of values.

    overrides: settings common to all runs.
    load: makes the configuration from a run's settings.
    folder: the folder that the runs' folders are in; None for runs/NAME-sweep.

    If the sweep has a `checkpoint.copy_to`, each run gets a folder of its own below it, since such
    a folder takes the copies of one run. Raises ConfigError for an invalid configuration; for a key
    that is unknown, without values or also overridden; for values that give two runs one name; and
    for more than MOST_RUNS runs.
    """
    if not values or not all(values.values()):
        raise ConfigError("a sweep needs a key, and values for each, as seed=1,2,3")
    values = dict(present_pairs(list(values.items())))
    for key, found in values.items():
        if key not in leaves():
            hint = did_you_mean(key, leaves())
            raise ConfigError(f"--sweep {key}: {key} is no key of the configuration{hint}")
        if len(set(map(str, found))) < len(found):
            raise ConfigError(f"--sweep {key}={','.join(map(str, found))} names a value twice")
        if key in overrides:
            raise ConfigError(f"--{key} is swept, too: keep one of --{key} and --sweep {key}=…")
    combinations = list(itertools.product(*values.values()))
    if len(combinations) > MOST_RUNS:
        raise ConfigError(f"--sweep gives {len(combinations):,} runs; at most {MOST_RUNS:,} go")
    # A key of a table by its former name, which says more than `count` or `width`.
    last = [former_path(key).rpartition(".")[2] for key in values]
    short = [one if last.count(one) == 1 else key for one, key in zip(last, values, strict=True)]
    runs: dict[str, SweepRun] = {}
    for chosen in combinations:
        parts = zip(short, chosen, strict=True)
        label = name_of("_".join(f"{key}-{value}" for key, value in parts))
        if label in runs:
            raise ConfigError(f"--sweep gives two runs the name {label}; change a value's text")
        settings = dict(zip(values, chosen, strict=True))
        config = load(settings)
        folder = folder or Path("runs") / f"{config.name}-sweep"
        if (copies := config.checkpoint.copy_to) is not None:
            settings["checkpoint.copy_to"] = f"{copies.rstrip('/')}/{label}"
        runs[label] = SweepRun(label, folder / label, settings)
    return list(runs.values())


def train_sweep(
    runs: Sequence[SweepRun],
    at_once: int,
    function: str,
    request: Callable[[SweepRun], Any],
    say: Say = print,
) -> None:
    """Train a sweep's runs, `at_once` at a time, calling `say` with a line for each, and compare
    them. A worker trains one run after another, so that imports and compilation are paid for once.

    function: "module:name" of a function. Called in a worker process, it returns the function that
        trains a run.
    request: returns the argument of that function for a run.

    The other arguments, and errors, are as in `sweep`.
    """
    if at_once < 1:
        raise ConfigError(f"--at-once {at_once} must be 1 or more")
    folder = runs[0].folder.parent
    make_folder(folder)
    say(f"{len(runs)} runs in {folder}")
    n_workers = min(at_once, len(runs))
    sweep = _Sweep(runs, n_workers, function, request, say)
    try:
        with handling_stop_signals(sweep.pass_signal_on), ThreadPoolExecutor(n_workers) as pool:
            list(pool.map(sweep.work, range(1, n_workers + 1)))  # raises what a thread raised
    finally:
        # A run that was stopped while it was set up has a folder, and no run in it yet.
        trained = [run.folder for run in runs if holds_run(run.folder)]
        if len(trained) > 1:
            comparison = compare_runs(trained)
            remark(*comparison.unread)
            page = write_comparison(comparison, folder / "compare.html")
            width = shutil.get_terminal_size((100, 24)).columns
            for line in ("", *comparison_lines(comparison, width), "", str(page)):
                say(printable(line))
    if sweep.stopped_by is not None:
        raise InterruptedRunError(
            f"the sweep was stopped by {sweep.stopped_by}; the same command goes on"
        )
    if sweep.failures:
        raise sweep.failures[0]


@dataclass
class _Sweep:
    """The state of a sweep that is under way: runs that still wait, the worker processes, and the
    failures so far. One thread for each of the `n_workers` workers calls `work`; the other
    arguments are as in `train_sweep`."""

    runs: Sequence[SweepRun]
    n_workers: int
    function: str
    request: Callable[[SweepRun], Any]
    say: Say
    failures: list[PentameterError] = field(default_factory=list)
    stopped_by: str | None = None

    def __post_init__(self) -> None:
        self._workers: dict[int, PythonChild] = {}
        self._waiting, self._n_ended = deque(self.runs), itertools.count(1)
        self._folder = self.runs[0].folder.parent

    def work(self, number: int) -> None:
        """Train waiting runs in worker process `number` until none is left or a signal came."""
        with (self._folder / f"worker-{number}.txt").open("wb") as output:
            while self.stopped_by is None and self._waiting:
                with suppress(IndexError):  # another thread took the last
                    self._train(self._waiting.popleft(), number, output)
        if worker := self._workers.pop(number, None):
            worker.close()

    def _train(self, run: SweepRun, number: int, output: IO[bytes]) -> None:
        """Train a run in worker process `number`, whose output goes to `output`, and say its
        result. A failure is added to `failures`."""
        if number not in self._workers:
            self._workers[number] = PythonChild(
                self.function, environment=environment_of_one(self.n_workers), output=output
            )
        failure: PentameterError | None = None
        try:
            self._workers[number].ask(self.request(run))
        except PentameterError as error:
            failure = error
        except ChildEndedError as error:
            del self._workers[number]
            failure = TrainingFailedError(f"its process {error}; see {output.name}")
        if self.stopped_by is not None:
            return
        said = _in_words(run.folder) if failure is None else f"failed: {failure}"
        self.say(f"{next(self._n_ended)}/{len(self.runs)}  {run.label}  {terminal_message(said)}")
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


def sweep_worker() -> Callable[[dict[str, Any]], None]:
    """Return a function that trains one run, from its Trainer's arguments, and writes its report.
    Called in a worker process."""
    from pentameter.train.loop import Trainer

    def train(arguments: dict[str, Any]) -> None:
        trainer = Trainer(**arguments)
        trainer.fit()
        write_report(trainer.run_dir)

    return train


def _in_words(run: Path) -> str:
    """Return a line about a finished run in the folder `run`: best validation loss and training
    time."""
    record = read_run(run)
    best = record.best()
    loss = "" if best is None else f"val loss {best.loss:.4f} at step {best.step}, "
    return f"{loss}{formatting.duration(record.training_seconds)} of training"
