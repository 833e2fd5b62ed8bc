"""Evaluation: one pass over a whole split, weighted by tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pentameter.config.choices import ROWS_ARE_DOCUMENTS, look_up
from pentameter.data.batches.batches import Batch
from pentameter.data.batches.dataset import TokenSplit
from pentameter.data.batches.windows import evaluation_batches
from pentameter.parallel.engine import Engine, LossSum
from pentameter.planning.plan import Plan

EVALUATION_TOKENS = 4096  # at least so many at once: short rows alone leave a machine idle


@dataclass(frozen=True)
class EvalMetrics:
    """A pass over a whole split."""

    step: int
    split: str
    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    seconds: float
    best: bool = False


def evaluate(
    engine: Engine,
    split: TokenSplit,
    *,
    name: str,
    step: int,
    batch_size: int,
    stride: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> EvalMetrics | None:
    """Loss, perplexity and bits per byte of `split`; None if `should_stop` said so half-way.

    Every target token counts once, so the figures do not depend on `batch_size`. Windows lie side
    by side, or overlap where a `stride` is given (see `evaluation_batches`); where training reads a
    document a row, so does evaluation.
    Bits per byte are nats per token ÷ ln 2 × tokens per UTF-8 byte of the split's text; they
    compare models with different tokenizers.
    """
    start = time.perf_counter()
    loss = LossSum(0.0, 0)
    for batch in _batches(engine, split, batch_size, stride):
        if should_stop():
            return None
        loss += engine.evaluate(batch)
    return EvalMetrics(
        step=step,
        split=name,
        loss=loss.mean,
        perplexity=perplexity(loss.mean),
        bits_per_byte=loss.mean / math.log(2) * len(split.tokens) / split.n_bytes,
        tokens=loss.n_targets,
        seconds=time.perf_counter() - start,
    )


def evaluation_batch_size(plan: Plan) -> int:
    """Rows of an evaluation batch during training: as many for each part of the data as a step's
    micro-batch has, or more where those are short."""
    own = max(plan.micro_batch_size, EVALUATION_TOKENS // plan.config.model.context_length)
    return plan.layout.data * own


def _batches(
    engine: Engine, split: TokenSplit, batch_size: int, stride: int | None
) -> Iterator[Batch]:
    config = engine.plan.config
    are_documents = look_up(ROWS_ARE_DOCUMENTS, config.data.order, "data.order", "evaluation")
    within_documents = are_documents and not config.data.packing
    return evaluation_batches(
        split,
        context_length=config.model.context_length,
        batch_size=batch_size,
        stride=stride,
        within_documents=within_documents,
    )


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
