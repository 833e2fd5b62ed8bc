"""The rules for saving a run, and for keeping its checkpoints.

1. Only finite weights and optimizer states are saved. Each rank first checks its shards of them.
   If one rank finds NaN or an infinity, all raise TrainingFailedError, and nothing is written or
   removed.
2. Nothing is saved while replicas of a tensor differ between ranks: a checkpoint would mix
   several. Replicas are compared first (and every `train.check_copies` steps), with
   `train.check_every` more than these (`checking.py`). If any differ, all ranks raise
   TrainingFailedError.
3. While updates are being skipped (`TrainState.consecutive_skips` > 0) nothing is saved, except a
   new best model and the end of a complete run. A save that fell due is made after the next update.
   A signal then ends the run without a save: the same command resumes from the last checkpoint and
   repeats the steps since. fp16 finds its loss scale by overflows; these are not counted, so they
   delay no save.
4. A checkpoint is *known good* once a value computed from its weights was finite: the next step's
   loss and gradient norm, or an evaluation's loss. The weights do not change between a checkpoint
   and the next update, so that update shows it. The newest known good checkpoint is never removed.
5. A run that gives up removes its own checkpoints after the last known good one: nothing finite was
   computed from their weights, so the same command would give up again. If none is known good, all
   are kept.
6. If `checkpoint.asynchronous` is on, training waits only for a snapshot, and writing the files is
   overlapped with the next steps. The save is committed between two steps, as soon as all ranks
   have written; until then the run counts as not saved. Only one save is pending at a time: the
   next save waits for it. A run's last save is not overlapped. A failed write is reported at the
   commit: like a failed synchronous save it ends the run (`checkpoint.on_error`), unless the last
   save is about to be made at that step anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch

from pentameter.checkpoint.folders.opening import Checkpoint
from pentameter.checkpoint.folders.store import Saved
from pentameter.checkpoint.format.owners import Groups
from pentameter.checkpoint.format.save_phases import Contents, HostBuffers, Save
from pentameter.checkpoint.state.custom_optimizer import FILE_NAME
from pentameter.checkpoint.state.state_dicts import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    optimizer_values,
)
from pentameter.config.choices import ENDS_RUN, look_up
from pentameter.config.files.write import to_toml
from pentameter.config.fingerprint import not_the_training
from pentameter.config.schema import Config
from pentameter.disk.atomic import remove_tree
from pentameter.errors import RunFolderInUseError, StorageError, TrainingFailedError
from pentameter.estimating.bytes.plan_estimates import plan_memory, plan_state_bytes
from pentameter.machine.choices import choose_asynchronous
from pentameter.machine.cores_and_memory import host_memory_bytes
from pentameter.optim.build import AnyOptimizer, JointOptimizer
from pentameter.optim.schedule import cooldown_start
from pentameter.parallel.engine import Engine
from pentameter.parallel.local_shards import local_shard
from pentameter.planning.plan import Plan
from pentameter.processes.group.world import World
from pentameter.record.events import CheckpointMetrics
from pentameter.train.compute import Compute
from pentameter.train.faults.checking import FaultChecks
from pentameter.train.keep.run_folder import hash_of_read
from pentameter.train.run import TrainingRun

ROLLBACK_CHECKPOINTS = 2
"""Number of checkpoints kept for rollbacks. If a run fails again at once after a rollback to the
newer one, that one was saved too late, and it goes back to the older."""


@dataclass
class _PendingSave:
    """A checkpoint that is being saved: planned or being written, but not committed yet. `save` is
    the checkpoint store's record of it; `is_best` says that the step's evaluation was the best so
    far."""

    save: Save
    is_best: bool
    is_proved: bool
    """True once a loss computed from these weights was finite, which makes the checkpoint known
    good."""
    rollback_steps: list[int]
    """The steps to which a run resumed from it may roll back."""
    stall_seconds: float = 0.0
    """Seconds that training has waited for this save."""

    def all_have_written(self) -> bool:
        """Return True once every rank has written its files. Collective."""
        return not self.save.world.all_reduce_max(self.save.is_writing)

    def why_not_saved(self) -> object:
        """Wait until this rank has written its files, and return the reason why the checkpoint is
        not committed, to be printed."""
        try:
            self.save.written()
        except Exception as error:
            return error
        return "the run ended before all processes had written it"

    def commit(self, run: TrainingRun) -> Saved:
        """Wait until every rank has written, make the checkpoint visible, and note its step in the
        run's state. Collective. Raises StorageError if a rank could not write."""
        state, activity, is_beside = run.state, run.world.activity, self.save.is_beside
        if is_beside:
            activity.note("committing", state.step)
        run.world.agreed(run.folder.check_there)  # it was planned steps ago, perhaps
        saved = run.folder.store.commit(self.save)
        if is_beside:  # to wait for a write may take as long as the whole write
            activity.took("committing", saved.seconds)
        activity.took("saving", saved.seconds)
        if self.is_best:
            state.saved_best_step = saved.step
        if self.is_proved:
            state.proved_step = saved.step
        return saved


