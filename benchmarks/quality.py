"""Time to quality: seconds and steps to a validation loss on tiny Shakespeare, whole split.

    python benchmarks/quality.py [--presets NAME …] [--seeds 3] [--target 1.4697]
                                 [--peer nanogpt-bf16 --nanogpt DIR] [--estimate] [--json]

Each preset trains once with each seed, in a process of its own, and stops at the first evaluation
at or below the target. Seconds count from the start of the process, so loading, compiling and every
evaluation are in them. Beside them stands a peer with `shakespeare-char`'s recipe, which does not
run to the end (that takes hours): its seconds are the median of its settled step (`train_cpu.py`)
× the steps that the recipe took. With `shakespeare-char` among the presets, these are the steps of
this run; without, those that are on record (STEPS). The peer is the plain GPT (`plain_gpt.py`), or
any side of nanoGPT or Hugging Face: name the one that `train_cpu.py` calls the best.

With `--estimate` no race is run to its end either: each preset trains for SAMPLE_STEPS with the
first seed, and a race is reckoned from its start, its steps, an evaluation, and the steps on
record. The machine must do nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET = 1.4697  # nanoGPT's published best for its character preset
RECIPE = "shakespeare-char"  # whose arithmetic the peers do
STEPS = {"shakespeare-char": 1500, "shakespeare-fast": 500}
"""Preset → steps to TARGET on record (`measurements/presets.md`)."""
SAMPLE_STEPS = 12  # of which an estimate is made
LEAST_PEER_STEPS = 6  # before a peer's step counts in an estimate


class Race:
    """A hook that stops a run at the target, and remembers where that was."""

    def __init__(self, target: float) -> None:
        self.start = time.perf_counter()
        self.target = target
        self.losses: dict[int, float] = {}
        self.steps: int | None = None
        self.seconds: float | None = None

    def on_eval(self, run: Any, metrics: Any) -> None:
        if metrics.split != "val" or self.steps is not None:
            return
        self.losses[metrics.step] = metrics.loss
        if metrics.loss <= self.target:
            self.steps, self.seconds = metrics.step, time.perf_counter() - self.start
            run.stop("target reached")


class Sample:
    """A hook that stops a run at its first evaluation after step 0, and tells from its times how
    long a whole race takes."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.ends: list[float] = []  # of steps
        self.evaluation = 0.0

    def on_step(self, run: Any, metrics: Any) -> None:
        self.ends.append(time.perf_counter() - self.start)

    def on_eval(self, run: Any, metrics: Any) -> None:
        if metrics.split == "val" and self.ends:
            self.evaluation = time.perf_counter() - self.start - self.ends[-1]
            run.stop("enough for an estimate")

    def times(self) -> dict[str, float]:
        """Seconds to the end of the first step, of each step after it, and of an evaluation."""
        step = statistics.median(b - a for a, b in itertools.pairwise(self.ends))
        return {"first": self.ends[0], "step": step, "evaluation": self.evaluation}


def race_seconds(n_steps: int, interval: int, times: dict[str, float]) -> float:
    """The seconds of a race of `n_steps` that evaluates every `interval`, of a Sample's times."""
    evaluations = n_steps // interval * times["evaluation"]
    return times["first"] + (n_steps - 1) * times["step"] + evaluations


def run_one(preset: str, seed: int, target: float, estimate: bool) -> None:
    """Train one run, or the sample of one, and print its result as JSON."""
    race, sample = Race(target), Sample()  # before anything is imported
    import pentameter as pm
    from pentameter.config.files.load import load_config

    # What only shows progress would cost time that is not the recipe's.
    shown = {"train.eval_train_tokens": None, "train.sample_interval": None}
    settings = {"seed": seed, "train.device": "cpu", **shown}
    config = load_config(preset, settings)
    interval = config.train.eval_interval
    assert isinstance(interval, int)
    if estimate:
        config = load_config(preset, settings | {"train.eval_interval": SAMPLE_STEPS})
    with tempfile.TemporaryDirectory() as folder:
        hook = sample if estimate else race
        pm.Trainer(config, run_dir=Path(folder) / "run", hooks=[hook], quiet=True).fit()
    found: dict[str, Any] = {"steps": race.steps, "seconds": race.seconds, "losses": race.losses}
    if estimate:
        times = sample.times()
        seconds = race_seconds(STEPS[preset], interval, times)
        found = {"steps": STEPS[preset], "seconds": seconds, "times": times}
    print(json.dumps(found))


