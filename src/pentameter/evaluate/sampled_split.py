"""A fixed sample of a split's windows, on which a long run is evaluated between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pentameter.data.batches.step import Int64
from pentameter.data.shards.dataset import TokenSplit
from pentameter.keyed import make_key, permute

_LEAST_DRAWN = 1024
"""Fewest windows that are drawn at once."""


@dataclass(frozen=True, eq=False)
class SampledSplit:
    """Some windows of a split. A frozen record."""

    split: TokenSplit
    bounds: Int64
    """(n, 2): first input of each window and end of its last target, as positions in the split, by
    position."""
    n_targets: int
    """Target tokens in the windows that count in the loss."""

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first input, end of the last target, number of targets) of each window."""
        for start, stop in self.bounds.tolist():
            yield start, stop, stop - start - 1


def sampled_split(
    split: TokenSplit, *, context_length: int, n_targets: int, within_documents: bool
) -> SampledSplit | None:
    """Return the fewest windows, in a random order, whose targets that count in the loss are
    `n_targets` or more; None if the split has no more than that.

    The windows are those of a pass over the whole split, `context_length` inputs each, and in
    conversations those with an assistant's token. The order depends on nothing but their number: it
    is the same for every seed, so that runs which differ in it are evaluated on the same text.

    within_documents: windows begin anew at every document.
    """
    starts = np.zeros(1, dtype=np.int64)
    if within_documents:
        starts = np.asarray(split.document_starts, dtype=np.int64)
    ends = np.append(starts[1:], split.n_tokens)
    last = np.cumsum(np.maximum(-(-(ends - starts - 1) // context_length), 0))
    n_windows = int(last[-1]) if len(last) else 0
    key = make_key("validation sample", n_windows)
    found: list[Int64] = []
    n_found, n_drawn = 0, 0
    while n_drawn < n_windows:
        stop = min(n_windows, n_drawn + max(_LEAST_DRAWN, -(-n_targets // context_length)))
        drawn = permute(key, n_windows, np.arange(n_drawn, stop, dtype=np.int64))
        document = np.searchsorted(last, drawn, side="right")
        within = drawn - np.append(0, last)[document]
        first = starts[document] + within * context_length
        end = np.minimum(first + context_length + 1, ends[document])
        counted = end - first - 1
        if split.assistant is not None:
            counted = split.assistant.count(first + 1, end)
        reached = n_found + np.cumsum(counted)
        n_taken = int(np.searchsorted(reached, n_targets)) + 1
        chosen = np.stack([first, end], axis=1)[:n_taken][counted[:n_taken] > 0]
        found.append(chosen)
        if n_taken <= len(drawn):
            bounds = np.concatenate(found)
            if n_drawn + n_taken == n_windows:
                return None
            return SampledSplit(split, bounds[np.argsort(bounds[:, 0])], int(reached[n_taken - 1]))
        n_found, n_drawn = int(reached[-1]), stop
    return None
