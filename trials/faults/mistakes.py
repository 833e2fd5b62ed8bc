"""Known mistakes of programs that train, planted to see whether the battery catches them.

The first eight have each been made somewhere; the last four are those of saving beside training. A
mistake is planted in every process that a trial starts, by `replace`, which fails if what it
replaces has gone.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentameter.checkpoint.format.save_phases import Written
from pentameter.disk.atomic import FileRecord
from pentameter.errors import CorruptError
from pentameter.train.update import Update
from trials.faults.battery import Result, run_trials
from trials.faults.planted import replace
from trials.faults.table import CLASSES

PHASES = "pentameter.checkpoint.format.save_phases"


def save_in_place() -> None:
    """A checkpoint is written into the folder that readers look at."""
    replace("pentameter.checkpoint.folders.store:temporary_name", lambda real: lambda name: name)

    def make(real):
        def publish(self, folder, manifest):
            self.trust(folder, manifest)

        return publish

    replace("pentameter.checkpoint.folders.store:_StepFolders.publish", make)


def presence_is_validity() -> None:
    """A checkpoint is whole if its files are there."""

    def make(real):
        def check(folder, record, **options):
            assert (folder / record.name).exists()

        return check

    replace("pentameter.disk.atomic:check_file", make)
    replace("pentameter.checkpoint.folders.opening:check_files", lambda real: lambda *a, **k: None)
    replace("pentameter.checkpoint.folders.store:check_files", lambda real: lambda *a, **k: None)
    replace(
        "pentameter.checkpoint.folders.verification:check_files", lambda real: lambda *a, **k: None
    )
    replace("pentameter.disk.atomic:check_hash", lambda real: lambda *a: None)


def newest_by_time() -> None:
    """The checkpoint to resume from is the one that was modified last."""

    def make(real):
        def listed(folder):
            return sorted(real(folder), key=lambda each: -each.path.stat().st_mtime)

        return listed

    replace("pentameter.checkpoint.folders.opening:list_checkpoints", make)


def skip_by_zero() -> None:
    """An update is left out by multiplying its gradients by zero, and zero times NaN is NaN."""

    def make(real):
        def update(engine, optimizer, loss, rate, *arguments, **options):
            factor = 1.0 if math.isfinite(loss.mean) else 0.0
            for parameter in engine.parameters():
                parameter.grad.mul_(factor)
            for group in optimizer.param_groups:
                group["lr"] = rate
            norm = engine.gradient_norm()
            optimizer.step()
            engine.zero_gradients()
            return Update(loss, float(norm))

        return update

    replace("pentameter.train.loop:update_weights", make)


def nan_in_the_mean() -> None:
    """The running statistics take in every loss, also one that is not finite."""

    def make(real):
        def skip(run, checkpoints, hooks, update):
            window = run.config.guard.window
            run.state.guard.add(update.loss.mean, float(update.grad_norm), window)
            return real(run, checkpoints, hooks, update)

        return skip

    replace("pentameter.train.loop:skip", make)


def signal_of_one_rank() -> None:
    """A rank that receives a signal stops, and the others never hear of it."""

    def make(real):
        def agree(self, world, word=None, **options):
            received, self.received = self.received, None
            reason = real(self, world, word, **options)
            self.received = self.agreed = received
            return received or reason

        return agree

    replace("pentameter.train.signals:StopSignals.agree", make)


def loader_of_the_rank_count() -> None:
    """Which tokens a step reads depends on how many processes train."""

    def make(real):
        def batch(self, step, rows=None):
            return real(self, step + _world_size() - 1, rows)

        return batch

    replace("pentameter.data.batches.step:TrainingBatches.batch", make)


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def corruption_is_success() -> None:
    """A run whose checkpoints are all damaged begins anew, as if there were none, and exits 0."""

    def make(real):
        def find(*arguments, **options):
            try:
                return real(*arguments, **options)
            except CorruptError:
                return None

        return find

    replace("pentameter.checkpoint.folders.store:find_checkpoint", make)


# -- saving beside training -----------------------------------------------------------------------


def snapshot_of_the_weights_themselves() -> None:
    """The snapshot is the weights, and the next steps change it while it is written."""
    replace(
        "pentameter.checkpoint.format.save_phases:HostBuffers.copy",
        lambda real: lambda _, files: files,
    )


def commit_before_all_have_written() -> None:
    """A rank reports its files as written while its thread has still to write them."""

    def make(real):
        def written(self):
            if self._thread is None or self.world.is_main:
                return real(self)
            return _as_if_written(self)

        return written

    replace("pentameter.checkpoint.format.save_phases:Save.written", make)
    replace(
        "pentameter.checkpoint.format.save_phases:Save.is_writing",
        lambda real: property(lambda self: False),
    )


def _as_if_written(save):
    def record(name: str, chunks) -> FileRecord:
        content = b"".join(bytes(chunk) for chunk in chunks)
        return FileRecord(name, len(content), hashlib.sha256(content).hexdigest())

    tensors = {group: record(name, file.chunks()) for group, (name, file) in save.files.items()}
    small = [record(n, [data]) for n, data in save.small.items()] if save.world.is_main else []
    return Written(tensors, small)


def a_failed_write_is_lost() -> None:
    """Nobody asks whether the thread that writes has failed."""

    def make(real):
        def write(self):
            real(self)
            if self._error is not None and self.is_beside:
                self._error, self._written = None, _as_if_written(self)

        return write

    replace(f"{PHASES}:Save._write", make)


def prune_before_the_commit() -> None:
    """The old checkpoints are removed when the new one is planned: its writing may yet fail."""

    def make(real):
        def plan(self, contents, *arguments, **options):
            planned = real(self, contents, *arguments, **options)
            if planned.world.is_main:
                for candidate in list(self._folders.own()):
                    self._folders.discard(candidate.path)
            return planned

        return plan

    replace("pentameter.checkpoint.folders.store:CheckpointStore.plan", make)


@dataclass(frozen=True)
class Mistake:
    """A mistake, the class whose trials must catch it, and the numbers of those that it is given:
    several where a kill must come at the right moment."""

    plant: Callable[[], None]
    id: str
    numbers: Sequence[int]

    @property
    def name(self) -> str:
        """In words."""
        return self.plant.__name__.replace("_", " ")


WITH_TWO_RANKS = range(2, 36, 3)
"""Trials of C1a."""

MISTAKES = [
    Mistake(save_in_place, "C1", range(6, 12)),
    Mistake(presence_is_validity, "K1", range(3, 9)),
    Mistake(newest_by_time, "T1", range(8)),
    Mistake(skip_by_zero, "N1", range(1, 3)),
    Mistake(nan_in_the_mean, "N1", range(2)),
    Mistake(signal_of_one_rank, "S1", range(9, 12)),
    Mistake(loader_of_the_rank_count, "R2", range(6)),
    Mistake(corruption_is_success, "K1", [4]),
    Mistake(snapshot_of_the_weights_themselves, "C1a", range(20, 32)),
    Mistake(commit_before_all_have_written, "C1a", WITH_TWO_RANKS),
    Mistake(a_failed_write_is_lost, "D1", range(0, 34, 2)),
    Mistake(prune_before_the_commit, "C1a", range(3, 12)),
]


def catch(mistake: Mistake, shared: Path, seed: int) -> Result | None:
    """The first trial that a mistake fails, None if it passes all that it is given; `shared` is the
    folder of the undisturbed runs. Raises AssertionError if it cannot be planted any more, which
    would fail every trial."""
    planting = multiprocessing.get_context("forkserver").Process(target=mistake.plant)
    planting.start()
    planting.join()
    assert planting.exitcode == 0, f"{mistake.name} cannot be planted any more"
    fault_class = next(each for each in CLASSES if each.id == mistake.id)
    results = run_trials(fault_class, seed, mistake.numbers, shared, [mistake.plant])
    return next((result for result in results if not result.held), None)
