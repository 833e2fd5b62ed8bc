"""The batch rows of a step with the highest loss, and where their text is from."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pentameter.data.batches.rows_read import RowRead, rows_read, source_names
from pentameter.data.batches.step import TrainingBatches
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.evaluate.split import evaluation_batch_size
from pentameter.parallel.engine import Engine
from pentameter.planning.architecture import IGNORED_TARGET

NAMED_ROWS = 3
"""Batch rows that are named: those with the highest loss."""


@dataclass(frozen=True)
class HighestRows:
    """The batch rows with the highest loss, the highest first, each with its mean loss in nats per
    target. `median` is the median over the whole batch."""

    median: float
    rows: tuple[tuple[RowRead, float], ...]
    source_names: tuple[str, ...]
    """Corpus or path of each data source, in the order in which rows number them."""

    @property
    def told(self) -> list[str]:
        """One phrase for each of these rows: its number in the batch, its loss, and the data set,
        document and tokens that it was read from."""
        return [
            f"row {row.row} ({loss:.4g}; {row.origin(self.source_names[row.source])})"
            for row, loss in self.rows
        ]

    def command(self, folder: Path, step: int) -> str:
        """Return the command that prints the first of these rows, of `step` in the run `folder`;
        `data` alone prints the batch's first rows."""
        return (
            f"pentameter data {shlex.quote(str(folder))} --step {step} --rows {self.rows[0][0].row}"
        )


def highest_rows(
    engine: Engine, batches: TrainingBatches, tokenizer: Tokenizer, step: int
) -> HighestRows:
    """Return the batch rows with the highest loss in the batch of `step` (counted from 1), computed
    with the engine's present weights and without dropout; rows whose loss is not finite come first.
    The result is the same on every rank. Collective."""
    losses = _row_losses(engine, batches, step - 1)
    # Equal rows by their number, on every rank alike.
    highest = np.argsort(-np.nan_to_num(losses, nan=np.inf), kind="stable")[:NAMED_ROWS]
    rows = rows_read(batches, tokenizer, step - 1, highest)
    names = tuple(source_names(engine.plan.config.data))
    found = tuple((row, float(losses[row.row])) for row in rows)
    return HighestRows(float(np.median(losses)), found, names)


def _row_losses(engine: Engine, batches: TrainingBatches, batch_index: int) -> np.ndarray:
    """Return the mean loss in nats per target of each row in a step's global batch, float64 (B,),
    the same on every rank; as many rows at once as an evaluation takes. Collective."""
    n_rows = engine.plan.batch_size
    at_once = evaluation_batch_size(engine.plan, engine.plan.config.model.context_length)
    losses = []
    for start in range(0, n_rows, at_once):
        rows = np.arange(start, min(start + at_once, n_rows), dtype=np.int64)
        batch = batches.batch(batch_index, rows)
        n_targets = np.maximum(1, (batch.targets != IGNORED_TARGET).sum(1))
        losses.append(engine.row_losses(batch) / n_targets)
    return np.concatenate(losses)
