"""The batch for a step: a pure function of (seed, step, global row); nothing is stored.

A row is up to context_length + 1 tokens: inputs, and targets one token later, which count if the
loss mask has them. Each row in the global batch is computed by itself, so any division of rows over
processes and micro-batches sees the same data, and a resumed run continues in the middle of an
epoch without any state. `orders.py` chooses a row's tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.config.choices import ROWS_ARE_DOCUMENTS, look_up
from pentameter.config.schema import Config
from pentameter.data.batches.mixture import ROWS_AT_ONCE, Mixture, SourceRow
from pentameter.data.batches.orders import (
    ORDERS,
    DocumentRows,
    Order,
    PackedDocuments,
    Row,
    Streamed,
)
from pentameter.data.shards.dataset import TokenSplit
from pentameter.data.shards.token_stream import tokens_for
from pentameter.errors import ConfigError
from pentameter.planning.architecture import IGNORED_TARGET
from pentameter.planning.batch_sizes import global_batch_size
from pentameter.planning.layouts.layout import Layout
from pentameter.tree import Tree, leaves, map_leaves

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Inputs and targets with B rows: token ids and their successors; for a custom model a user's
    own data, any nested structure of arrays (B, …)."""

    inputs: Tree
    """(B, T) token ids."""
    targets: Tree
    """(B, T): the token after each input; -1 if it is not to be predicted."""
    rows: Int64
    """(B,) each row's index in the global batch (or evaluation pass)."""
    count: int | None = None
    """Number of targets that count in the loss; None if it is the number of targets that are not
    -1."""

    @property
    def n_targets(self) -> int:
        """Number of targets that count in the loss."""
        return int((self.targets != IGNORED_TARGET).sum()) if self.count is None else self.count

    def hash(self) -> str:
        """Return the sha256, in hex, over shapes and values of all arrays."""
        digest = hashlib.sha256()
        for array in (*leaves(self.inputs), *leaves(self.targets), self.rows):
            digest.update(repr(array.shape).encode())
            little = array.dtype.newbyteorder("<") if array.dtype.kind == "f" else "<i8"
            digest.update(np.ascontiguousarray(array, dtype=little).data)
        return digest.hexdigest()


def refuse_unknown_ids(ids: npt.NDArray[Any], least: int, vocab_size: int, whose: str) -> None:
    """Raise ConfigError, which begins with `whose`, unless all `ids` lie in `least` …
    vocab_size - 1. `least` is 0 for inputs, and IGNORED_TARGET for targets."""
    if ids.size and not least <= ids.min() <= ids.max() < vocab_size:
        remedy = f"; {least} is a target that does not count" if least else ""
        raise ConfigError(
            f"{whose} from {ids.min()} to {ids.max()}, outside {least} … {vocab_size - 1} "
            f"(model.vocab_size={vocab_size}){remedy}"
        )


def evaluation_rows(batch: Batch, layout: Layout, rank: int) -> Batch:
    """Return those rows of an evaluation batch that `rank` computes.

    Every rank gets the same number of rows: ⌈batch rows ÷ (batch shards × pipeline)⌉ × pipeline, so
    that a pipeline can run one micro-batch for each of its ranks. Where the batch has too few rows,
    copies of its first row with masked targets are added. Raises ConfigError if rows must be added
    and the targets are not integers, which cannot be masked.
    """
    n_parts = layout.n_batch_shards * layout.pipeline
    n_rows = -(-len(batch.rows) // n_parts) * layout.pipeline
    first = layout.data_index(rank) * n_rows
    rows = np.arange(first, first + n_rows, dtype=np.int64)
    is_missing = rows >= len(batch.rows)
    taken = np.where(is_missing, 0, rows)
    n_padded = layout.n_batch_shards * n_rows
    if n_padded > len(batch.rows) and any(
        array.dtype.kind not in "iu" for array in leaves(batch.targets)
    ):
        raise ConfigError(
            f"an evaluation of {len(batch.rows)} rows over {n_parts} parts takes rows that do not "
            f"count, and only integer targets can be {IGNORED_TARGET}; evaluate a multiple, "
            f"{n_padded} rows"
        )

    def targets_of(array: np.ndarray) -> np.ndarray:
        own: np.ndarray = array[taken]
        if own.dtype.kind == "u":  # of a user's labels: they have no -1
            own = own.astype(np.int64)
        own[is_missing] = IGNORED_TARGET
        return own

    inputs = map_leaves(itemgetter(taken), batch.inputs)
    return Batch(inputs, map_leaves(targets_of, batch.targets), rows)


MaskedTokens = tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]
"""Token ids (n,) and loss mask (n,); None if all tokens are learned."""


