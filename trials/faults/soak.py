"""A run that is struck again and again: how much of its time was useful, and whether it is exact.

Two workers train under `--nproc 2 --respawn 3`; whenever the launcher has ended, the same command
is given again, as a supervisor would. Every so many seconds one fault of FAULTS comes. Steps wait
until STEP_SECONDS have passed, as for a device that computes that long, so that a busy machine
slows the recoveries alone.

As a program this file is `pentameter train` with one hook more.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials.programs import environment, program

FAULTS = ("kill all", "kill a worker", "stop signal", "freeze a worker")
STEP_SECONDS = 0.25
TIMEOUT_SECONDS = 10.0
"""`parallel.timeout_seconds`: after it a frozen worker is given up."""
INTERVAL = 20
"""Steps between checkpoints."""
SETTINGS = {
    "parallel.data": 2,
    "train.steps": 1_000_000,
    "train.eval_interval": 1_000,
    "train.sample_interval": 100_000,
    "checkpoint.interval": INTERVAL,
    "parallel.timeout_seconds": TIMEOUT_SECONDS,
}
MOST_SECONDS = 180.0
"""Longest wait for a step after a fault."""
LEDGER = "steps.txt"
"""File beside the run folder with a line for each start and each step, which is only added to:
metrics.jsonl is cut when a run resumes."""


class Paced:
    """The hook that makes steps take STEP_SECONDS, and enters starts and steps into the ledger."""

    def on_start(self, run: Any) -> None:
        (run.run_dir.parent / f"pid-{run.world.rank}").write_text(str(os.getpid()))
        self._enter(run, "start")

    def on_step(self, run: Any, step: Any) -> None:
        time.sleep(max(0.0, self._last + STEP_SECONDS - time.monotonic()))
        self._enter(run, str(step.step))

    def _enter(self, run: Any, what: str) -> None:
        self._last = time.monotonic()
        if run.world.is_main:
            with (run.run_dir.parent / LEDGER).open("a") as ledger:
                ledger.write(f"{what} {self._last}\n")


@dataclass
class Ledger:
    """What a run entered so far: (start or step, its time on the monotonic clock), in order."""

    path: Path
    entries: list[tuple[str, float]] = field(default_factory=list)
    _n_bytes: int = 0

    def read(self) -> list[tuple[str, float]]:
        """The entries, with those that came since the last call."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._n_bytes)
                new = file.read().rpartition(b"\n")[0]
            if new:
                self._n_bytes += len(new) + 1
                lines = (line.split() for line in new.decode().splitlines())
                self.entries += [(what, float(seconds)) for what, seconds in lines]
        return self.entries

    def steps(self, begin: float = 0.0) -> list[int]:
        """The steps made since a moment, in order; those that were made again are there twice."""
        return [int(what) for what, when in self.read() if what != "start" and when >= begin]


@dataclass
class Soak:
    """A run under faults, and the seconds to recover from each so far."""

    folder: Path
    config: Path
    ledger: Ledger
    launcher: subprocess.Popen[bytes] | None = None
    recovery_seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self) -> None:
        """Give the command that starts the run, or continues it."""
        command = program("trials.faults.soak", str(self.config), "--run-dir", str(self.run))
        with (self.folder / "stderr").open("ab") as stderr:
            self.launcher = subprocess.Popen(
                [*command, "--nproc", "2", "--respawn", "3"],
                stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
                env=environment(),
            )  # fmt: skip

    def wait_for_step(self, n_entries: int = 0) -> float:
        """Give the command again whenever it has ended, until a step was made after a start that is
        not among the first `n_entries` of the ledger; return its time."""
        deadline = time.monotonic() + MOST_SECONDS
        while time.monotonic() < deadline:
            if self.launcher is None or self.launcher.poll() is not None:
                self.start()
            new = self.ledger.read()[n_entries:]
            starts = [place for place, (what, _) in enumerate(new) if what == "start"]
            if starts and (after := [when for what, when in new[starts[0] :] if what != "start"]):
                return after[0]
            time.sleep(0.05)
        raise AssertionError((self.folder / "stderr").read_text()[-2000:])

    def strike(self, fault: str, draw: random.Random) -> None:
        """One fault, and the way back to training."""
        assert self.launcher is not None
        workers = [int((self.folder / f"pid-{rank}").read_text()) for rank in range(2)]
        n_entries, began = len(self.ledger.read()), time.monotonic()
        match fault:
            case "kill all":
                os.killpg(self.launcher.pid, signal.SIGKILL)
            case "stop signal":
                self.launcher.terminate()
            case "kill a worker":
                os.kill(draw.choice(workers), signal.SIGKILL)
            case "freeze a worker":
                os.kill(draw.choice(workers), signal.SIGSTOP)
        seconds = self.wait_for_step(n_entries) - began
        self.recovery_seconds.setdefault(fault, []).append(seconds)

    def end(self) -> None:
        """Stop the run as a signal does, and kill what does not end."""
        if self.launcher is not None:
            self.launcher.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.launcher.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(self.launcher.pid, signal.SIGKILL)
            self.launcher.wait()


