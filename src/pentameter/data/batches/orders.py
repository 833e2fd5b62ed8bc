"""Orders of reading a training split: which tokens are in each row of the global batch.

An order is a pure function of (seed, step, row). A row is a list of spans (start, stop) in the
split, together at most context_length + 1 tokens; nearly always it is one span.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt

from pentameter import keyed
from pentameter.data.shards.dataset import TokenSplit
from pentameter.data.shards.token_stream import tokens_for
from pentameter.errors import ConfigError

Int64 = npt.NDArray[np.int64]
Row = list[tuple[int, int]]


@dataclass(eq=False)
class Order(ABC):
    """A reading order: chooses the tokens of `split` that each row in a step's global batch of
    `batch_size` rows holds, at most `context_length` + 1.

    `seed` is for orders that draw. In a mixture `source` is the data set's index, so that each data
    set draws other numbers.
    """

    split: TokenSplit
    _: KW_ONLY
    seed: int
    batch_size: int
    context_length: int
    source: int = 0

    def __post_init__(self) -> None:  # noqa: B027 - some orders take any split
        """Raise ConfigError if the split is too short for this order."""

    @property
    @abstractmethod
    def rows_per_epoch(self) -> int:
        """Number of batch rows in one pass over the split."""

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens in one pass over the split, including those at its end that fill no row."""
        return self.split.n_tokens

    @property
    def targets_per_epoch(self) -> int:
        """Targets that count in the loss in one pass over the split."""
        if self.split.assistant is not None:
            return self.split.assistant.n_tokens
        return min(self.split.n_tokens, self.rows_per_epoch * self.context_length)

    @property
    def target_fraction(self) -> float:
        """Positions in an epoch's rows whose target counts in the loss ÷ all positions."""
        return self.targets_per_epoch / (self.rows_per_epoch * self.context_length)

    @abstractmethod
    def rows(self, step: int, numbers: Int64) -> list[Row]:
        """Return the rows with the indices `numbers` (B,) in a step's global batch, each as a list
        of token spans (start, stop) in the split."""

    def _key(self, name: str, *numbers: int) -> keyed.Key:
        """Return the key for random numbers that `name` and `numbers` identify. Each data set of a
        mixture has other keys."""
        of_source = (self.source,) if self.source else ()  # as runs on one data set have it
        return keyed.make_key(name, self.seed, *numbers, *of_source)

    def _epochs(self, step: int, numbers: Int64) -> tuple[Int64, Int64]:
        """Return (epoch, index within that epoch), both (B,), for the rows with indices `numbers`
        (B,) in a step's global batch. A step may begin in one epoch and end in the next."""
        return np.divmod(step * self.batch_size + numbers, self.rows_per_epoch)

    def _permuted(self, step: int, numbers: Int64) -> Int64:
        """Return, for the rows with indices `numbers` (B,) in a step, permuted indices in 0 …
        rows_per_epoch - 1 (B,). Each index occurs once per epoch, in a new permutation for each
        epoch."""
        epochs, indices = self._epochs(step, numbers)
        chosen = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            selected = epochs == epoch
            key = self._key("epoch", epoch)
            chosen[selected] = keyed.permute(key, self.rows_per_epoch, indices[selected])
        return chosen


class Windows(Order):
    """Base class of orders whose rows are full windows of context_length + 1 tokens. Raises
    ConfigError if the split is too short for one."""

    def __post_init__(self) -> None:
        split, context_length = self.split, self.context_length
        if split.tokens.up_to(context_length + 1) <= context_length:
            longest = split.n_tokens - 1
            remedy = f", or model.context_length of at most {longest}" if longest > 0 else ""
            raise ConfigError(
                f"split {split.name!r} has {split.n_tokens} tokens, a training window of "
                f"model.context_length={context_length} needs {context_length + 1}; use a longer "
                f"text, a smaller data.validation_fraction{remedy}"
            )

    @property
    def rows_per_epoch(self) -> int:
        """Number of adjacent windows in the split.

        Neighbors share one token: a window's last target is the next one's first input. Up to
        context_length - 1 tokens at the end, too few for a window, are not read.
        """
        return (self.split.n_tokens - 1) // self.context_length

    @abstractmethod
    def starts(self, step: int, numbers: Int64) -> Int64:
        """Return the index in the split of the first token (B,) of each row with an index in
        `numbers` (B,) in a step's global batch."""

    def rows(self, step: int, numbers: Int64) -> list[Row]:
        """Return one span per row: a full window, context_length + 1 tokens."""
        width = self.context_length + 1
        return [[(start, start + width)] for start in self.starts(step, numbers).tolist()]