def padded_batch(tokens: Iterable[MaskedTokens], rows: Int64, context_length: int) -> Batch:
    """Build a Batch from the rows' tokens: for each, ids and loss mask, (n,) with n up to
    context_length + 1. `rows` (B,) has the rows' indices in the global batch.

    A short row is padded: inputs 0, targets -1. Targets outside the loss mask are -1, too.
    """
    inputs = np.zeros((len(rows), context_length), dtype=np.int64)
    targets = np.full((len(rows), context_length), IGNORED_TARGET, dtype=np.int64)
    for row, (ids, mask) in enumerate(tokens):
        n_targets = len(ids) - 1
        inputs[row, :n_targets] = ids[:-1]
        targets[row, :n_targets] = ids[1:]
        if mask is not None:
            targets[row, :n_targets][~mask[1:]] = IGNORED_TARGET
    return Batch(inputs, targets, rows)


def masked_tokens(split: TokenSplit, spans: Row) -> MaskedTokens:
    """Return the token ids and loss mask (None if all are learned) for a row, concatenated from its
    spans (start, stop) in the split."""
    ids = [split.tokens[start:stop] for start, stop in spans]
    joined = ids[0] if len(ids) == 1 else np.concatenate(ids)
    if split.assistant is None:
        return joined, None
    return joined, np.concatenate([split.assistant.mask(*span) for span in spans])


