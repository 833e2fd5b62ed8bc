"""Evaluation: loss in one pass over a whole split, in adjacent or overlapping windows."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator

import numpy as np

from pentameter.config.choices import ROWS_ARE_DOCUMENTS, look_up
from pentameter.config.data_schema import DataConfig
from pentameter.config.urls import shown_path
from pentameter.data.batches.step import Batch, Int64, masked_tokens, padded_batch
from pentameter.data.shards.dataset import Dataset, TokenSplit
from pentameter.data.shards.format import find_header
from pentameter.errors import ConfigError
from pentameter.evaluate.sampled_split import SampledSplit
from pentameter.parallel.engine import Engine, LossSum
from pentameter.planning.architecture import IGNORED_TARGET
from pentameter.planning.plan import Plan
from pentameter.record.events import EvalMetrics

EVALUATION_TOKENS = 4096  # at least so many at once: short rows alone leave a machine idle
GPU_EVALUATION_TOKENS = 32 * 1024


def evaluate(
    engine: Engine,
    evaluated: TokenSplit | SampledSplit,
    *,
    name: str,
    step: int,
    batch_size: int,
    stride: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> EvalMetrics | None:
    """Compute loss, perplexity and bits per byte over a split, or over a sample of its windows;
    return None if `should_stop`, which is called before each batch, ended it early.

    name, step: label the result. batch_size: batch rows per pass, over all ranks. stride: tokens
    from the beginning of one window to the next; None for context_length, the number of inputs of a
    window, so that windows are adjacent. A smaller stride makes them overlap. A sample has no
    other.

    Every target token counts once, so the figures do not depend on `batch_size`. No window crosses
    the end of a document if the split holds conversations, or if training reads one document per
    batch row (`data.order` documents, without packing). In conversations only assistant tokens
    count. Bits per byte are nats per token ÷ ln 2 × tokens per UTF-8 byte in the text of the whole
    split; they compare models with different tokenizers. Collective. Raises ConfigError for a
    stride outside 1 … context_length, or a split with nothing to predict.
    """
    start = time.perf_counter()
    loss = LossSum(0.0, 0)
    config = engine.plan.config
    context_length = config.model.context_length
    if isinstance(evaluated, SampledSplit):
        split = evaluated.split
        batches = _to_batches(split, evaluated.windows(), context_length, batch_size)
    else:
        split = evaluated
        batches = evaluation_batches(
            split,
            context_length=context_length,
            batch_size=batch_size,
            stride=stride,
            within_documents=ends_at_documents(split, config.data),
        )
    for batch in batches:
        if should_stop():
            return None
        loss += engine.evaluate(batch)
    mean = loss.mean
    return EvalMetrics(
        step=step,
        split=name,
        loss=mean,
        perplexity=perplexity(mean),
        bits_per_byte=mean / math.log(2) * split.tokens_per_byte,
        tokens=int(loss.n_targets),
        seconds=time.perf_counter() - start,
    )


def ends_at_documents(split: TokenSplit, data: DataConfig) -> bool:
    """Return True if no window of an evaluation crosses the end of a document: in conversations,
    and where training reads one document per batch row."""
    are_documents = look_up(ROWS_ARE_DOCUMENTS, data.order, "data.order", "evaluation")
    return split.assistant is not None or (are_documents and not data.packing)


def evaluation_batch_size(plan: Plan, row_length: int) -> int:
    """Return the number of batch rows, over all ranks, in an evaluation batch during training, for
    rows of `row_length` tokens. Each data-parallel rank gets as many as in a micro-batch, or 4,096
    ÷ `row_length`, rounded down, if that is more."""
    per_shard = max(plan.micro_batch_size, EVALUATION_TOKENS // row_length)
    return plan.layout.n_batch_shards * per_shard


def rows_at_once(device: str, row_length: int) -> int:
    """Return the number of rows of `row_length` tokens at once in an evaluation outside training:
    32, and on a `device` "cuda" at least 32,768 tokens, as a GPU is as fast with one short row as
    with many."""
    return max(32, GPU_EVALUATION_TOKENS // row_length) if device == "cuda" else 32


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


Window = tuple[int, int, int]
"""(Position of the first input, end of the last target, number of targets that count, which are the
last ones). Positions count tokens in the split."""


def evaluation_batches(
    split: TokenSplit,
    *,
    context_length: int,
    batch_size: int,
    stride: int | None = None,
    within_documents: bool = False,
) -> Iterator[Batch]:
    """Yield batches that cover the whole split, each token but the first a counted target exactly
    once (in conversations, each assistant token).

    Windows with context_length inputs begin every `stride` tokens, context_length by default. The
    first counts all its targets, each later one only those beyond the previous window, so that each
    has more than context_length - stride tokens before it. A stride of 1 gives every token the
    whole context, at context_length times the work. `within_documents` starts anew at every
    document, whose first token is then no target.

    Targets that do not count, and padding, are -1. All batches have `batch_size` rows, the last
    perhaps fewer. After "Perplexity of fixed-length models" in the documentation of Hugging Face's
    transformers, whose windows hold one target fewer: they begin with a token that is input only,
    ours end with one that is target only.

    Raises ConfigError, at once, for a stride outside 1 … context_length and a split with nothing to
    predict: fewer than two tokens, or no document with two.
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
    return _to_batches(split, windows, context_length, batch_size)


