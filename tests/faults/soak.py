"""A run that is struck again and again: how much of its time was useful, and whether it is exact.

Two workers train under torchrun; whenever torchrun has ended, the same command is given again, as a
supervisor would. Every so many seconds one fault of FAULTS comes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kills import LONGER, end_session, torchrun, workers
from oracle import curve, tiny_config
from resumes import StopAt
from trial import Trial, join, last_step, said, start_ranks, whole_events

FAULTS = ("kill all", "kill a worker", "stop signal", "freeze a worker")
TIMEOUT_SECONDS = 10.0
"""`parallel.timeout_seconds`: after it a frozen worker is given up."""
SETTINGS = {
    **LONGER,
    "train.steps": 1_000_000,
    "train.eval_interval": 1_000,
    "train.sample_interval": 100_000,
    "checkpoint.interval": 20,
    "parallel.timeout_seconds": TIMEOUT_SECONDS,
}
MOST_SECONDS = 180.0
"""Longest wait for a step after a fault."""


@dataclass
class Soak:
    """What a soak has seen so far."""

    trial: Trial
    config: Path
    agent: object = None
    n_lost: int = 0
    """Steps that were made and had to be made again."""
    recovery_seconds: dict[str, list[float]] = field(default_factory=dict)

    def start(self) -> None:
        options = ("--max-restarts", "100", "--monitor-interval", "0.1")
        self.agent = torchrun(self.trial, self.config, *options)

    def wait_for_step(self, step: int) -> None:
        """Give the command again whenever it has ended, until the run has made `step`."""
        deadline = time.monotonic() + MOST_SECONDS
        while last_step(self.trial.run) < step:
            if self.agent.poll() is not None:
                self.start()
            assert time.monotonic() < deadline, (self.trial.folder / "stderr").read_text()[-2000:]
            time.sleep(0.05)

    def strike(self, fault: str, draw: random.Random) -> None:
        """One fault, and the way back to training."""
        run = self.trial.run
        pids = workers(self.agent.pid)
        reached, began = last_step(run), time.monotonic()
        n_before = n_starts(run)
        if fault == "kill all":
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            end_session(self.agent)
        elif fault == "stop signal":
            self.agent.terminate()
        else:
            number = signal.SIGKILL if fault == "kill a worker" else signal.SIGSTOP
            with suppress(ProcessLookupError):
                os.kill(draw.choice(pids), number)
        while n_starts(run) == n_before:
            reached = max(reached, last_step(run))
            if self.agent.poll() is not None:
                self.start()
            assert time.monotonic() < began + MOST_SECONDS, f"no way back after: {fault}"
            time.sleep(0.02)
        time.sleep(1)  # from that file to the event that says where
        resumed = max((event["step"] for event in whole_events(run, "resume")), default=0)
        self.n_lost += max(0, reached - resumed)
        self.wait_for_step(resumed + 1)
        self.recovery_seconds.setdefault(fault, []).append(time.monotonic() - began)


def n_starts(run: Path) -> int:
    """How often the run has been started, by its environment.json, which is never half written."""
    return 1 + len(json.loads((run / "environment.json").read_text())["earlier_starts"])


def soak(scratch: Path, seconds: float, every: float, seed: int) -> int:
    """Train for `seconds` with a fault every `every` seconds; print what came of it."""
    draw = random.Random(seed)
    trial = Trial(0, draw, scratch / "soak", scratch)
    trial.folder.mkdir()
    seen = Soak(trial, tiny_config(trial.folder, **SETTINGS))
    seen.start()
    try:
        seen.wait_for_step(1)
        quiet, first = time.monotonic(), last_step(trial.run)
        time.sleep(every)  # what the machine does without a fault
        rate = (last_step(trial.run) - first) / (time.monotonic() - quiet)
        began, first = time.monotonic(), last_step(trial.run)
        n_faults = 0
        while time.monotonic() < began + seconds:
            fault = FAULTS[n_faults % len(FAULTS)]
            seen.strike(fault, draw)
            n_faults += 1
            print(f"{fault}: {seen.recovery_seconds[fault][-1]:.1f} s", flush=True)
            time.sleep(max(0.0, n_faults * every - (time.monotonic() - began)))
        took, last = time.monotonic() - began, last_step(trial.run)
    finally:
        if seen.agent is not None:
            seen.agent.terminate()
            with suppress(Exception):
                seen.agent.wait(30)
            end_session(seen.agent)
    _report(seen, took, rate, first, last)
    return _compare(seen, scratch / "undisturbed-soak", last)


def _report(seen: Soak, took: float, rate: float, first: int, last: int) -> None:
    every_one = [s for each in seen.recovery_seconds.values() for s in each]
    print(f"{took:.0f} s, {len(every_one)} faults, {last - first} useful steps")
    print(f"goodput {(last - first) / (rate * took):.0%} of {rate:.2f} steps/s without faults")
    print(f"{seen.n_lost} steps lost, {seen.n_lost / max(1, len(every_one)):.1f} a fault")
    for fault, each in seen.recovery_seconds.items():
        print(f"{fault}: {statistics.median(each):.1f} s to the next step (median of {len(each)})")
    print(f"all: {statistics.median(every_one):.1f} s")


def _compare(seen: Soak, whole: Path, last: int) -> int:
    """0 if the losses are those of a run that nothing disturbs, bit for bit, else 1."""
    codes = join(start_ranks(seen.config, whole, 2, hooks=[StopAt(last)]), 3600)
    assert codes == [0, 0], said(whole)
    ours, theirs = (curve(run)[:last] for run in (seen.trial.run, whole))
    print(f"{last} losses and norms {'equal' if ours == theirs else 'differ from'} the undisturbed")
    return int(ours != theirs)
