"""The batch of a step: a pure function of (seed, step, global row); nothing is stored.

A row is up to context_length + 1 tokens: inputs, and targets one place later. Because each row of
the global batch is computed for itself, any division of rows over processes and micro-batches
sees the same data, and a resumed run continues in the middle of an epoch without any state.
`orders.py` says which tokens a row has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.config.choices import look_up
from pentameter.config.schema import Config
from pentameter.data.batches.orders import ORDERS, DocumentRows, PackedDocuments, Row
from pentameter.data.shards.dataset import TokenSplit
from pentameter.planning.plan import global_batch_size

Int64 = npt.NDArray[np.int64]
IGNORED = -1  # as a target: not counted in the loss


@dataclass(frozen=True)
class Batch:
    """Rows of input tokens and, as targets, the token that follows each."""

    inputs: Int64
    """(B, T) token ids."""
    targets: Int64
    """(B, T): the token after each input; -1 where nothing is to be predicted."""
    rows: Int64
    """(B,) number of each row in the whole global batch (or evaluation pass)."""

    @property
    def n_targets(self) -> int:
        """Number of targets that count in the loss."""
        return int((self.targets != IGNORED).sum())

    def hash(self) -> str:
        """sha256, in hex, of all three arrays."""
        digest = hashlib.sha256()
        for array in (self.inputs, self.targets, self.rows):
            digest.update(repr(array.shape).encode())
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        return digest.hexdigest()


def filled_batch(tokens: Iterable[npt.NDArray[Any]], rows: Int64, context_length: int) -> Batch:
    """The batch of rows of token ids, each up to context_length + 1 long; `rows` has their numbers.

    The rest of a row is padded: inputs 0, targets -1.
    """
    inputs = np.zeros((len(rows), context_length), dtype=np.int64)
    targets = np.full((len(rows), context_length), IGNORED, dtype=np.int64)
    for row, ids in enumerate(tokens):
        n_targets = len(ids) - 1
        inputs[row, :n_targets] = ids[:-1]
        targets[row, :n_targets] = ids[1:]
    return Batch(inputs, targets, rows)


class TrainingBatches:
    """The batches of a training split, by step.

    `order` is one of `orders.ORDERS`; with `packing`, `documents` fills rows with one document
    after another. `batch_size` counts the sequences of the whole step, over all devices. Raises
    ConfigError when the split is too short or the order unknown.
    """

    def __init__(
        self,
        split: TokenSplit,
        order: str,
        *,
        seed: int,
        batch_size: int,
        context_length: int,
        packing: bool = False,
    ) -> None:
        kind = look_up(ORDERS, order, "data.order", "training")
        if packing and kind is DocumentRows:
            kind = PackedDocuments
        self._order = kind(split, seed=seed, batch_size=batch_size, context_length=context_length)

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows in one pass over the split; steps run on across its end."""
        return self._order.rows_per_epoch

    @property
    def tokens_per_epoch(self) -> int:
        """Number of the split's tokens that a pass reads: all of them, unless documents are cut."""
        return self._order.tokens_per_epoch

    def batch(self, step: int, rows: Int64 | None = None) -> Batch:
        """The global batch of a step, or the rows (B,) of it, numbers in 0 … batch_size - 1.

        Raises ValueError for rows outside the batch.
        """
        size = self._order.batch_size
        rows = np.arange(size, dtype=np.int64) if rows is None else np.asarray(rows, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < size:
            raise ValueError(f"rows must be in 0 … {size - 1}, got {rows.min()} … {rows.max()}")
        tokens = map(self._tokens, self._order.rows(step, rows))
        return filled_batch(tokens, rows, self._order.context_length)

    def _tokens(self, row: Row) -> npt.NDArray[Any]:
        """The token ids of a row's pieces, one after another."""
        pieces = [self._order.split.tokens[start:stop] for start, stop in row]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def training_batches(config: Config, split: TokenSplit) -> TrainingBatches:
    """The batches that a run of `config` trains on; errors are those of `TrainingBatches`."""
    return TrainingBatches(
        split,
        config.data.order,
        packing=config.data.packing,
        seed=config.seed,
        batch_size=global_batch_size(config),
        context_length=config.model.context_length,
    )