def _windows(starts: Int64, n_tokens: int, context_length: int, stride: int) -> Iterator[Window]:
    """Yield windows document by document, every `stride` tokens within a document. `starts` has the
    index of each document's first token."""
    for number in range(len(starts)):
        start = int(starts[number])
        end = int(starts[number + 1]) if number + 1 < len(starts) else n_tokens
        reached = start + 1  # the next token that is yet to be a target that counts
        while reached < end:
            stop = min(start + context_length + 1, end)
            yield start, stop, stop - reached
            start, reached = start + stride, stop


def _to_batches(
    split: TokenSplit, windows: Iterator[Window], context_length: int, batch_size: int
) -> Iterator[Batch]:
    """Yield the windows' tokens as batches with `batch_size` rows, the last with the remainder;
    targets that a window does not count become -1."""
    n_done = 0
    while rows := list(itertools.islice(windows, batch_size)):
        tokens = (masked_tokens(split, [(start, stop)]) for start, stop, _ in rows)
        numbers = np.arange(n_done, n_done + len(rows), dtype=np.int64)
        batch = padded_batch(tokens, numbers, context_length)
        for row, (start, stop, n_counted) in enumerate(rows):
            if n_counted < stop - start - 1:
                batch.targets[row, : stop - start - 1 - n_counted] = IGNORED_TARGET
        yield batch
        n_done += len(rows)


def what_was_read(data: DataConfig, dataset: Dataset, split: str) -> tuple[dict[str, int], str]:
    """Return the sizes of what an evaluation reads, for `--json`: `split_tokens`, the split's, and
    `text_tokens`, those of the text from which it was cut. The second result is a line for people
    about both."""
    files = {"val": data.validation_path, "test": data.test_path}
    n_tokens = {name: dataset.split(name).n_tokens for name in ("train", "val", "test")}
    n_split = n_tokens[split]
    if (file := files.get(split)) is not None:
        return {"split_tokens": n_split}, f"the {split} split is {shown_path(file)}: all of it"
    whole = sum(n for name, n in n_tokens.items() if files.get(name) is None)
    said = f"the {split} split is {n_split:,} of the {whole:,} tokens of {data.shown}"
    if n_split == whole:
        said = f"the {split} split is all {whole:,} tokens of {data.shown}"
    elif data.path is not None and find_header(data.path) is None and data.order != "streamed":
        fractions = [
            f" --data.{key.replace('_', '-')} 0"
            for key in ("validation_fraction", "test_fraction")
            if getattr(data, key) > 0
        ]
        said += f"; all of it: --split train{''.join(fractions)}"
    return {"split_tokens": n_split, "text_tokens": whole}, said
