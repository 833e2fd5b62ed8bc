"""Evaluation: one pass over a split, in windows side by side or overlapping."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from pentameter.data.batches.batches import IGNORED, Batch, Int64
from pentameter.data.batches.dataset import TokenSplit
from pentameter.errors import ConfigError

Window = tuple[int, int, int]
"""First input, the place after the last target, and how many of the last targets count."""


def evaluation_batches(
    split: TokenSplit,
    *,
    context_length: int,
    batch_size: int,
    stride: int | None = None,
    within_documents: bool = False,
) -> Iterator[Batch]:
    """A pass over the whole split, each token but the first a target that counts exactly once.

    Windows of context_length inputs begin every `stride` tokens, side by side when it is absent.
    The first counts all its targets, each later one only those that the window before did not
    reach, so that each of them has more than context_length - stride tokens of context. A stride
    of 1 gives every token the whole context, at context_length times the work. `within_documents`
    starts anew at every document, whose first token is then no target.

    What does not count or is missing to a full row has target -1. All batches have batch_size rows
    but the last, which may have fewer. After "Perplexity of fixed-length models" in the
    documentation of Hugging Face's transformers, whose windows hold one target fewer: they begin
    with a token that is input only, ours end with one that is target only.

    Raises ConfigError, at once, for a stride outside 1 … context_length and a split that holds
    nothing to predict: fewer than two tokens, or no document of two.
    """
    stride = context_length if stride is None else stride
    if not 1 <= stride <= context_length:
        raise ConfigError(
            f"stride={stride} must be in 1 … {context_length}, the model's context_length: a "
            "larger one would skip tokens"
        )
    if split.n_tokens < 2:
        raise ConfigError(
            f"split {split.name!r} has {split.n_tokens} tokens; evaluation needs at least 2. "
            "Raise data.validation_fraction (test_fraction for test), or use a longer text"
        )
    starts = split.document_starts if within_documents else np.zeros(1, dtype=np.int64)
    if np.diff(starts, append=split.n_tokens).max() < 2:
        raise ConfigError(
            f"split {split.name!r} has no document of two tokens; there is nothing to predict"
        )
    windows = _windows(starts, split.n_tokens, context_length, stride)
    return _batches(split, windows, context_length, batch_size)


def _windows(starts: Int64, n_tokens: int, context_length: int, stride: int) -> Iterator[Window]:
    for number in range(len(starts)):
        start = int(starts[number])
        end = int(starts[number + 1]) if number + 1 < len(starts) else n_tokens
        reached = start + 1  # the next token that is yet to be a target that counts
        while reached < end:
            stop = min(start + context_length + 1, end)
            yield start, stop, stop - reached
            start, reached = start + stride, stop


def _batches(
    split: TokenSplit, windows: Iterator[Window], context_length: int, batch_size: int
) -> Iterator[Batch]:
    n_done = 0
    while rows := list(itertools.islice(windows, batch_size)):
        inputs = np.zeros((len(rows), context_length), dtype=np.int64)
        targets = np.full((len(rows), context_length), IGNORED, dtype=np.int64)
        for row, (start, stop, n_counted) in enumerate(rows):
            tokens = split.tokens[start:stop]
            n_targets = len(tokens) - 1
            inputs[row, :n_targets] = tokens[:-1]
            targets[row, n_targets - n_counted : n_targets] = tokens[len(tokens) - n_counted :]
        yield Batch(inputs, targets, np.arange(n_done, n_done + len(rows), dtype=np.int64))
        n_done += len(rows)
