"""The rules by which a run is saved, and by which its checkpoints stay.

1. Nothing non-finite is saved. Every process looks at its part of the weights and the optimizer's
   state first; where one finds NaN or an infinity, all raise TrainingFailedError and nothing is
   written or removed.
2. Nothing is saved while processes hold different copies of a tensor, of which a checkpoint would
   mix several. They are compared first (and every `train.check_copies` steps); all processes raise
   TrainingFailedError where copies differ.
3. While updates are being skipped (`TrainState.consecutive_skips` > 0) nothing is saved, except a
   new best model and the end of a complete run. A save that fell due is made after the next
   update. A signal then ends the run without a save: the same command goes on from the last
   checkpoint and makes the steps since again. The overflows by which fp16 finds its loss scale are
   not counted, so they hold up no save.
4. A checkpoint is *proved* once something computed from its weights was finite: the loss and
   gradient norm of the next step, or the loss of an evaluation. Between a checkpoint and the next
   update the weights stay as they are, so that update proves it. The newest proved checkpoint is
   never removed.
5. A run that gives up removes its own checkpoints after the last proved one: from their weights
   nothing finite was computed, so the same command would give up again. Without a proved one all
   stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch

from pentameter.checkpoint.copies import differing_copies
from pentameter.checkpoint.safetensors_writer import Groups
from pentameter.checkpoint.state_dicts import model_state, optimizer_state
from pentameter.checkpoint.store import Saved
from pentameter.config.choices import ENDS_RUN, look_up
from pentameter.config.write import to_toml
from pentameter.errors import StorageError, TrainingFailedError
from pentameter.parallel.local_parts import local_part
from pentameter.processes.world import World
from pentameter.train.hooks import CheckpointMetrics, TrainingRun


class RunCheckpoints:
    """The checkpoints of a running run, under the rules above. Methods are collective.

    `log_ends` syncs the logs, in the main process, and returns where a resumed run cuts them back
    to.
    """

    def __init__(self, run: TrainingRun, log_ends: Callable[[], Mapping[str, Any]]) -> None:
        self.run, self._log_ends = run, log_ends
        self.last_step = run.state.step
        """Step of the newest checkpoint, 0 without one."""
        self._is_owed = False

    def __str__(self) -> str:
        """The step from which the run would go on, in words."""
        if self.last_step == 0:
            return "there is no checkpoint, so the same command starts again"
        return f"the last checkpoint is step {self.last_step}, where the same command goes on"

    def save_if_due(
        self, *, complete: bool, interrupted: bool, new_best: bool
    ) -> CheckpointMetrics | None:
        """Save at the boundary between two steps where that is due, and return what was saved.

        `complete` and `interrupted` say that the run ends here. Raises TrainingFailedError for
        weights or optimizer state that are not finite, StorageError where the save fails and must
        not; earlier checkpoints are untouched then.
        """
        state, settings = self.run.state, self.run.config.checkpoint
        assert settings.interval is not None  # the plan resolved it
        new_best = new_best and settings.keep_best
        due = complete or interrupted or new_best or self._is_owed
        due = due or state.step % settings.interval == 0
        if not due or (state.step == self.last_step and not new_best):
            return None
        self._is_owed = state.consecutive_skips > 0 and not (complete or new_best)
        if self._is_owed:
            return None
        try:
            saved = self._save()
        except StorageError as error:
            ends = look_up(ENDS_RUN, settings.on_error, "checkpoint.on_error", "the trainer")
            if complete or interrupted or ends:
                raise
            self.run.console.say(f"warning: step {state.step} is not saved: {error}")
            return None
        again, self.last_step = self.last_step == state.step, state.step
        if state.best_step == state.step:
            state.saved_best_step = state.step
        if state.last_eval_step == state.step:  # its loss was finite, or the run had given up
            state.proved_step = state.step
        self.prune()
        return CheckpointMetrics(saved.step, saved.path, saved.n_bytes, saved.seconds, again)

    def check_copies_if_due(self) -> None:
        """Raise TrainingFailedError where processes hold different copies, if it is time to look
        (`train.check_copies`)."""
        state, interval = self.run.state, self.run.config.train.check_copies
        if interval is not None and state.step % interval == 0:
            self._refuse_different_copies("goes no further")

    def prove(self) -> None:
        """Note that something computed from the newest checkpoint's weights was finite."""
        if self.last_step and self.run.state.proved_step != self.last_step:
            self.run.state.proved_step = self.last_step
            self.prune()

    def prune(self) -> None:
        """Remove all but the newest checkpoints, the best and the newest proved one."""
        state, settings = self.run.state, self.run.config.checkpoint
        # The best one may not have been saved, on a full disk: the best before it is kept then.
        best = (state.best_step, state.saved_best_step) if settings.keep_best else ()
        keep = [step for step in (*best, state.proved_step) if step is not None]
        store = self.run.folder.store
        try:
            self.run.world.on_main(lambda: store.prune(settings.keep_last, keep))
        except StorageError as error:  # the new checkpoint stands; only the old ones stay too
            self.run.console.say(f"warning: an old checkpoint could not be removed: {error}")

    def say_warnings(self) -> None:
        """Say what the store has passed over since the last time."""
        warnings = self.run.folder.store.warnings
        while warnings:
            self.run.console.say(f"warning: {warnings.pop(0)}")

    def give_up(self, why: str) -> NoReturn:
        """Remove the checkpoints from which the run could not go on either, and raise
        TrainingFailedError."""
        proved, store = self.run.state.proved_step, self.run.folder.store
        if proved is not None and proved < self.last_step:
            with suppress(StorageError):
                if self.run.world.on_main(lambda: store.discard_after(proved)):
                    why += f"; step {self.last_step} is removed, nothing finite came of its weights"
                    self.last_step = proved
        raise TrainingFailedError(
            f"{why}; {self}. {self._advice()}; `pentameter report {store.folder.parent}` shows "
            "what happened"
        )

    def _advice(self) -> str:
        """What to change where a loss is not finite: the learning rate only where it has acted."""
        run = self.run
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

    def _refuse_different_copies(self, consequence: str) -> None:
        """Raise TrainingFailedError where processes hold different copies of a tensor."""
        run, engine = self.run, self.run.engine
        if run.world.size == 1:
            return
        model_state(engine.models)  # shards what FSDP left gathered
        held = dict(engine.named_parameters())  # no buffers: a batch norm's are each process's own
        groups: Groups = {
            "model": held,
            "optimizer": optimizer_state(run.optimizer, held.items()),
        }
        wrong = differing_copies(groups, run.world)
        if wrong is not None:
            raise TrainingFailedError(
                f"step {run.state.step} {consequence}: {wrong}, and they should be equal copies. "
                "Faulty memory does this, or a hook that changes the weights of one process; "
                f"{self}"
            )

    def _save(self) -> Saved:
        run, engine, world = self.run, self.run.engine, self.run.world
        world.progress.note("saving", run.state.step)
        world.agreed(run.folder.check_there)
        # First, as it shards what FSDP left gathered: the parameters below are the optimizer's.
        model = model_state(engine.models)
        named = dict(engine.named_parameters())
        copies = named.keys() - {name for name, _ in engine.owned_parameters()}
        tensors = {
            "model": {name: tensor for name, tensor in model.items() if name not in copies},
            "optimizer": optimizer_state(run.optimizer, named.items(), copies),
        }
        wrong = first_non_finite(tensors, world)
        if wrong is not None:
            self.give_up(f"step {run.state.step} is not saved: {wrong} is not finite")
        self._refuse_different_copies("is not saved")
        return run.folder.store.save(
            run.state.step,
            tensors,
            {
                **run.state.to_json(),
                "data_hash": run.dataset.hash,
                **run.supplied.record(run.plan),
                "base_model": run.folder.base_model,
                **world.on_main(self._log_ends),
            },
            extra_files={
                "config.toml": to_toml(run.plan.portable_config).encode(),
                "tokenizer.json": run.dataset.tokenizer.to_bytes(),
            },
            layout=run.plan.layout.degrees(),
            world=world,
        )


def first_non_finite(
    groups: Mapping[str, Mapping[str, torch.Tensor]], world: World | None = None
) -> str | None:
    """Group, name and rank of a tensor with a NaN or an infinity, the same in every process; None
    where all are finite. Each process looks at its own shards. Collective."""
    world = World() if world is None else world
    own = next(
        (
            f"{group} tensor {name}" + (f" on rank {world.rank}" if world.size > 1 else "")
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
            if not _is_finite(local_part(tensor)[0])
        ),
        None,
    )
    if not world.all_reduce_max(own is not None):
        return None
    return next(each for each in world.all_gather(own) if each is not None)


def _is_finite(tensor: torch.Tensor) -> bool:
    """True if no element is NaN or infinite; both show in the extremes, which need no copy."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool((torch.isfinite(low) & torch.isfinite(high)).item())
