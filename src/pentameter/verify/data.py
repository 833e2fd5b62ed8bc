"""The same data on every layout: what processes read of a step, joined, is one process's batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pentameter.data.batches.step import Batch, TrainingBatches
from pentameter.planning.layout import Layout
from pentameter.verify.cases import Case


@dataclass(frozen=True)
class DataOutcome:
    """The result of comparing the batches of a layout with those of one process."""

    layout: Layout
    seconds: float
    hash: str | None = None
    """sha256, in hex, of the batches of all steps."""
    problem: str | None = None
    """The first difference; None where there is none."""
    refused: str | None = None
    """Why no run can have this layout: then there is nothing to compare."""

    @property
    def name(self) -> str:
        """Its name in a table for people."""
        return Case(self.layout).name

    @property
    def passed(self) -> bool | None:
        """True if every batch is one process's; None for a layout that no run can have."""
        return None if self.refused else self.problem is None

    def to_json(self) -> dict[str, Any]:
        """An element of `layouts` in what `verify --data --json` prints."""
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
    """The first steps, and as many across the middle and the end of the first epoch, and across
    the end of the second: an epoch is drawn anew, wherever in a batch it ends."""
    epoch = batches.rows_per_epoch
    steps = set(range(n_steps))
    for row in (epoch // 2, epoch, 2 * epoch):
        around = row // batch_size
        first = max(0, around - n_steps // 2)
        steps |= {around, *range(first, first + n_steps)}
    return sorted(steps)


def verify_data(
    batches: TrainingBatches, batch_size: int, layouts: Sequence[Layout], steps: Sequence[int]
) -> Iterator[DataOutcome]:
    """The outcome of each layout; the first is one process, which the others are compared with.

    The rows of a process are those that its Engine asks for (`Layout.rows`).
    """
    alone = Layout()
    started = time.monotonic()
    true = [batches.batch(step).hash() for step in steps]
    yield DataOutcome(alone, time.monotonic() - started, _joint_hash(true))
    for layout in layouts:
        if layout == alone:
            continue
        started = time.monotonic()
        if batch_size % layout.data:
            refused = f"{layout.data} parts do not divide the {batch_size} sequences of a step"
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
    """The batch of a step, joined from what each rank reads, in the order of data-parallel indices.

    With it comes a sentence about ranks of one index that read different rows, None for no such.
    """
    parts: dict[int, Batch] = {}
    disagreement = None
    for rank in range(layout.world_size):
        rows = layout.rows(rank, batch_size)
        part = batches.batch(step, np.arange(rows.start, rows.stop, dtype=np.int64))
        first = parts.setdefault(layout.data_index(rank), part)
        if disagreement is None and first.hash() != part.hash():
            disagreement = (
                f"in step {step}, rank {rank} reads other rows than those it shares part "
                f"{layout.data_index(rank)} of the batch with"
            )
    ordered = [parts[index] for index in sorted(parts)]
    inputs, targets, numbers = (
        np.concatenate([getattr(part, name) for part in ordered])
        for name in ("inputs", "targets", "rows")
    )
    return Batch(inputs, targets, numbers), disagreement


def _joint_hash(hashes: Sequence[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
