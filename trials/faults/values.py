"""Trials of the battery: values that are not finite, and clocks that are wrong."""

from __future__ import annotations

import math
import os

import torch

from pentameter.checkpoint.folders.opening import list_checkpoints
from trials.faults.oracle import assert_same_run, events, final_tensors
from trials.faults.planted import Clock, Spoil
from trials.faults.trial import Trial, assert_checkpoints_whole, join, kill, said

WHAT = ("loss", "gradient", "weight", "logits")
GIVEN_UP = 70


def a_value_that_is_not_finite(trial: Trial) -> str:
    """A NaN or an infinity, in one rank or all: nothing of it enters weights, state or history.

    Of a loss or a gradient the step alone is left out, with a word. A weight spoils all steps
    after it: the run gives up, and the same command, without the fault, is the undisturbed run.
    """
    what = WHAT[trial.number % len(WHAT)]
    value = (math.nan, math.inf)[trial.number // len(WHAT) % 2]
    n_ranks = 1 + trial.number // (2 * len(WHAT)) % 2
    settings = {"guard.spike_factor": 1e6, "guard.window": 8}  # a history that it could spoil
    if n_ranks > 1:
        settings["parallel.data"] = 2
    whole = trial.undisturbed(n_ranks, **settings)
    step = trial.draw.randint(1, 34)
    victim = trial.draw.choice([None, *range(n_ranks)])
    codes = join(trial.start(whole.config, n_ranks, [Spoil(step, what, value)], victim))
    assert len(set(codes)) == 1, (codes, said(trial.run))
    assert_checkpoints_whole(trial.run)
    for candidate in list_checkpoints(trial.run / "checkpoints"):
        for name, tensor in final_tensors(trial.run, candidate.step).items():
            assert torch.isfinite(tensor).all(), f"step {candidate.step}: {name}"
    skipped = [event["step"] for event in events(trial.run, "skip")]
    if what in ("loss", "gradient"):
        assert codes[0] == 0, (codes, said(trial.run))
        assert skipped == [step + 1]
        losses = [event["loss"] for event in events(trial.run, "train")]
        assert len(losses) == 39
        assert all(map(math.isfinite, losses))
    else:
        assert codes[0] == GIVEN_UP, (codes, said(trial.run))
        assert skipped[0] == step + 1
        trial.finish(whole, n_ranks)
    return f"{value} in {what} of step {step + 1}, rank {victim} of {n_ranks}: {codes[0]}"


DAY = 86_400.0


def a_wrong_clock(trial: Trial) -> str:
    """Killed, then resumed with the clock a day ahead, behind or jumping, and with modification
    times that say nothing: from the right checkpoint, and no time or rate is negative."""
    whole = trial.undisturbed()
    processes = trial.start(whole.config)
    processes[0].join(trial.moment(whole, 0.4, 0.9))
    kill(processes)
    for path in [*trial.run.rglob("*"), trial.run]:
        moment = trial.draw.uniform(0, 4e9)
        if path.exists():
            os.utime(path, (moment, moment))
    clock = Clock((DAY, -DAY, DAY)[trial.number % 3], jumps=trial.number % 3 == 2)
    before = max((c.step for c in list_checkpoints(trial.run / "checkpoints")), default=0)
    codes = join(trial.start(whole.config, planted=[clock]))
    assert codes == [0], said(trial.run)
    resumed = [event["step"] for event in events(trial.run, "resume")]
    assert resumed[-1:] == ([before] if before else []), f"from {resumed}, {before} is newer"
    for kind in ("train", "eval", "checkpoint", "end"):
        for event in events(trial.run, kind):
            for key, value in event.items():
                assert not isinstance(value, int | float) or value >= 0 or key == "time", event
    assert_same_run(trial.run, whole.run)
    return f"{clock}, from step {before}"