class RunCheckpoints:
    """A run's checkpoints. They are saved when one is due and every rank's tensors are finite and
    replicas equal, and removed when newer ones replace them, but never the newest known good one.
    The rules are at the head of this file. Methods are collective.

    log_ends: called on rank 0 at each save; it syncs the logs and returns the sizes, in bytes, to
        which a resumed run truncates them.
    on_saved: called on every rank for each checkpoint that is now on disk.
    """

    def __init__(self, run: TrainingRun, log_ends: Callable[[], Mapping[str, Any]]) -> None:
        self.run, self._log_ends = run, log_ends
        self.on_saved: Callable[[CheckpointMetrics], None] = lambda _: None
        self.last_step = run.state.step if run.folder.holds_checkpoint else None
        """The step of the folder's newest committed checkpoint, None if there is none."""
        self._begun_step = run.state.step
        self._left_step: int | None = None  # last_step at the latest rollback
        self._is_owed = False
        self._pending: _PendingSave | None = None
        self._buffers = HostBuffers()
        self.old = OldCheckpoints(run)
        self.checks = FaultChecks(run)

    def __str__(self) -> str:
        """Return a clause that says from which step the same command would resume."""
        if self.last_step is None:
            return "there is no checkpoint, so the same command starts again"
        return f"the last checkpoint is step {self.last_step}, where the same command goes on"

    def save_if_due(self, *, complete: bool, interrupted: bool, new_best: bool) -> None:
        """Commit a pending save that every rank has written by now, then save if a save is due.
        Call it between two steps.

        complete, interrupted: the run ends at this step, with all its steps made or by a signal.
        new_best: the evaluation at this step was the best.

        Raises TrainingFailedError if weights or optimizer state are not finite or replicas differ.
        Raises StorageError if a save fails and the run ends here or `checkpoint.on_error` asks for
        it; earlier checkpoints stay.
        """
        ends = complete or interrupted
        _note_rollback_step(self.run, self._begun_step)
        is_due = self._is_due(complete=complete, interrupted=interrupted, new_best=new_best)
        if self._pending is not None and (is_due or ends or self._pending.all_have_written()):
            self._commit(may_fail=is_due and ends, beside=not ends)
        if is_due or ends:
            self.old.await_removals()
        if not is_due:
            return
        step = self.run.state.step
        try:
            beside = self._is_asynchronous and not ends
            pending = self._plan("copying" if beside else "saving")
            if beside:
                pending.save.start_writing(self._buffers)
        except StorageError as error:
            if ends or failure_ends_run(self.run.config):
                raise self._not_saved(step, error) from error
            _say_not_saved(self.run, step, error)
            return
        self._pending = pending
        pending.stall_seconds = time.perf_counter() - pending.save.started_at
        if not beside:
            self._commit(may_fail=False, must_not_fail=ends)

    def _is_due(self, *, complete: bool, interrupted: bool, new_best: bool) -> bool:
        """Return True to save now: at the run's end, every `checkpoint.interval` steps, for a new
        best model (with `checkpoint.keep_best`), or if a save was postponed. False if this step is
        saved already, unless it is a new best.

        While updates are skipped a due save is postponed until the next update, except for a
        complete run or a new best model.
        """
        state, settings = self.run.state, self.run.config.checkpoint
        assert settings.interval is not None  # resolved by the plan
        new_best = new_best and settings.keep_best
        due = complete or interrupted or new_best or self._is_owed
        due = due or state.step % settings.interval == 0 or state.step in state.guard.rollback_steps
        due = due or state.step == uncooled_step(self.run.config)
        is_saved = state.step in (self._begun_step, self.last_step)  # a branch's in another folder
        if not due or (is_saved and not new_best):
            return False
        self._is_owed = state.consecutive_skips > 0 and not (complete or new_best)
        return not self._is_owed

    def _commit(self, *, may_fail: bool, must_not_fail: bool = False, beside: bool = False) -> None:
        """If a save is pending, wait until it is written, commit it, and remove old checkpoints.
        Collective.

        may_fail: True: a failure only prints a warning, even if `checkpoint.on_error` says that it
            ends the run.
        must_not_fail: True: a failure always raises StorageError. If neither is set,
            `checkpoint.on_error` decides.
        beside: True to remove old checkpoints in a thread while training goes on.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        start, step = time.perf_counter(), pending.save.step
        try:
            saved = pending.commit(self.run)
        except StorageError as error:
            self.old.unfinished += [pending.save.folder] if self.run.world.is_main else []
            if must_not_fail or (failure_ends_run(self.run.config) and not may_fail):
                raise self._not_saved(step, error) from error
            _say_not_saved(self.run, step, error)
            return
        again, self.last_step = self.last_step == step, step
        self.old.rollback_steps = pending.rollback_steps
        self.run.copies.request(step, self.old.returned_to, at_end=must_not_fail)
        self.old.prune(beside=beside)
        stall_seconds = pending.stall_seconds + time.perf_counter() - start
        self.on_saved(
            CheckpointMetrics(step, saved.path, saved.n_bytes, saved.seconds, stall_seconds, again)
        )

    @cached_property
    def _is_asynchronous(self) -> bool:
        return _overlaps_saves(self.run)

    def close(self) -> None:
        """Finish the pending save after an error has ended the run. In a run with one process,
        commit it. With several ranks a commit would need them all, so print that the step is not
        saved. Not collective."""
        self.old.await_own_removals()
        if self._pending is None:
            return
        if self.run.world.size == 1:
            try:
                with suppress(RunFolderInUseError):  # that ends the run, or is the next to do so
                    self._commit(may_fail=True)
            except Exception as error:  # raised by a hook; the run's first error counts
                self.run.console.say(f"warning: after a checkpoint was saved: {error!r}")
            return
        pending, self._pending = self._pending, None
        _say_not_saved(self.run, pending.save.step, pending.why_not_saved())

    def check_if_due(self) -> None:
        """Every `train.check_copies` and `train.check_every` steps, look for silent corruption;
        raise TrainingFailedError if there is any."""
        if self.checks.is_due():
            self._refuse_faults("goes no further")

    def prove(self) -> None:
        """Mark the newest checkpoint and the pending save as known good, after a finite loss was
        computed with their weights. Older checkpoints may be removed from now on."""
        if self._pending is not None:
            self._pending.is_proved = True
        if self.last_step not in (None, self._left_step, self.run.state.proved_step):
            self.run.state.proved_step = self.last_step
            self.old.prune(beside=self._is_asynchronous)

    def leave_for(self, step: int) -> Checkpoint | None:
        """Prepare a rollback to `step`: commit a pending save, and return this run's checkpoint at
        that step; None if it no longer exists. Collective."""
        self.commit_pending()
        self._left_step = self.last_step
        self.checks.forget()
        store = self.run.folder.store
        return store.verification.on_main(lambda: store.at(step), "rolling back", step)

    def commit_pending(self) -> None:
        """Commit the pending save, if there is one; print a warning if it failed. Collective."""
        self._commit(may_fail=True)

    def say_warnings(self) -> None:
        """Print the store's warnings that were not printed yet."""
        warnings = self.run.folder.store.warnings
        while warnings:
            self.run.console.say(f"warning: {warnings.pop(0)}")

    def give_up(self, why: str) -> NoReturn:
        """Remove the checkpoints after the newest known good one, from which the run could not
        resume, and raise TrainingFailedError with `why`, a clause, and advice. If none is known
        good, all are kept."""
        self.old.await_removals()
        self.commit_pending()
        proved, store = self.run.state.proved_step, self.run.folder.store
        if proved is not None and self.last_step is not None and proved < self.last_step:
            with suppress(StorageError):
                discarded = store.verification.on_main(
                    lambda: store.discard_after(proved), "removing", self.last_step
                )
                if discarded:
                    self.run.copies.discard_after(proved)
                    why += f"; step {self.last_step} is removed, nothing finite came of its weights"
                    self.last_step = proved
        raise TrainingFailedError(
            f"{why}; {self}. {advice(self.run)}; `pentameter report {store.folder.parent}` shows "
            "what happened"
        )

    def _not_saved(self, step: int, error: StorageError) -> StorageError:
        return StorageError(f"step {step} is not saved: {error}; {self}")

    def _refuse_faults(self, consequence: str) -> None:
        """Raise TrainingFailedError if replicas of a tensor differ between ranks, or another check
        of `checks` fails. `consequence` completes the message "step N …". Collective."""
        wrong = self.checks.fault()
        if wrong is not None:
            self.commit_pending()  # it was checked before
            raise TrainingFailedError(f"step {self.run.state.step} {consequence}: {wrong}; {self}")

    def _plan(self, doing: str) -> _PendingSave:
        """Check that weights and optimizer states are finite and that replicas are equal, then plan
        the save of this step, and return it. `doing` is noted as this rank's activity meanwhile.
        Raises TrainingFailedError if a check fails. Collective."""
        start = time.perf_counter()
        run, world = self.run, self.run.world
        world.activity.note(doing, run.state.step)
        world.agreed(run.folder.check_ours)
        tensors = world.agreed(lambda: tensors_to_save(run.engine, run.optimizer))
        learned = dict(run.engine.named_parameters())  # a buffer may hold a mask of infinities
        model = {name: t for name, t in tensors["model"].items() if name in learned}
        wrong = first_non_finite({**tensors, "model": model}, world)
        if wrong is not None:
            self.give_up(f"step {run.state.step} is not saved: {wrong} is not finite")
        self._refuse_faults("is not saved")
        pending = _planned(run, tensors, self._log_ends)
        pending.save.started_at = start
        return pending


