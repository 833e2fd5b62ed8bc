"""Which tokens a step sees: a pure function of (seed, step, global row); nothing is stored.

A window is context_length + 1 tokens: inputs, and targets one place later. Because each row of
the global batch is computed for itself, any division of rows over processes and micro-batches
sees the same data, and a resumed run continues in the middle of an epoch without any state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from pentameter import keyed
from pentameter.data.dataset import TokenSplit
from pentameter.errors import ConfigError

Int64 = npt.NDArray[np.int64]
IGNORED = -1  # as a target: not counted in the loss


@dataclass(frozen=True)
class Batch:
    """Rows of tokens and what follows each."""

    inputs: Int64
    """(B, T) token ids."""
    targets: Int64
    """(B, T): the token after each input; -1 where nothing is to be predicted."""
    rows: Int64
    """(B,) number of each row in the whole global batch (or evaluation pass)."""

    @property
    def n_targets(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED).sum())

    def hash(self) -> str:
        """sha256, in hex, of all three arrays."""
        digest = hashlib.sha256()
        for array in (self.inputs, self.targets, self.rows):
            digest.update(repr(array.shape).encode())
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        return digest.hexdigest()


def windows_per_epoch(n_tokens: int, context_length: int) -> int:
    """How many windows `shuffled` and `sequential` cut out of n_tokens, side by side.

    Neighbours share one token: the last target of one is the first input of the next. Up to
    context_length - 1 tokens at the end, too few for a window, are left over.
    """
    return max(n_tokens - 1, 0) // context_length


def training_batch(
    split: TokenSplit,
    order: str,
    *,
    seed: int,
    step: int,
    rows: Int64,
    batch_size: int,
    context_length: int,
) -> Batch:
    """The given rows of the global batch of a step.

    `rows` (B,) are numbers in 0 … batch_size - 1; `batch_size` counts the sequences of the whole
    step, over all devices. `order`:

    - `random`: every row's window starts at its own uniformly random token;
    - `shuffled`: windows side by side, all of them once an epoch in an order drawn anew for each
      epoch; steps run on across the end of an epoch;
    - `sequential`: the same windows in the order of the text, from the start again after the last.

    Raises ConfigError when the split is shorter than one window or the order unknown, ValueError
    for rows outside the batch.
    """
    if order not in ORDERS:
        raise ConfigError(f"data.order={order!r} is unknown; possible: {', '.join(ORDERS)}")
    _check_long_enough(split, context_length)
    rows = np.asarray(rows, dtype=np.int64)
    if rows.size and not 0 <= rows.min() <= rows.max() < batch_size:
        raise ValueError(f"rows must be in 0 … {batch_size - 1}, got {rows.min()} … {rows.max()}")
    starts = ORDERS[order](
        n_tokens=split.n_tokens,
        context_length=context_length,
        seed=seed,
        step=step,
        rows=rows,
        batch_size=batch_size,
    )
    windows = np.empty((len(rows), context_length + 1), dtype=np.int64)
    for window, start in zip(windows, starts.tolist(), strict=True):
        window[:] = split.tokens[start : start + context_length + 1]
    return Batch(windows[:, :-1].copy(), windows[:, 1:].copy(), rows)


def evaluation_batches(
    split: TokenSplit, *, context_length: int, batch_size: int
) -> Iterator[Batch]:
    """A pass over the whole split, each token but the first a target exactly once, in order.

    Rows are windows side by side; each is predicted from its own tokens only. The last row is
    padded: inputs 0, targets -1. All batches have batch_size rows but the last, which may have
    fewer. Raises ConfigError, at once, when the split has fewer than two tokens.
    """
    if split.n_tokens < 2:
        raise ConfigError(
            f"split {split.name!r} has {split.n_tokens} tokens; evaluation needs at least 2. "
            "Raise data.validation_fraction (test_fraction for test), or use a longer text"
        )
    return _evaluation_batches(split, context_length, batch_size)


def _evaluation_batches(split: TokenSplit, context_length: int, batch_size: int) -> Iterator[Batch]:
    n_rows = -(-(split.n_tokens - 1) // context_length)
    for first in range(0, n_rows, batch_size):
        rows = np.arange(first, min(first + batch_size, n_rows), dtype=np.int64)
        start = first * context_length
        tokens = split.tokens[start : start + len(rows) * context_length + 1]
        inputs = np.zeros(len(rows) * context_length, dtype=np.int64)
        targets = np.full(len(rows) * context_length, IGNORED, dtype=np.int64)
        n_targets = len(tokens) - 1
        inputs[:n_targets] = tokens[:-1]
        targets[:n_targets] = tokens[1:]
        shape = (len(rows), context_length)
        yield Batch(inputs.reshape(shape), targets.reshape(shape), rows)


def _check_long_enough(split: TokenSplit, context_length: int) -> None:
    if split.n_tokens <= context_length:
        longest = split.n_tokens - 1
        remedy = f", or model.context_length of at most {longest}" if longest > 0 else ""
        raise ConfigError(
            f"split {split.name!r} has {split.n_tokens} tokens, a training window of "
            f"model.context_length={context_length} needs {context_length + 1}; use a longer text, "
            f"a smaller data.validation_fraction{remedy}"
        )


def _random_starts(
    *, n_tokens: int, context_length: int, seed: int, step: int, rows: Int64, batch_size: int
) -> Int64:
    """Uniform over every place a window fits: 64 bits scaled to that many places.

    The bias of scaling is below n_tokens / 2^64.
    """
    key = keyed.make_key("batch", seed, step)
    places = n_tokens - context_length
    words = [
        keyed.bits(key, (2 * rows + half).astype(np.int32)).astype(np.int64) & 0xFFFFFFFF
        for half in (0, 1)
    ]
    # Python integers: the product has up to 128 bits.
    return np.array(
        [
            (((high << 32) | low) * places) >> 64
            for high, low in zip(words[0].tolist(), words[1].tolist(), strict=True)
        ],
        dtype=np.int64,
    )


def _shuffled_starts(
    *, n_tokens: int, context_length: int, seed: int, step: int, rows: Int64, batch_size: int
) -> Int64:
    n_windows = windows_per_epoch(n_tokens, context_length)
    epochs, places = np.divmod(step * batch_size + rows, n_windows)
    windows = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        key = keyed.make_key("epoch", seed, epoch)
        windows[here] = keyed.permute(key, n_windows, places[here])
    return windows * context_length


def _sequential_starts(
    *, n_tokens: int, context_length: int, seed: int, step: int, rows: Int64, batch_size: int
) -> Int64:
    n_windows = windows_per_epoch(n_tokens, context_length)
    return (step * batch_size + rows) % n_windows * context_length


ORDERS: Mapping[str, Callable[..., Int64]] = MappingProxyType(
    {
        "random": _random_starts,
        "shuffled": _shuffled_starts,
        "sequential": _sequential_starts,
    }
)
