"""Trials of the battery: signals, processes that stop without a word, and two runs in a folder."""

from __future__ import annotations

import threading
import time

from pentameter.checkpoint.folders.opening import find_model
from pentameter.errors import ConfigError
from trials.faults.oracle import assert_same_run
from trials.faults.planted import In
from trials.faults.trial import (
    Trial,
    assert_checkpoints_whole,
    join,
    kill,
    last_step,
    said,
    wait_for_step,
)

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")
WITHIN = ("preparing", "start", "step", "accumulation", "evaluation", "sampling", "saving")


def first(trial: Trial) -> str:
    """A stop signal to one rank in a phase: all leave with 75 within 10 s, and nothing is lost."""
    phase = WITHIN[trial.number % len(WITHIN)]
    n_ranks = 1 + trial.number // len(WITHIN) % 2
    name = NAMES[trial.number // (2 * len(WITHIN)) % len(NAMES)]
    several = {"parallel.data": 2, "train.micro_batch_size": 2}
    whole = trial.undisturbed(n_ranks, **(several if n_ranks > 1 else {}))
    n_calls = {"preparing": 1, "start": 1, "sampling": 2, "evaluation": 4, "saving": 8}
    occurrence = trial.draw.randint(1, n_calls.get(phase, 38))
    if phase == "accumulation":
        occurrence *= 2  # in the middle of a step
    told, victim = trial.folder / "told", trial.draw.randrange(n_ranks)
    fault = In(phase, occurrence, name, told)
    codes = join(trial.start(whole.config, n_ranks, [fault], victim))
    seconds = time.monotonic() - float(told.read_text())
    began = phase not in ("preparing", "start") and "before the first step" not in said(trial.run)
    assert codes[victim] == 75, codes
    # Before the first step the others learn of it from a launcher, and here of a lost rank.
    assert all(code == 75 or (code == 70 and not began) for code in codes), (codes, said(trial.run))
    assert seconds < 10, f"{seconds:.1f} s"
    assert_checkpoints_whole(trial.run)
    trial.finish(whole, n_ranks)
    return f"{name} in {phase} {occurrence}, rank {victim} of {n_ranks}, {seconds:.1f} s"


def second(trial: Trial) -> str:
    """A second signal, at any moment of the stop: out within 2 s, the last checkpoint whole."""
    whole = trial.undisturbed()
    told, again = trial.folder / "told", trial.draw.choice([0.0, 0.001, 0.01, 0.05])
    phase = trial.draw.choice(["step", "evaluation", "saving"])
    fault = In(phase, trial.draw.randint(1, 4), "SIGTERM", told, again_seconds=again)
    codes = join(trial.start(whole.config, planted=[fault]))
    seconds = time.monotonic() - float(told.read_text())
    assert codes == [75], codes
    assert seconds < 2, f"{seconds:.1f} s"
    assert_checkpoints_whole(trial.run)
    trial.finish(whole)
    return f"in {phase}, {1e3 * again:.0f} ms after the first, out after {seconds:.2f} s"


SILENT_SECONDS = 5.0
"""`parallel.timeout_seconds` of runs of which a rank falls silent."""


def a_rank_that_stops(trial: Trial) -> str:
    """One rank is stopped in a phase: the other leaves within the timeout + 10 s, and names it."""
    settings = {"parallel.data": 2, "parallel.timeout_seconds": SILENT_SECONDS}
    whole = trial.undisturbed(2, **settings)
    phase = ("step", "accumulation", "backward", "optimizer", "saving", "load")[trial.number % 6]
    victim = trial.draw.randrange(2)
    if phase == "load":  # there must be something to load
        processes = trial.start(whole.config, 2)
        wait_for_step(trial.run, 8, processes)
        kill(processes)
    told = trial.folder / "told"
    occurrence = 1 if phase == "load" else trial.draw.randint(1, 4)
    stopped = In(phase, occurrence, "SIGSTOP", told)
    processes = trial.start(whole.config, 2, [stopped], victim)
    other = processes[1 - victim]
    other.join(60)
    seconds, code = time.monotonic() - float(told.read_text()), other.exitcode
    kill(processes)
    assert code == 70, (code, said(trial.run))
    assert f"rank {victim} did not answer" in said(trial.run), said(trial.run)
    assert seconds < SILENT_SECONDS + 10, f"{seconds:.1f} s"
    assert_checkpoints_whole(trial.run)
    trial.finish(whole, 2)
    return f"rank {victim} in {phase} {occurrence}; the other left after {seconds:.1f} s"


# -- who may write, and who reads -----------------------------------------------------------------


def two_runs_in_a_folder(trial: Trial) -> str:
    """Two start at about the same moment: one trains, the other leaves with 73; of a killed one
    the folder is taken over. Who reads meanwhile never sees half a checkpoint."""
    whole = trial.undisturbed()
    reader = Reader(trial)
    reader.start()
    try:
        one = trial.start(whole.config)
        time.sleep(trial.draw.choice([0.0, trial.moment(whole, 0.0, 0.8)]))
        other = trial.start(whole.config)
        codes = join([*one, *other])
        assert codes in ([0, 73], [73, 0], [0, 0]), codes  # both: one ended before the other began
        assert_same_run(trial.run, whole.run)
    finally:
        reader.ends.set()
        reader.join()
    assert not reader.wrong, reader.wrong
    assert "process" in said(trial.run) or codes == [0, 0]
    return f"{codes}, {reader.n_found} looks at {len(reader.steps)} checkpoints"


class Reader(threading.Thread):
    """Opens the model of a run again and again, as `sample` does."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.ends = trial.run, threading.Event()
        self.wrong: list[str] = []
        self.steps: set[int] = set()
        self.n_found = 0

    def run(self) -> None:
        while not self.ends.wait(0.003):
            warnings: list[str] = []
            try:
                found = find_model(self.run_dir, warnings)
                assert found is not None
                self.steps.add(found.step)
                self.n_found += 1
            except ConfigError:
                pass  # there is none yet
            except Exception as error:
                self.wrong.append(repr(error))
            self.wrong += warnings


def a_stale_lock(trial: Trial) -> str:
    """The owner is killed, and its lock stays: the next one takes the folder over at once."""
    whole = trial.undisturbed()
    owner = trial.start(whole.config)
    owner[0].join(trial.moment(whole, 0.3, 0.9))
    kill(owner)
    step, is_left = last_step(trial.run), (trial.run / "run.lock").exists()
    trial.finish(whole)
    return f"killed after step {step}, {'with' if is_left else 'without'} a lock"


def the_folder(trial: Trial) -> str:
    """Both of these in turn."""
    return (two_runs_in_a_folder, a_stale_lock)[trial.number % 2](trial)