def _say_not_saved(run: TrainingRun, step: int, error: object) -> None:
    run.console.say(f"warning: step {step} is not saved: {error}")


def _note_rollback_step(run: TrainingRun, begun_step: int) -> None:
    """Add this step to those that the run may roll back to, if it is a multiple of
    `guard.rollback_interval` and its update was made. `begun_step` is the step at which this start
    began. Whether the step can be saved does not count: what a run does must not depend on its
    disk."""
    state, interval = run.state, run.config.guard.rollback_interval
    if interval is None or state.step % interval or state.consecutive_skips:
        return
    if state.step == begun_step:  # the saved state says whether it is one
        return
    if all(last != state.step for _, last in state.guard.undone):
        state.guard.rollback_steps.append(state.step)
        del state.guard.rollback_steps[:-ROLLBACK_CHECKPOINTS]


class OldCheckpoints:
    """Removes a run's checkpoints that are no longer kept, at once or while training goes on."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.rollback_steps = [*run.state.guard.rollback_steps]
        """The steps to which a run resumed from the newest checkpoint may roll back."""
        self.unfinished: list[Path] = []
        """On rank 0, folders of saves that failed, which may still be there: the run folder's disk
        may have been gone."""
        self._remover = ThreadPoolExecutor(1)
        self._removals: list[Future[None]] = []

    def begin(self, *, removes_later_copies: bool = False) -> None:
        """As a run starts: remove old checkpoints whose removal an earlier process did not finish,
        and ask for a copy of the checkpoint to resume from if `checkpoint.copy_to` has none. With
        `removes_later_copies`, copies of later steps, which are made anew, are removed there."""
        self.prune()
        if self.run.folder.holds_checkpoint:
            if removes_later_copies:
                self.run.copies.discard_after(self.run.state.step)
            self.run.copies.request(self.run.state.step, self.returned_to)

    @property
    def returned_to(self) -> list[int]:
        """Steps that a run resumed from the newest checkpoint may return to: its best, those to
        roll back to, and the one before its cool-down (`checkpoint.keep_before_cooldown`). Some of
        them may have no checkpoint on disk."""
        state = self.run.state
        # The best may be unsaved because the disk was full: then the best before it is kept.
        best = (state.best_step, state.saved_best_step)
        kept = best if self.run.config.checkpoint.keep_best else ()
        kept = (*kept, uncooled_step(self.run.config))
        return [*(step for step in kept if step is not None), *self.rollback_steps]

    def prune(self, *, beside: bool = False) -> None:
        """Remove all checkpoints but these: the newest `checkpoint.keep_last`, the best, the newest
        known good one, those to return to and those being copied. With `beside`, a thread
        removes the files while training goes on, since that may take as long as writing them. A
        failure only warns."""
        state, settings = self.run.state, self.run.config.checkpoint
        keep = [*self.returned_to, *state.guard.rollback_steps, *self.run.copies.steps_in_use]
        keep += [] if state.proved_step is None else [state.proved_step]
        store = self.run.folder.store

        def remove(folder: Path) -> None:
            if beside:
                self._removals.append(self._remover.submit(remove_tree, folder))
            else:
                remove_tree(folder)

        try:
            store.verification.on_main(
                lambda: store.prune(settings.keep_last, keep, remove), "removing", state.step
            )
        except StorageError as error:  # the new checkpoint is complete; only the old ones stay, too
            self._say_not_removed(error)

    def await_removals(self) -> None:
        """Wait until the checkpoints that were removed are gone from disk, as the next save needs
        their space. Collective."""
        step = self.run.state.step
        self.run.world.patiently(lambda _: self.await_own_removals(), "removing", step)

    def await_own_removals(self) -> None:
        """Wait until the checkpoints that this rank removes are gone from disk; on rank 0 also the
        remains of failed saves."""
        with suppress(StorageError):  # once the folder is there again
            self.run.folder.check_there()
            while self.unfinished:
                remove_tree(self.unfinished[-1])
                self.unfinished.pop()
        while self._removals:
            try:
                self._removals.pop(0).result()
            except StorageError as error:
                self._say_not_removed(error)

    def _say_not_removed(self, error: StorageError) -> None:
        self.run.console.say(f"warning: an old checkpoint could not be removed: {error}")


def uncooled_step(config: Config) -> int | None:
    """Return the step whose checkpoint is saved and kept since the learning rate falls after it;
    None without `checkpoint.keep_before_cooldown`, and for schedules without such a step."""
    if not config.checkpoint.keep_before_cooldown:
        return None
    return cooldown_start(config.schedule)


def failure_ends_run(config: Config) -> bool:
    """Return True if `checkpoint.on_error` says that a failed save or copy ends the run."""
    on_error = config.checkpoint.on_error
    return look_up(ENDS_RUN, on_error, "checkpoint.on_error", "the trainer")


def advice(run: TrainingRun) -> str:
    """Return advice to print with the message that a loss is not finite. It suggests a lower
    learning rate only if an update was made."""
    if run.state.step > run.state.consecutive_skips:  # some update was made
        return (
            "Where that ends here again, lower optimizer.learning_rate="
            f"{run.config.optimizer.learning_rate} or look at the data"
        )
    weights, precision = run.folder.initial_weights, run.compute.precision
    if weights is not None:
        begun = f"the weights of {weights.path}"
    elif run.plan.built_by is not None:
        begun = f"the values with which {run.plan.built_by} begins"
    else:
        begun = f"the initial weights (model.init_std={run.config.model.init_std})"
    wider = "" if precision == "fp32" else f", or try train.precision=fp32, not {precision}"
    return (
        "No update has been made, so the learning rate is not the reason: look at "
        f"{begun} and at the data{wider}"
    )


def _overlaps_saves(run: TrainingRun) -> bool:
    """Return True if every rank has the host memory to write a checkpoint while training goes on,
    and `checkpoint.asynchronous` allows it. Collective."""
    beside = choose_asynchronous(
        run.config.checkpoint.asynchronous,
        run.world.local_size * host_bytes_while_saving(run.plan, run.compute),
        host_memory_bytes(),
    )
    return not run.world.all_reduce_max(not beside)


def host_bytes_while_saving(plan: Plan, compute: Compute) -> int:
    """Return the predicted host memory, in bytes, that a rank takes during an overlapped save: the
    snapshot, and the step's own host memory."""
    held = plan_state_bytes(plan)
    if compute.device.type == "cuda":
        # Pinned memory is allocated in powers of two.
        return 2 * held.snapshot_bytes + (held.state_bytes if plan.config.train.offload else 0)
    if plan.built_by is not None:  # nothing is known about a custom model's activations
        return held.snapshot_bytes + held.state_bytes
    memory = plan_memory(plan, compute.precision, drops_by_blocks=compute.forms.drops_by_blocks)
    return held.snapshot_bytes + memory.total_bytes