def peer_seconds_per_step(asked: argparse.Namespace) -> float:
    """The median time of a step of a side of `train_cpu.py`, once it has settled."""
    from cpu_turns import LEAST_STEPS, take_turn
    from train_cpu import plan_of

    least = LEAST_PEER_STEPS if asked.estimate else LEAST_STEPS
    plan = plan_of(asked.peer, 0.0)
    turn = take_turn(asked.peer, plan, asked.peer_steps, asked.nanogpt, least)
    return statistics.median(turn.seconds)


def race_of(preset: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The result of `run_one` in a process of its own."""
    command = [sys.executable, __file__, "--one", preset, str(seed), "--target", str(asked.target)]
    command += ["--estimate"] if asked.estimate else []
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(answer.splitlines()[-1])


def spread(values: list[float]) -> str:
    """Mean ± standard deviation."""
    deviation = f" ± {statistics.stdev(values):.0f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.0f}{deviation}"


def say_races(preset: str, races: list[dict[str, Any]], target: float, estimate: bool) -> None:
    """Print a preset's races for people."""
    reached = [race for race in races if race["steps"] is not None]
    means = f"{spread([race['seconds'] for race in reached])} s" if reached else "no time"
    if estimate:
        times = ", ".join(f"{part} {at:.2f} s" for part, at in races[0]["times"].items())
        print(f"{preset}: estimated {means} for {STEPS[preset]} steps, of {times}", flush=True)
        return
    steps = f" in {spread([race['steps'] for race in reached])} steps" if reached else ""
    print(
        f"{preset}: {len(reached)} of {len(races)} reached {target}{steps}, {means}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=[RECIPE, "shakespeare-fast"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--peer", default="plain", help="a side of train_cpu.py")
    parser.add_argument("--peer-steps", type=int, default=5)
    parser.add_argument("--nanogpt", type=Path, metavar="DIR")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("PRESET", "SEED"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        run_one(asked.one[0], int(asked.one[1]), asked.target, asked.estimate)
        return
    if asked.peer.startswith("nanogpt") and asked.nanogpt is None:
        parser.error(f"--peer {asked.peer} needs --nanogpt DIR")
    seeds = range(1, 2 if asked.estimate else 1 + asked.seeds)
    result: dict[str, Any] = {"target": asked.target, "estimate": asked.estimate}
    steps = [STEPS[RECIPE]]
    for preset in asked.presets:
        races = result[preset] = [race_of(preset, seed, asked) for seed in seeds]
        if preset == RECIPE:
            steps = [race["steps"] for race in races if race["steps"] is not None] or steps
        if not asked.json:
            say_races(preset, races, asked.target, asked.estimate)
    per_step = peer_seconds_per_step(asked)
    seconds = statistics.fmean(steps) * per_step
    result["peer"] = {"side": asked.peer, "seconds_per_step": per_step, "seconds": seconds}
    if asked.json:
        print(json.dumps(result))
        return
    print(f"{asked.peer}: {per_step:.2f} s/step, so {seconds:.0f} s for the steps of {RECIPE}")
    for preset in asked.presets:
        reached = [race["seconds"] for race in result[preset] if race["seconds"] is not None]
        if reached:
            print(f"{preset} is there in 1/{seconds / statistics.fmean(reached):.1f} of that")


if __name__ == "__main__":
    main()
