"""The response to a step whose update is left out: it is reported and counted, then the run rolls
back, then it gives up.

Loss and gradient norm are seen before the update (`guard.py`). The step counts all the same, with
its batch and its learning rate, and the weights stay. After more than `guard.skips` such steps in a
row, weights and optimizer become those of an earlier checkpoint, and the run goes on with the next
step: the updates since are undone, and their batches, which led there, are skipped. So a step still
reads the batch of its number, and no step is made twice.

The checkpoints to roll back to are those after every `guard.rollback_interval` steps, whatever else
is saved. So what a run does follows from its configuration alone, not from when it was saved or
interrupted. Each serves once: where the run fails again before the next one, it goes further back.
"""

from __future__ import annotations

import math
from typing import NoReturn

from pentameter.data.batches.step import TrainingBatches
from pentameter.record.events import Rollback, SkippedStep
from pentameter.train.faults.guard import initial_history, spike_limits
from pentameter.train.faults.row_losses import highest_rows
from pentameter.train.hooks import Hooks
from pentameter.train.keep.saving import RunCheckpoints, load_tensors
from pentameter.train.run import TrainingRun
from pentameter.train.state import EpochSums, GuardState, saved_state
from pentameter.train.update import Update


def skip(run: TrainingRun, checkpoints: RunCheckpoints, hooks: Hooks, update: Update) -> bool:
    """Count and report the latest step, whose update was left out, and call `on_skip` hooks.
    `update` has the step's loss and norm on the host. Return True if the run was rolled back to an
    earlier checkpoint because of it. Collective.

    Raises TrainingFailedError after more than `guard.skips` such steps in a row, if the run does
    not roll back. In fp16 they count only once the loss scale is 1, as it is by overflows that the
    scale is found.
    """
    state = run.state
    batch = run.batches.batch(state.step - 1)  # of all ranks
    nothing = "" if batch.n_targets else ", of which no token is to be learnt"
    reason = f"{_fault(run, update)} on batch {batch.hash()[:16]}{nothing}"
    is_overflow = run.compute.precision == "fp16" and state.loss_scale.scale > 1
    if is_overflow and not update.is_finite:
        reason += f"; loss scale falls to {state.loss_scale.scale:g}"
    else:
        state.consecutive_skips += 1
    hooks.call("on_skip", run, SkippedStep(state.step, reason))
    n_skips = run.config.guard.skips
    if state.consecutive_skips <= n_skips:
        return False
    why = f"{reason}, after {n_skips} skipped updates in a row{_highest_rows(run)}"
    if run.config.guard.rollback_interval is None:
        _give_up(run, checkpoints, why)
    _roll_back(run, checkpoints, hooks, why)
    return True


def _fault(run: TrainingRun, update: Update) -> str:
    """Return in words what is wrong with the update's loss or gradient norm."""
    values = {"loss": update.loss.mean, "gradient norm": float(update.grad_norm)}
    settings = run.config.guard
    for name, value in values.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    assert settings.spike_factor is not None  # else no finite number is a fault
    history = initial_history(settings, run.state)
    limits = spike_limits(history, settings.spike_factor).tolist()
    name, value, limit = next(
        (name, value, limit)
        for (name, value), limit in zip(values.items(), limits, strict=True)
        if value >= limit
    )
    return f"{name} {value:.4g} is a spike, above {limit:.4g},"


def _highest_rows(run: TrainingRun) -> str:
    """Return a clause about the first of the latest skipped steps: the rows of its batch with the
    highest loss, and the documents they are from. Empty if a user's function makes the batches. The
    losses are those of the present weights, which have not changed since. Collective."""
    state, batches = run.state, run.batches
    if not isinstance(batches, TrainingBatches):
        return ""
    first = state.step - state.consecutive_skips + 1
    found = highest_rows(run.engine, batches, run.dataset.tokenizer, first)
    return (
        f"; the batch of step {first} begins it, whose rows of the highest loss "
        f"(median {found.median:.4g}) are {', '.join(found.told)}: "
        f"{found.command(run.run_dir, first)} shows the first of them"
    )


def _roll_back(run: TrainingRun, checkpoints: RunCheckpoints, hooks: Hooks, why: str) -> None:
    """Undo the updates since the newest step in `guard.rollback_steps`, take that step off the
    list, and call `on_rollback` hooks with the reason `why`. Collective. Gives up if no step is
    left, its checkpoint is gone, or `guard.rollbacks` are used up."""
    state, guard = run.state, run.state.guard
    if len(guard.undone) >= run.config.guard.rollbacks:
        _give_up(run, checkpoints, f"{why}; {len(guard.undone)} rollbacks are made")
    if not guard.rollback_steps:
        _give_up(run, checkpoints, f"{why}; there is no checkpoint left to roll back to")
    *earlier, target = guard.rollback_steps
    run.world.activity.note("rolling back", state.step)
    checkpoint = checkpoints.leave_for(target)
    if checkpoint is None:
        _give_up(run, checkpoints, f"{why}; the checkpoint to roll back to, step {target}, is gone")
    load_tensors(run.engine, run.optimizer, checkpoint, run.world)
    saved, _ = saved_state(checkpoint)
    state.consecutive_skips = 0
    state.loss_scale = saved.loss_scale
    is_same_epoch = run.plan.epoch(target) == run.plan.epoch(state.step - 1)
    state.epoch = saved.epoch if is_same_epoch else EpochSums()
    undone = [*guard.undone, (target + 1, state.step)]
    state.guard = GuardState(saved.guard.losses, saved.guard.norms, earlier, undone)
    hooks.call("on_rollback", run, Rollback(state.step, target, why))


def _give_up(run: TrainingRun, checkpoints: RunCheckpoints, why: str) -> NoReturn:
    checkpoints.give_up(f"step {run.state.step}: {why}")
