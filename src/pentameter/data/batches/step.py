"""The batch of a step: a pure function of (seed, step, global row); nothing is stored.

A row is up to context_length + 1 tokens: inputs, and targets one place later, which count where
they are to be learnt. Because each row of
the global batch is computed for itself, any division of rows over processes and micro-batches
sees the same data, and a resumed run continues in the middle of an epoch without any state.
`orders.py` says which tokens a row has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.config.choices import ROWS_ARE_DOCUMENTS, look_up
from pentameter.config.schema import Config
from pentameter.data.batches.blend import ROWS_AT_ONCE, Blend
from pentameter.data.batches.orders import ORDERS, DocumentRows, PackedDocuments, Row
from pentameter.data.batches.tree import Tree, leaves
from pentameter.data.shards.dataset import TokenSplit
from pentameter.errors import ConfigError
from pentameter.planning.batch_sizes import global_batch_size

Int64 = npt.NDArray[np.int64]
IGNORED = -1  # as a target: not counted in the loss


@dataclass(frozen=True)
class Batch:
    """Rows of inputs and targets: tokens and the token that follows each, or what a user's
    function gives a custom model, in any structure of arrays (B, …)."""

    inputs: Tree
    """(B, T) token ids."""
    targets: Tree
    """(B, T): the token after each input; -1 where nothing is to be predicted."""
    rows: Int64
    """(B,) number of each row in the whole global batch (or evaluation pass)."""
    count: int | None = None
    """Number of targets that count, where that is not to be told from -1."""

    @property
    def n_targets(self) -> int:
        """Number of targets that count in the loss."""
        return int((self.targets != IGNORED).sum()) if self.count is None else self.count

    def hash(self) -> str:
        """sha256, in hex, of all arrays."""
        digest = hashlib.sha256()
        for array in (*leaves(self.inputs), *leaves(self.targets), self.rows):
            digest.update(repr(array.shape).encode())
            little = array.dtype.newbyteorder("<") if array.dtype.kind == "f" else "<i8"
            digest.update(np.ascontiguousarray(array, dtype=little).data)
        return digest.hexdigest()


Learnt = tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]
"""Token ids, and which of them are to be learnt; None where all are."""


def filled_batch(tokens: Iterable[Learnt], rows: Int64, context_length: int) -> Batch:
    """The batch of rows of token ids, each up to context_length + 1 long; `rows` has their numbers.

    The rest of a row is padded: inputs 0, targets -1. So are targets that are not to be learnt.
    """
    inputs = np.zeros((len(rows), context_length), dtype=np.int64)
    targets = np.full((len(rows), context_length), IGNORED, dtype=np.int64)
    for row, (ids, learnt) in enumerate(tokens):
        n_targets = len(ids) - 1
        inputs[row, :n_targets] = ids[:-1]
        targets[row, :n_targets] = ids[1:]
        if learnt is not None:
            targets[row, :n_targets][~learnt[1:]] = IGNORED
    return Batch(inputs, targets, rows)


def learnt_tokens(split: TokenSplit, pieces: Row) -> Learnt:
    """The token ids of pieces of a split, one after another."""
    ids = [split.tokens[start:stop] for start, stop in pieces]
    joined = ids[0] if len(ids) == 1 else np.concatenate(ids)
    if split.answers is None:
        return joined, None
    return joined, np.concatenate([split.answers.mask(*piece) for piece in pieces])


class TrainingBatches:
    """The batches of a training split, by step.

    `order` is one of `orders.ORDERS`; with `packing`, `documents` fills rows with one document
    after another. `batch_size` counts the sequences of the whole step, over all devices. A split
    of several parts is read as a blend of them by `weights`, which are as many. Raises ConfigError
    when a split is too short or the order unknown.
    """

    are_tokens = True

    def __init__(
        self,
        split: TokenSplit,
        order: str,
        *,
        seed: int,
        batch_size: int,
        context_length: int,
        packing: bool = False,
        weights: Sequence[float] = (),
    ) -> None:
        kind = look_up(ORDERS, order, "data.order", "training")
        if packing and kind is DocumentRows:
            kind = PackedDocuments
        are_documents = look_up(ROWS_ARE_DOCUMENTS, order, "data.order", "training")
        if split.answers is not None and not are_documents:
            raise ConfigError(
                f"the data are conversations, which are read whole, and data.order={order!r} reads "
                "windows of a text; set data.order='documents' (with data.packing=true to fill "
                "rows with several)"
            )
        self._batch_size, self._context_length = batch_size, context_length
        self.blend: Blend | None = None
        """The rule that picks each row's part of a split of several; None where it is one."""
        if split.parts:
            orders = [
                kind(part, seed=seed, batch_size=ROWS_AT_ONCE, context_length=context_length)
                for part in split.parts
            ]
            self.blend = Blend(orders, weights, seed)
        else:
            self._order = kind(
                split, seed=seed, batch_size=batch_size, context_length=context_length
            )

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows in one pass over the split; steps run on across its end."""
        return (self.blend or self._order).rows_per_epoch

    @property
    def tokens_per_epoch(self) -> int:
        """Number of the split's tokens that a pass reads: all of them, unless documents are cut."""
        return (self.blend or self._order).tokens_per_epoch

    @property
    def target_share(self) -> float:
        """Positions of an epoch's rows whose target counts in the loss ÷ all positions; the rest
        are padding, or tokens that are read and not learnt."""
        if self.blend is not None:
            return self.blend.target_share
        return self._order.targets_per_epoch / (self.rows_per_epoch * self._context_length)

    @property
    def filled_share(self) -> float:
        """Tokens of an epoch's rows ÷ their length: the rest is padding."""
        orders = self.blend.orders if self.blend is not None else [self._order]
        n_positions = sum(order.rows_per_epoch for order in orders) * (self._context_length + 1)
        return sum(order.tokens_per_epoch for order in orders) / n_positions

    def batch(self, step: int, rows: Int64 | None = None) -> Batch:
        """The global batch of a step, or the rows (B,) of it, numbers in 0 … batch_size - 1.

        Raises ValueError for rows outside the batch.
        """
        size = self._batch_size
        rows = np.arange(size, dtype=np.int64) if rows is None else np.asarray(rows, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < size:
            raise ValueError(f"rows must be in 0 … {size - 1}, got {rows.min()} … {rows.max()}")
        return filled_batch(self._tokens(step, rows), rows, self._context_length)

    def _tokens(self, step: int, rows: Int64) -> Iterator[Learnt]:
        """The tokens of each row."""
        if self.blend is None:
            for row in self._order.rows(step, rows):
                yield learnt_tokens(self._order.split, row)
            return
        for blended in self.blend.rows(step * self._batch_size + rows):
            yield learnt_tokens(blended.split, blended.row)


def suited_to(split: TokenSplit, config: Config) -> Config:
    """`config` with an order in which the split can be read.

    Conversations are read whole: where the order reads windows of a text they become documents.
    They are packed, as rows of one short conversation each are mostly padding, unless they are too
    few to fill a row, or longer than a row on average: windows of these could be all question.
    """
    if split.answers is None:
        return config
    if look_up(ROWS_ARE_DOCUMENTS, config.data.order, "data.order", "training"):
        return config
    context_length = config.model.context_length
    packing = all(
        context_length < part.n_tokens
        and (part.answers is None or part.n_tokens <= context_length * len(part.document_starts))
        for part in split.parts or (split,)
    )
    data = config.data.model_copy(update={"order": "documents", "packing": packing})
    return config.model_copy(update={"data": data})


def training_batches(config: Config, split: TokenSplit) -> TrainingBatches:
    """The batches that a run of `config` trains on; errors are those of `TrainingBatches`."""
    data = suited_to(split, config).data
    return TrainingBatches(
        split,
        data.order,
        packing=data.packing,
        seed=config.seed,
        batch_size=global_batch_size(config),
        context_length=config.model.context_length,
        weights=[source.weight for source in config.data.sources],
    )