class Random(Windows):
    """Reading order in which each row is a window that starts at a token drawn uniformly at random,
    independently of all others."""

    def starts(self, step: int, numbers: Int64) -> Int64:
        """Return starts (B,) drawn uniformly among all possible ones: 64 random bits scaled to
        their number.

        The bias from scaling is below n_tokens / 2^64.
        """
        key = self._key("batch", step)
        n_starts = self.split.n_tokens - self.context_length
        words = [
            keyed.bits(key, (2 * numbers + half).astype(np.int32)).astype(np.int64) & 0xFFFFFFFF
            for half in (0, 1)
        ]
        # Python integers: the product has up to 128 bits.
        drawn = (
            (high << 32) | low for high, low in zip(*map(np.ndarray.tolist, words), strict=True)
        )
        return np.array([(each * n_starts) >> 64 for each in drawn], dtype=np.int64)


class Shuffled(Windows):
    """Reading order of adjacent windows, in which each comes once per epoch, in a new random order
    for each epoch."""

    def starts(self, step: int, numbers: Int64) -> Int64:
        """Return the index of each row's first token (B,): the start of its permuted window."""
        return self._permuted(step, numbers) * self.context_length


class Sequential(Windows):
    """Reading order of adjacent windows as they follow one another in the text, from its start
    again after its end."""

    def starts(self, step: int, numbers: Int64) -> Int64:
        """Return the index of each row's first token (B,); rows follow one another in the text."""
        return self._epochs(step, numbers)[1] * self.context_length


class Streamed(Windows):
    """Adjacent windows in blocks of about `BLOCK_TOKENS` tokens, permuted within each block.

    Reading a row needs no token after its block, so the rest of the text may still be tokenized
    meanwhile. The number of rows per epoch is known once the text has ended.
    """

    def starts(self, step: int, numbers: Int64) -> Int64:
        """Return the index of each row's first token (B,): the start of its permuted window. Waits
        until the windows' blocks are tokenized."""
        indices = step * self.batch_size + numbers
        # Rows of the blocks that have these; if the text has ended before, an epoch's.
        n_wanted = tokens_for(int(indices.max(initial=0)) + 1, self.context_length)
        n_rows = (self.split.tokens.up_to(n_wanted) - 1) // self.context_length
        epochs, indices = np.divmod(indices, n_rows)
        block_rows = (tokens_for(1, self.context_length) - 1) // self.context_length
        blocks, offsets = np.divmod(indices, block_rows)
        chosen = np.empty_like(indices)
        for epoch, block in np.unique(np.stack([epochs, blocks]), axis=1).T.tolist():
            selected = (epochs == epoch) & (blocks == block)
            first = block * block_rows
            key = self._key("block", epoch, block)
            size = min(block_rows, n_rows - first)
            chosen[selected] = first + keyed.permute(key, size, offsets[selected])
        return chosen * self.context_length


