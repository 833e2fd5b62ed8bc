"""A blend: which of several data sets each row of the training is of, and which row of that one.

Rows are numbered through all steps. In each block of `BLOCK_ROWS` of them a data set has the same
number of rows, as its weight says, in an order that is drawn anew for each block. So the data set
of a row is a pure function of (seed, step, row); so is the number of its rows that came before,
and each data set is read in its own order, row after row, epoch after epoch.
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
"""Rows over which shares are exact; a weight is kept to one part in so many."""

ROWS_AT_ONCE = 1 << 20
"""The batch size of the orders that are blended: their steps have no meaning of their own."""


@dataclass(frozen=True)
class BlendedRow:
    """A row's data set and tokens."""

    split: TokenSplit
    row: Row


class Blend:
    """The rows of several orders, each of `ROWS_AT_ONCE` rows a step, blended by weights.

    Raises ConfigError for a weight so small that no row of a block is its.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], seed: int) -> None:
        self.orders, self._seed = list(orders), seed
        self._counts = np.array(shares(weights, BLOCK_ROWS), dtype=np.int64)
        for weight, count in zip(weights, self._counts.tolist(), strict=True):
            if count == 0:
                raise ConfigError(
                    f"data.sources: weight={weight} is too small beside {max(weights)}: less than "
                    f"one row in {BLOCK_ROWS} would be its; raise it, or leave the source out"
                )
        self._block: tuple[int, Int64, Int64] | None = None  # asked for last

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows after which every data set has been read whole, the others repeated."""
        return max(
            -(-order.rows_per_epoch * BLOCK_ROWS // count)
            for order, count in zip(self.orders, self._counts.tolist(), strict=True)
        )

    @property
    def tokens_per_epoch(self) -> int:
        """Number of distinct tokens that an epoch reads."""
        return sum(order.tokens_per_epoch for order in self.orders)

    @property
    def target_share(self) -> float:
        """Positions of rows whose target counts in the loss, ÷ all positions."""
        shares_of = [
            order.targets_per_epoch / (order.rows_per_epoch * order.context_length)
            for order in self.orders
        ]
        return float(np.dot(shares_of, self._counts)) / BLOCK_ROWS

    def passes(self, n_rows: int) -> list[float]:
        """Passes over each data set that so many rows of the blend make."""
        return [
            n_rows * count / BLOCK_ROWS / order.rows_per_epoch
            for order, count in zip(self.orders, self._counts.tolist(), strict=True)
        ]

    def rows(self, numbers: Int64) -> list[BlendedRow]:
        """The rows with these numbers (B,), counted through all steps."""
        sources, places = self.places(numbers)
        found: dict[int, BlendedRow] = {}
        for source, order in enumerate(self.orders):
            own = np.flatnonzero(sources == source)
            steps, rests = np.divmod(places[own], ROWS_AT_ONCE)
            for step in np.unique(steps).tolist():
                here = steps == step
                rows = order.rows(step, rests[here])
                for index, row in zip(own[here].tolist(), rows, strict=True):
                    found[index] = BlendedRow(order.split, row)
        return [found[index] for index in range(len(numbers))]

    def places(self, numbers: Int64) -> tuple[Int64, Int64]:
        """The data set of each row, and the row's number among that one's, both (B,)."""
        sources, places = np.empty_like(numbers), np.empty_like(numbers)
        blocks, offsets = np.divmod(numbers, BLOCK_ROWS)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            drawn, ordinals = self._drawn(block)
            sources[here] = drawn[offsets[here]]
            places[here] = block * self._counts[sources[here]] + ordinals[offsets[here]]
        return sources, places

    def _drawn(self, block: int) -> tuple[Int64, Int64]:
        """The data set of each row of a block, and how many rows of it come before in the block."""
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


def shares(weights: Sequence[float], n_rows: int) -> list[int]:
    """`n_rows` divided in proportion to weights, in whole numbers: by the largest remainders."""
    exact = [Fraction(weight) for weight in weights]
    quotas = [weight * n_rows / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for index in by_remainder[: n_rows - sum(counts)]:
        counts[index] += 1
    return counts
