"""A mixture of data sets: which one each batch row comes from, and the row's index in it.

Rows are numbered through all steps. In each block of `BLOCK_ROWS` rows, every data set has a fixed
number of rows, by its weight, in an order that is drawn anew for each block. So a row's data set,
and the number of earlier rows from the same data set, are pure functions of (seed, step, row). Each
data set is read in its own order, row after row, epoch after epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pentameter import keyed
from pentameter.data.batches.orders import Order, Row
from pentameter.data.shards.dataset import TokenSplit
from pentameter.errors import ConfigError

Int64 = npt.NDArray[np.int64]

BLOCK_ROWS = 4096
"""Rows per block, in which each data set has exactly its number of rows; weights are rounded to
multiples of one in so many."""

ROWS_AT_ONCE = 1 << 20
"""Batch size of each data set's order. Its steps are blocks of this many rows from the data set,
not the run's steps."""


@dataclass(frozen=True)
class SourceRow:
    """The source of the tokens in one batch row of a mixture: the data set's number, its `split`,
    and the token spans in it (`row`, a list of (start, stop))."""

    source: int
    """Index of the data set in `data.sources`; 0 for a single one."""
    split: TokenSplit
    row: Row


class Mixture:
    """Rows from several data sets, mixed by `weights`: `orders` has a reading order for each data
    set, and `seed` draws which data set each row comes from.

    The orders must have `ROWS_AT_ONCE` as batch size. Raises ConfigError for a weight too small for
    one row in a block.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], seed: int) -> None:
        self.orders, self._seed = list(orders), seed
        self._counts = np.array(apportion(weights, BLOCK_ROWS), dtype=np.int64)
        for weight, count in zip(weights, self._counts.tolist(), strict=True):
            if count == 0:
                raise ConfigError(
                    f"data.sources: weight={weight} is too small beside {max(weights)}: less than "
                    f"one row in {BLOCK_ROWS} would be its; raise it, or leave the source out"
                )
        self._block: tuple[int, Int64, Int64] | None = None  # asked for last

    @property
    def rows_per_epoch(self) -> int:
        """Rows after which every data set has been read at least once; some have been read more
        often by then."""
        return max(
            -(-order.rows_per_epoch * BLOCK_ROWS // count)
            for order, count in zip(self.orders, self._counts.tolist(), strict=True)
        )

    @property
    def tokens_per_epoch(self) -> int:
        """Distinct tokens in an epoch, over all data sets."""
        return sum(order.tokens_per_epoch for order in self.orders)

    @property
    def target_fraction(self) -> float:
        """Positions in rows whose target counts in the loss ÷ all positions."""
        fractions = [order.target_fraction for order in self.orders]
        return float(np.dot(fractions, self._counts)) / BLOCK_ROWS

    def counts(self, n_rows: int) -> list[int]:
        """Return, for each data set, an upper bound on how many of the run's first `n_rows` rows
        come from it: its rows in as many whole blocks (BLOCK_ROWS rows) as hold `n_rows`."""
        n_blocks = -(-n_rows // BLOCK_ROWS)
        return (n_blocks * self._counts).tolist()

    def passes(self, n_rows: int) -> list[float]:
        """Return, for each data set, how often it is read in the first `n_rows` rows of the run;
        1.5 means one and a half times."""
        return [
            n_rows * count / BLOCK_ROWS / order.rows_per_epoch
            for order, count in zip(self.orders, self._counts.tolist(), strict=True)
        ]

    def rows(self, numbers: Int64) -> list[SourceRow]:
        """Return the rows with indices `numbers` (B,), counted through all steps in the run, each
        as its data set and token spans."""
        sources, indices = self.assign(numbers)
        found: dict[int, SourceRow] = {}
        for source, order in enumerate(self.orders):
            selected = np.flatnonzero(sources == source)
            steps, rests = np.divmod(indices[selected], ROWS_AT_ONCE)
            for step in np.unique(steps).tolist():
                of_step = steps == step
                rows = order.rows(step, rests[of_step])
                for index, row in zip(selected[of_step].tolist(), rows, strict=True):
                    found[index] = SourceRow(source, order.split, row)
        return [found[index] for index in range(len(numbers))]

    def assign(self, numbers: Int64) -> tuple[Int64, Int64]:
        """For rows with the numbers `numbers` (B,), counted through all steps of the run, return
        (index of the data set, number of the row within that data set's own order), both (B,)."""
        sources, indices = np.empty_like(numbers), np.empty_like(numbers)
        blocks, offsets = np.divmod(numbers, BLOCK_ROWS)
        for block in np.unique(blocks).tolist():
            selected = blocks == block
            drawn, ordinals = self._drawn(block)
            sources[selected] = drawn[offsets[selected]]
            indices[selected] = block * self._counts[sources[selected]]
            indices[selected] += ordinals[offsets[selected]]
        return sources, indices

    def _drawn(self, block: int) -> tuple[Int64, Int64]:
        """Return, for each row in a block, its data set's index and how many earlier rows in the
        block have the same data set; (BLOCK_ROWS,) each."""
        if self._block is None or self._block[0] != block:
            key = keyed.make_key("blend", self._seed, block)
            slots = keyed.permute(key, BLOCK_ROWS, np.arange(BLOCK_ROWS, dtype=np.int64))
            drawn = np.repeat(np.arange(len(self._counts)), self._counts)[slots]
            in_order = np.argsort(drawn, kind="stable")  # those of the first data set, …
            firsts = np.cumsum(self._counts) - self._counts
            ordinals = np.empty_like(drawn)
            ordinals[in_order] = np.arange(BLOCK_ROWS) - firsts[drawn[in_order]]
            self._block = (block, drawn, ordinals)
        return self._block[1:]


def apportion(weights: Sequence[float], n_rows: int) -> list[int]:
    """Return whole numbers that are in proportion to `weights` and sum to `n_rows`, rounded by the
    method of largest remainders; one for each weight."""
    exact = [Fraction(weight) for weight in weights]
    quotas = [weight * n_rows / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for index in by_remainder[: n_rows - sum(counts)]:
        counts[index] += 1
    return counts
