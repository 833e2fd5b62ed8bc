"""Evaluation: one pass over a whole split, weighted by tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pentameter.data.batches import evaluation_batches
from pentameter.data.dataset import TokenSplit
from pentameter.parallel.assemble import LossSum, Stage
from pentameter.train.hooks import EvalMetrics


def evaluate(
    stage: Stage,
    split: TokenSplit,
    *,
    name: str,
    step: int,
    batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> EvalMetrics | None:
    """Loss, perplexity and bits per byte of `split`; None if `should_stop` said so half-way.

    Every target token counts once, so the figures do not depend on `batch_size`.
    Bits per byte are nats per token ÷ ln 2 × tokens per UTF-8 byte of the split's text; they
    compare models with different tokenizers.
    """
    start = time.perf_counter()
    context_length = stage.plan.config.model.context_length
    loss = LossSum(0.0, 0)
    for batch in evaluation_batches(split, context_length=context_length, batch_size=batch_size):
        if should_stop():
            return None
        loss += stage.evaluate(batch)
    return EvalMetrics(
        step=step,
        split=name,
        loss=loss.mean,
        perplexity=perplexity(loss.mean),
        bits_per_byte=loss.mean / math.log(2) * len(split.tokens) / split.n_bytes,
        tokens=loss.n_targets,
        seconds=time.perf_counter() - start,
    )


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
