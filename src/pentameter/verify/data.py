"""The check of `verify --data` that every layout reads the same data: in each step, the batch rows
of all ranks, concatenated, must be one process's batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch, TrainingBatches, suited_to, training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.planning.batch_sizes import global_batch_size
from pentameter.planning.layouts.layout import Layout
from pentameter.verify.cases import Case, chosen_cases


@dataclass(frozen=True)
class DataOutcome:
    """Result of comparing the batches that one layout reads with one process's."""

    layout: Layout
    seconds: float
    hash: str | None = None
    """sha256, in hex, over the batches in all compared steps; None for a refused layout."""
    problem: str | None = None
    """The first difference, as a sentence; None if there is none."""
    refused: str | None = None
    """Reason why no run can have this layout, so that nothing was compared; None if one can."""

    @property
    def name(self) -> str:
        """The layout's description for people, as in verify's table."""
        return Case(self.layout).name

    @property
    def passed(self) -> bool | None:
        """True if every batch is one process's, False if one is not; None for a refused layout."""
        return None if self.refused else self.problem is None

    def to_json(self) -> dict[str, Any]:
        """Return the layout's element in the `layouts` that `verify --data --json` prints."""
        return {
            "layout": str(self.layout),
            "name": self.name,
            "world_size": self.layout.world_size,
            "hash": self.hash,
            "problem": self.refused or self.problem,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
        }


def chosen_steps(batches: TrainingBatches, batch_size: int, n_steps: int) -> list[int]:
    """Return the step numbers worth comparing, ascending. These are the first `n_steps`, and as
    many around the middle and the end of the first epoch and the end of the second: each epoch is
    shuffled anew, even if it begins within a batch. For a stream, whose epoch has no known length,
    only the first `n_steps`.

    batch_size: sequences per step.
    """
    epoch = batches.rows_per_epoch
    steps = set(range(n_steps))
    if epoch is None:  # of a stream
        return sorted(steps)
    for row in (epoch // 2, epoch, 2 * epoch):
        around = row // batch_size
        first = max(0, around - n_steps // 2)
        steps |= {around, *range(first, first + n_steps)}
    return sorted(steps)


def verify_data(
    batches: TrainingBatches, batch_size: int, layouts: Sequence[Layout], steps: Sequence[int]
) -> Iterator[DataOutcome]:
    """Compare the batches that each layout reads in `steps` with one process's, and yield the
    outcomes; the first is one process itself, the reference.

    batch_size: sequences per step, over all ranks; a layout whose batch shards do not divide it
    is refused. Nothing is started: each rank's batch rows (`Layout.rows`) are read in this process.
    """
    alone = Layout()
    started = time.monotonic()
    true = [batches.batch(step).hash() for step in steps]
    yield DataOutcome(alone, time.monotonic() - started, _joint_hash(true))
    for layout in layouts:
        if layout == alone:
            continue
        started = time.monotonic()
        if batch_size % (n_shards := layout.n_batch_shards):
            refused = f"{n_shards} parts do not divide the {batch_size} sequences of a step"
            yield DataOutcome(layout, 0.0, refused=refused)
            continue
        hashes, problem = [], None
        for step, expected in zip(steps, true, strict=True):
            joined, disagreement = _joined(batches, batch_size, layout, step)
            hashes.append(joined.hash())
            if problem is None and disagreement is not None:
                problem = disagreement
            elif problem is None and hashes[-1] != expected:
                problem = f"the batch of step {step} is not one process's"
        seconds = time.monotonic() - started
        yield DataOutcome(layout, seconds, _joint_hash(hashes), problem)


def _joined(
    batches: TrainingBatches, batch_size: int, layout: Layout, step: int
) -> tuple[Batch, str | None]:
    """Read the batch rows of each rank in a step under `layout`, and concatenate them, by
    data-parallel index, into one batch.

    Return (batch, problem). Ranks with the same data-parallel index must read the same rows;
    `problem` is a sentence about the first one that does not, None if all do.
    """
    shards: dict[int, Batch] = {}
    disagreement = None
    for rank in range(layout.world_size):
        rows = layout.rows(rank, batch_size)
        shard = batches.batch(step, np.arange(rows.start, rows.stop, dtype=np.int64))
        first = shards.setdefault(layout.data_index(rank), shard)
        if disagreement is None and first.hash() != shard.hash():
            disagreement = (
                f"in step {step}, rank {rank} reads other rows than those it shares part "
                f"{layout.data_index(rank)} of the batch with"
            )
    ordered = [shards[index] for index in sorted(shards)]
    inputs, targets, numbers = (
        np.concatenate([getattr(shard, name) for shard in ordered])
        for name in ("inputs", "targets", "rows")
    )
    return Batch(inputs, targets, numbers), disagreement


def _joint_hash(hashes: Sequence[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


@dataclass(frozen=True)
class DataVerdict:
    """The result of `verify --data` for a configuration: each layout's outcome, and the
    data that was read."""

    outcomes: Sequence[DataOutcome]
    """One outcome per layout; the first is one process, the reference for the others."""
    dataset: str
    """Hash of the prepared data set."""
    order: str | None
    batch_size: int
    rows_per_epoch: int | None
    steps: Sequence[int]

    @property
    def asked(self) -> Sequence[DataOutcome]:
        """Outcomes of the requested layouts, without the reference; the reference alone if it was
        all that was requested."""
        return self.outcomes[1:] or self.outcomes

    @property
    def passed(self) -> bool:
        """True if every layout that a run can have reads the same batches as one process."""
        return all(outcome.passed is not False for outcome in self.outcomes)

    def facts(self) -> dict[str, Any]:
        """Return the entries that `verify --data --json` prints besides `layouts`: data set, order,
        sizes and steps."""
        names = ("dataset", "order", "batch_size", "rows_per_epoch", "steps")
        return {name: getattr(self, name) for name in names}


def verify_data_of(config: Config, layouts: str, n_steps: int) -> DataVerdict:
    """Compare the batches that the layouts named in `layouts` (`all`, or text such as
    `data=2;tensor=2`) read from the configuration's data with one process's.

    n_steps: steps read at the start, and again around each epoch end that matters (`chosen_steps`).
    Raises ConfigError for an invalid layout; errors from `open_dataset`, such as ConfigError for
    data that is not prepared and CorruptError for damaged data, pass through.
    """
    chosen = list(dict.fromkeys(case.layout for case in chosen_cases(config, layouts)))
    dataset = open_dataset(config.data)
    config = suited_to(dataset.split("train"), config)
    batches = training_batches(config, dataset.split("train"))
    batch_size = global_batch_size(config)
    steps = chosen_steps(batches, batch_size, n_steps)
    return DataVerdict(
        outcomes=list(verify_data(batches, batch_size, chosen, steps)),
        dataset=dataset.hash,
        order=config.data.order,
        batch_size=batch_size,
        rows_per_epoch=batches.rows_per_epoch,
        steps=steps,
    )