class Columns(Order):
    """The text split into batch_size equally long columns, one per batch row, read from top to
    bottom.

    Row r in step s is the s-th window in column r, so that a row continues its text from the step
    before ("bptt"). The last window in an epoch is shorter; up to batch_size - 1 tokens at the
    text's end belong to no column.
    """

    def __post_init__(self) -> None:
        n_tokens, n_columns = self.split.n_tokens, self.batch_size
        self._height = n_tokens // n_columns
        if self._height < 2:
            raise ConfigError(
                f"split {self.split.name!r} has {n_tokens} tokens; {n_columns} columns "
                f"(train.batch_size) of at least 2 need {2 * n_columns}: use a longer text or a "
                "smaller batch"
            )

    @property
    def rows_per_epoch(self) -> int:
        """Number of windows in all columns together."""
        return self.batch_size * -(-(self._height - 1) // self.context_length)

    def rows(self, step: int, numbers: Int64) -> list[Row]:
        """Return each row's window in its column, one span (start, stop) each; successive windows
        share one token."""
        top = step % (self.rows_per_epoch // self.batch_size) * self.context_length
        bottom = min(top + self.context_length + 1, self._height)
        firsts = (numbers * self._height).tolist()
        return [[(first + top, first + bottom)] for first in firsts]


class DocumentRows(Order):
    """Reading order with one document per batch row, permuted anew each epoch. A document longer
    than context_length + 1 tokens is truncated to its first ones.

    Left out are documents with a single token, as they predict nothing, and conversations whose
    first answer begins after the truncation.
    """

    def __post_init__(self) -> None:
        split, bounds = self.split, self.split.document_bounds
        is_row = np.diff(bounds) >= 2
        ends = np.minimum(bounds[1:], bounds[:-1] + self.context_length + 1)
        if split.assistant is not None:
            is_row &= split.assistant.count(bounds[:-1] + 1, ends) > 0
        self._starts = bounds[:-1][is_row]
        self._stops = ends[is_row]
        if not len(self._starts) and split.assistant is not None:
            raise ConfigError(
                f"split {split.name!r} has no answer within the first model.context_length="
                f"{self.context_length} tokens of a conversation ({len(bounds) - 1} "
                "conversations); there is nothing to learn: raise model.context_length, or shorten "
                "what stands before the answers"
            )
        if not len(self._starts):
            raise ConfigError(
                f"split {split.name!r} has no document of two tokens ({split.n_tokens} tokens in "
                f"{len(bounds) - 1} documents); there is nothing to predict"
            )

    @property
    def rows_per_epoch(self) -> int:
        """Number of documents that are not left out."""
        return len(self._starts)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens in one pass: documents are truncated to context_length + 1 tokens; those left out
        do not count."""
        return int((self._stops - self._starts).sum())

    @property
    def targets_per_epoch(self) -> int:
        """Targets in one pass that count in the loss: all tokens but each row's first, or of these
        only the assistant tokens."""
        if self.split.assistant is None:
            return self.tokens_per_epoch - self.rows_per_epoch
        return int(self.split.assistant.count(self._starts + 1, self._stops).sum())

    def rows(self, step: int, numbers: Int64) -> list[Row]:
        """Return one span per row: a document's first tokens."""
        chosen = self._permuted(step, numbers)
        starts, stops = self._starts[chosen].tolist(), self._stops[chosen].tolist()
        return [[span] for span in zip(starts, stops, strict=True)]


class PackedDocuments(Sequential):
    """Rows filled with whole documents, one after another, permuted anew each epoch.

    All documents in an epoch's order form one long text, which is read in adjacent windows.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bounds = self.split.document_bounds
        self._laid_out: tuple[int, Int64, Int64] | None = None  # of the epoch asked for last

    def rows(self, step: int, numbers: Int64) -> list[Row]:
        """Return, for each row, the documents' spans within its window in the epoch's text."""
        epochs, _ = self._epochs(step, numbers)
        starts = self.starts(step, numbers)
        return list(map(self._spans, epochs.tolist(), starts.tolist()))

    def _spans(self, epoch: int, start: int) -> Row:
        order, ends = self._layout(epoch)
        stop = start + self.context_length + 1
        row: Row = []
        number = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            document, end = int(order[number]), int(ends[number])
            n_tokens = min(stop, end) - start
            first = int(self._bounds[document + 1]) - (end - start)
            row.append((first, first + n_tokens))
            start, number = start + n_tokens, number + 1
        return [span for span in row if span[0] < span[1]]

    def _layout(self, epoch: int) -> tuple[Int64, Int64]:
        """Return (order, ends), both (n_documents,), for the text of an epoch, which is all
        documents one after another in a random order: the documents' indices in that order, and the
        token at which each one ends in that text."""
        if self._laid_out is None or self._laid_out[0] != epoch:
            n_documents = len(self._bounds) - 1
            key = self._key("epoch", epoch)
            order = keyed.permute(key, n_documents, np.arange(n_documents, dtype=np.int64))
            self._laid_out = (epoch, order, np.cumsum(np.diff(self._bounds)[order]))
        return self._laid_out[1:]


ORDERS: Mapping[str, type[Order]] = {
    "random": Random,
    "shuffled": Shuffled,
    "sequential": Sequential,
    "streamed": Streamed,
    "columns": Columns,
    "documents": DocumentRows,
}