def soak(scratch: Path, seconds: float, every: float, seed: int) -> int:
    """Train for `seconds` with a fault every `every` seconds; print what came of it. The exit code
    says whether the losses are those of a run that nothing disturbs."""
    from trials.faults.oracle import tiny_config

    draw, folder = random.Random(seed), scratch / "soak"
    folder.mkdir()
    seen = Soak(folder, tiny_config(folder, **SETTINGS), Ledger(folder / LEDGER))
    try:
        began = seen.wait_for_step()
        time.sleep(every)
        n_faults = 1
        while time.monotonic() < began + seconds:
            fault = FAULTS[n_faults % len(FAULTS)]
            seen.strike(fault, draw)
            n_faults += 1
            load = os.getloadavg()[0]
            told = f"{fault}: {seen.recovery_seconds[fault][-1]:.1f} s, load {load:.1f}"
            print(told, flush=True)
            time.sleep(max(0.0, n_faults * every - (time.monotonic() - began)))
        took = time.monotonic() - began
        made = seen.ledger.steps(began)
    finally:
        seen.end()
    _report(seen, made, took)
    return _compare(seen, scratch / "undisturbed-soak")


def _report(seen: Soak, made: list[int], took: float) -> None:
    """Print the goodput: the steps that count ÷ those which the run would have made if it had gone
    on, all the time, as it did between its recoveries."""
    every_one = [s for each in seen.recovery_seconds.values() for s in each]
    n_useful, n_faults = made[-1] - made[0] + 1, len(every_one)
    n_lost = len(made) - n_useful
    rate = len(made) / (took - sum(every_one))
    print(f"{took:.0f} s, {n_faults} faults, {n_useful} useful steps, {n_lost} made again")
    print(f"goodput {n_useful / (rate * took):.1%} of {rate:.2f} steps/s")
    print(f"{sum(every_one) / took:.1%} of the time from a fault to the next step")
    print(f"{n_lost / max(1, n_faults):.1f} steps lost a fault")
    for fault, each in {**seen.recovery_seconds, "all": every_one}.items():
        middle, worst = statistics.median(each), max(each)
        print(f"{fault}: median {middle:.1f} s, worst {worst:.1f} s to the next step ({len(each)})")


def _compare(seen: Soak, whole: Path) -> int:
    """0 if the losses are those of a run that nothing disturbs, bit for bit, else 1."""
    from trials.faults.oracle import curve
    from trials.faults.resumes import StopAt
    from trials.faults.trial import join, last_step, said, start_ranks

    last = last_step(seen.run)
    codes = join(start_ranks(seen.config, whole, 2, hooks=[StopAt(last)]), 3600)
    assert codes == [0, 0], said(whole)
    same = curve(seen.run) == curve(whole)
    print(f"{last} losses and norms {'equal' if same else 'differ from'} the undisturbed")
    return int(not same)


# -- in the processes -----------------------------------------------------------------------------


def train_as_rank(request: Any) -> int:
    """Train as one rank, with the hook, in a process that the launcher has forked."""
    from pentameter.cli import train

    alone = train._train

    def paced(
        config: Any, parsed: Any, launched: Any, hooks: list[Any], *rest: Any, **more: Any
    ) -> None:
        all_hooks: list[Any] = [*hooks, Paced()]
        alone(config, parsed, launched, all_hooks, *rest, **more)

    train._train = paced
    return train.train_as_rank(request)


if __name__ == "__main__":
    from pentameter.cli import main, train

    train.AS_RANK = "trials.faults.soak:train_as_rank"
    raise SystemExit(main.main(["train", *sys.argv[1:]]))