def _planned(
    run: TrainingRun, tensors: Groups, log_ends: Callable[[], Mapping[str, Any]]
) -> _PendingSave:
    """Return the planned save of `tensors` at this step, together with everything else that a
    resumed run needs: state, data hash, log sizes, configuration and tokenizer. Collective."""
    state, world = run.state, run.world
    contents = Contents(
        state.step,
        tensors,
        state={
            **state.to_json(),
            "data_hash": hash_of_read(run.dataset, run.plan, state.step),
            "own_keys": run.folder.own_keys,
            **run.supplied.record(run.plan),
            "base_model": run.folder.base_model,
            **world.on_main(log_ends),
        },
        extra_files={
            # An earlier version opens it, though it may not know of some keys.
            "config.toml": to_toml(
                run.plan.portable_config, left_out_at_default=not_the_training()
            ).encode(),
            "tokenizer.json": run.dataset.tokenizer.to_bytes(),
            **optimizer_values(run.optimizer, run.engine.named_parameters(), world),
        },
        layout=run.plan.layout.degrees(),
    )
    save = run.folder.store.plan(contents, world, run.engine.meshes)
    is_best, is_evaluated = (step == state.step for step in (state.best_step, state.last_eval_step))
    # An evaluation's loss was finite, else the run would have given up.
    return _PendingSave(save, is_best, is_evaluated, [*state.guard.rollback_steps])


