"""Trials: faults on a run of several nodes, and whether it gives what an undisturbed one gives."""

from __future__ import annotations

import math
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from trials.faults.battery import failure_bound
from trials.nodes.cluster import (
    LOSSES,
    PATIENCE_SECONDS,
    Cluster,
    batches_of,
    cluster,
    events_of,
    train_command,
)
from trials.nodes.noting import noted_batches

TOLERANCE = 1e-10
"""Largest difference of a loss, in fp64, between a run whose layout changed and one on a single
process: 10⁶ times the rounding of a sum of some thousand numbers, which thousands of steps of Adam
amplify."""

BAD_LINKS: dict[str, Callable[[Cluster, int, random.Random], None]] = {
    "loss_of_1_to_20_percent": lambda run, node, chance: run.net.lose(
        node, chance.uniform(0.01, 0.2)
    ),
    "1_mbit_per_second": lambda run, node, chance: run.net.slow_down(node, "1mbit"),
    "500_ms_delay": lambda run, node, chance: run.net.delay(node, 0.25),
}
"""Links that stay: a run goes on over them, more slowly."""


@dataclass
class Trial:
    """One fault: its kind, the step at which it came, and what became of the run."""

    kind: str
    step: int
    seconds: float = math.nan
    """From the fault to the first step after it in another attempt; NaN if none was needed."""
    problem: str = ""
    """What did not hold; empty if all did."""
    load: float = math.nan
    """Processes of the machine that wanted a core when the fault came: the mean of a minute."""


def run_trials(
    kinds: Sequence[str], seed: int, folder: Path, *, n_nodes: int = 4
) -> Iterator[Trial]:
    """Make these faults one after another on one run of `n_nodes` nodes, each after the nodes have
    all come back, and yield each trial; the last ones once the whole curve is compared.

    Raises nothing for what does not hold: the trials say so.
    """
    chance = random.Random(seed)
    trials: list[Trial] = []
    with cluster(n_nodes, folder) as run:
        for kind in kinds:
            run.wait_for_steps(chance.randrange(5, 60))
            trial = Trial(kind, run.last_step(), load=os.getloadavg()[0])
            trials.append(trial)
            try:
                _make(trial, run, chance)
            except (TimeoutError, AssertionError) as error:
                trial.problem = str(error) or type(error).__name__
                break
        codes = [75] * n_nodes if trials[-1].problem else run.stop()
        left = [pid for node in range(n_nodes) for pid in run.net.pids(node)]
        said, curve = run.said(), _curve(run.run_dir)
    _judge(trials, curve, folder)
    for trial, wrong in (
        (trials[-1], f"exit codes {codes}" if set(codes) != {75} else ""),
        (trials[-1], f"{len(left)} processes are left" if left and not trials[-1].problem else ""),
        (trials[-1], "a traceback" if "Traceback" in said else ""),
    ):
        trial.problem = trial.problem or wrong
    yield from trials


def _make(trial: Trial, run: Cluster, chance: random.Random) -> None:
    """Make the fault, wait until the run has gone on, and bring everything back."""
    begin = time.monotonic()
    if trial.kind in BAD_LINKS:
        node = chance.randrange(run.net.n)
        BAD_LINKS[trial.kind](run, node, chance)
        run.wait_for_steps(2)  # with 500 ms to a node each of them takes half a minute
        run.net.heal(node)
    else:
        begin = time.monotonic()
        number, back = LOSSES[trial.kind](run, chance)
        run.wait_until_recovered(number)
        trial.seconds = time.monotonic() - begin
        for node in range(run.net.n):
            run.net.heal(node)
        run.start(*back)
    run.wait_for_members(run.net.n)
    run.wait_for(f"step {trial.step}, again", lambda: run.last_step() > trial.step)


def _judge(trials: list[Trial], curve: dict[int, float], folder: Path) -> None:
    """Note in the trials where losses or batches differ from those of one process alone, or where
    a step is missing."""
    last = max(curve, default=0)
    expected = reference(last, folder)
    read, to_read = (noted_batches(batches_of(folder / name)) for name in ("run", "reference"))
    ends = [*(trial.step for trial in trials[1:]), last]
    for trial, end in zip(trials, ends, strict=True):
        steps = range(trial.step + 1, end + 1)
        missing = [step for step in steps if step not in curve]
        differences = [abs(curve[step] - expected[step]) for step in steps if step in curve]
        others = [step for step in steps if not to_read[step] or read[step] != to_read[step]]
        worst = max(differences, default=0.0)
        if missing:
            trial.problem = trial.problem or f"step {missing[0]} is missing"
        elif worst > TOLERANCE:
            trial.problem = trial.problem or f"a loss differs by {worst:.1e}"
        elif others:
            trial.problem = trial.problem or f"the batch of step {others[0]} differs"


def reference(last: int, folder: Path) -> dict[int, float]:
    """The losses up to step `last` of the same run on one process, undisturbed."""
    run_dir = folder / "reference"
    command, environment = train_command(run_dir)
    with (folder / "reference.txt").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 10 * PATIENCE_SECONDS
        while max(curve := _curve(run_dir), default=0) < last and process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the undisturbed run does not reach step {last}")
            time.sleep(1.0)
        return _curve(run_dir) or curve
    finally:
        process.terminate()
        process.wait()


def _curve(run_dir: Path) -> dict[int, float]:
    """Step → loss, of every step recorded; a step that is there twice is an error."""
    curve: dict[int, float] = {}
    for event in events_of(run_dir):
        if event["event"] == "train":
            if event["step"] in curve:
                raise AssertionError(f"step {event['step']} is recorded twice")
            curve[event["step"]] = event["loss"]
    return curve


def table(trials: Sequence[Trial]) -> str:
    """Trials by kind as Markdown: failures, the bound, median and worst seconds to recover."""
    lines = [
        "| fault | trials | failures | 95 % bound | median s | worst s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    kinds = [*dict.fromkeys(trial.kind for trial in trials)]
    groups = {kind: [trial for trial in trials if trial.kind == kind] for kind in kinds}
    for kind, group in {**groups, "all": list(trials)}.items():
        failed = sum(bool(trial.problem) for trial in group)
        seconds = [trial.seconds for trial in group if not math.isnan(trial.seconds)]
        middle, worst = (f"{median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("–", "–")
        bound = failure_bound(len(group), failed)
        name = kind.replace("_", " ")
        lines.append(f"| {name} | {len(group)} | {failed} | {bound:.0%} | {middle} | {worst} |")
    return "\n".join(lines)


ALL_KINDS = (*LOSSES, *BAD_LINKS)


def one_trial(kind: str, seed: int, folder: Path, *, n_nodes: int = 3) -> Trial:
    """Make one fault on a run of its own, in `folder`, and return what became of it."""
    (trial,) = run_trials([kind], seed, folder, n_nodes=n_nodes)
    return trial


TRIALS = {kind: partial(one_trial, kind) for kind in ALL_KINDS}
"""Kind of fault → a function of a seed and a folder that makes a trial of it."""