class TrainingBatches:
    """The batches of a training split. Each is a pure function of its step.

    order: the `data.order`, a key of `orders.ORDERS`.
    batch_size: rows in a step, over all devices.
    packing: with the order `documents`, fill rows with one document after another.
    weights: for a mixture, a split with several parts: one number for each part.
    own_keys: whether each part of a mixture draws with random keys of its own. False for runs begun
        by earlier versions, where parts of equal length were read in the same order.

    Raises ConfigError for a split that is too short, an unknown order, or one that does not suit
    the data.
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
        own_keys: bool = True,
    ) -> None:
        kind = look_up(ORDERS, order, "data.order", "training")
        if packing and kind is DocumentRows:
            kind = PackedDocuments
        are_documents = look_up(ROWS_ARE_DOCUMENTS, order, "data.order", "training")
        if split.assistant is not None and not are_documents:
            raise ConfigError(
                f"the data are conversations, which are read whole, and data.order={order!r} reads "
                "windows of a text; set data.order='documents' (with data.packing=true to fill "
                "rows with several)"
            )
        self.is_growing = any(part.beginning is not None for part in split.parts or (split,))
        """Whether the text is still being tokenized, so that its length is unknown."""
        if self.is_growing and kind is not Streamed:
            raise ConfigError(
                f"data.order={order!r} needs the whole text, and one was opened that is tokenized "
                "while it is read; set data.order='streamed', or leave the conversations beside it "
                "out"
            )
        self._batch_size, self._context_length = batch_size, context_length
        self.mixture: Mixture | None = None
        """Chooses the data set for each row, if the split has several parts; else None."""
        reading = partial(kind, seed=seed, context_length=context_length)
        if split.parts:
            orders = [
                reading(part, batch_size=ROWS_AT_ONCE, source=number if own_keys else 0)
                for number, part in enumerate(split.parts)
            ]
            self.mixture = Mixture(orders, weights, seed)
        else:
            orders = [reading(split, batch_size=batch_size)]
        self._orders = orders

    @property
    def _source(self) -> Mixture | Order:
        return self.mixture or self._orders[0]

    @property
    def rows_per_epoch(self) -> int | None:
        """Rows in one pass over the split; batches continue across its end. None while the text is
        still being tokenized."""
        return None if self.is_growing else self._source.rows_per_epoch

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens in one pass over the split: all, unless documents are truncated."""
        return self._source.tokens_per_epoch

    @property
    def target_fraction(self) -> float:
        """Positions in an epoch's rows whose target counts in the loss ÷ all positions. The other
        positions are padding, or tokens that are read but not learned."""
        return self._source.target_fraction

    @property
    def filled_fraction(self) -> float:
        """Tokens in an epoch's rows ÷ the rows' total length; the rest is padding."""
        n_rows = sum(order.rows_per_epoch for order in self._orders)
        n_tokens = sum(order.tokens_per_epoch for order in self._orders)
        return n_tokens / (n_rows * (self._context_length + 1))

    def prepare(self, n_steps: int) -> None:
        """Start tokenizing the text of the first `n_steps` steps in the background; return at once.
        Does nothing for text that is tokenized already."""
        n_rows = n_steps * self._batch_size
        counts = self.mixture.counts(n_rows) if self.mixture is not None else [n_rows]
        for order, count in zip(self._orders, counts, strict=True):
            if isinstance(order, Streamed):
                order.split.tokens.prepare(tokens_for(count, self._context_length))

    def batch(self, step: int, rows: Int64 | None = None) -> Batch:
        """Return the global batch for a step, or only its rows with indices `rows` (B,) in 0 …
        batch_size - 1.

        Raises ValueError for rows outside the batch.
        """
        size = self._batch_size
        rows = np.arange(size, dtype=np.int64) if rows is None else np.asarray(rows, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < size:
            raise ValueError(f"rows must be in 0 … {size - 1}, got {rows.min()} … {rows.max()}")
        tokens = (masked_tokens(each.split, each.row) for each in self.source_rows(step, rows))
        return padded_batch(tokens, rows, self._context_length)

    def source_rows(self, step: int, rows: Int64) -> list[SourceRow]:
        """Return the data set and the token spans for the rows with indices `rows` (B,) in a step's
        global batch."""
        if self.mixture is not None:
            return self.mixture.rows(step * self._batch_size + rows)
        (order,) = self._orders
        return [SourceRow(0, order.split, row) for row in order.rows(step, rows)]


def suited_to(split: TokenSplit, config: Config) -> Config:
    """Return `config` with a `data.order` that suits the split. It differs from the given one only
    if the split has conversations and the order reads fixed windows, which would cut them.

    Conversations are read whole, so the order becomes `documents`. They are also packed, several in
    a row, if every data set has more than context_length tokens and its conversations have at most
    context_length tokens on average. Without packing, short conversations would leave rows mostly
    padding; with it, longer ones could leave a row without an answer.
    """
    if split.assistant is None:
        return config
    if look_up(ROWS_ARE_DOCUMENTS, config.data.order, "data.order", "training"):
        return config
    context_length = config.model.context_length
    packing = all(
        context_length < part.n_tokens
        and (part.assistant is None or part.n_tokens <= context_length * len(part.document_starts))
        for part in split.parts or (split,)
    )
    return config.updated({"data.order": "documents", "data.packing": packing})


def training_batches(
    config: Config, split: TokenSplit, *, own_keys: bool = True
) -> TrainingBatches:
    """Return the batches that a run with this configuration trains on; `own_keys` as for
    TrainingBatches. Raises ConfigError if the split is too short or does not suit `data.order`."""
    data = suited_to(split, config).data
    return TrainingBatches(
        split,
        data.order,
        packing=data.packing,
        seed=config.seed,
        batch_size=global_batch_size(config),
        context_length=config.model.context_length,
        weights=[source.weight for source in config.data.sources],
        own_keys=own_keys,
    )