def tensors_to_save(engine: Engine, optimizer: AnyOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's tensors, group (`model` or `optimizer`) → name → tensor. Left out are
    replicas of tied parameters that another pipeline stage owns. Collective."""
    # First, as it shards what FSDP left gathered: `named` must hold the optimizer's parameters.
    model = model_state(engine.models)
    named = dict(engine.named_parameters())
    replicas = named.keys() - {name for name, _ in engine.owned_parameters()}
    if engine.mesh.coordinates["pipeline"]:
        replicas |= {""}  # what a custom optimizer keeps beside its states is the first stage's
    return {
        "model": {name: tensor for name, tensor in model.items() if name not in replicas},
        "optimizer": optimizer_state(optimizer, named.items(), replicas),
    }


def load_tensors(
    engine: Engine, optimizer: AnyOptimizer, checkpoint: Checkpoint, world: World
) -> None:
    """Load weights and optimizer state from `checkpoint`: each rank reads its own shards, whichever
    layout wrote it. Collective. Raises CorruptError if a tensor is missing or does not fit."""
    load_model_state(engine.models, checkpoint.tensors("model"), world)
    for part in optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,):
        part.state.clear()  # else the memory would have to hold two states
    values = None
    if checkpoint.manifest.record(FILE_NAME) is not None:
        values = checkpoint.read(FILE_NAME)
    named, stored = engine.named_parameters(), checkpoint.tensors("optimizer")
    load_optimizer_state(optimizer, named, stored, world, values)


def first_non_finite(groups: Mapping[str, Mapping[str, torch.Tensor]], world: World) -> str | None:
    """Return a phrase with group, name and rank of a tensor with a NaN or an infinity, the same on
    every rank; None if all are finite. Each rank checks its own shards in `groups` (group → name →
    tensor). Collective."""
    own = next(
        (
            f"{group} tensor {name}" + (f" on rank {world.rank}" if world.size > 1 else "")
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
            if not _is_finite(local_shard(tensor)[0])
        ),
        None,
    )
    if not world.all_reduce_max(own is not None):
        return None
    return world.first(own)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no element is NaN or infinite. Minimum and maximum show both, and need no
    copy."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # Extremes of eight bits are not implemented.
    low, high = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
    return bool((torch.isfinite(low) & torch.isfinite(high)).item())
