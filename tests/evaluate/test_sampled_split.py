"""A sample of a split's windows: as many as asked for, of those of a whole pass, the same ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pentameter.config.schema import Config
from pentameter.data.shards.dataset import AssistantRanges, TokenSequence, TokenSplit
from pentameter.evaluate.sampled_split import sampled_split
from pentameter.evaluate.split import evaluate, evaluation_batches
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan

CONTEXT, VOCABULARY, N_TOKENS = 8, 11, 8 * 70 + 4


def stage():
    model = {"vocab_size": VOCABULARY, "context_length": CONTEXT, "n_layers": 1, "n_heads": 2}
    config = Config.model_validate(
        {
            "model": {**model, "d_model": 16, "init_std": 0.5},
            "data": {"corpus": "grammar"},
            "train": {"steps": 1, "batch_size": 1},
        }
    )
    return assemble(make_plan(config), torch.device("cpu"), "fp64", compiled=False)


def split(n_tokens=N_TOKENS, starts=(0,)):
    ids = np.random.default_rng(5).integers(0, VOCABULARY, n_tokens).astype(np.uint16)
    tokens = TokenSequence([ids], 0, n_tokens)
    return TokenSplit("val", tokens, 3 * n_tokens, np.array(starts, dtype=np.int64))


def sample(of, n_targets, *, context_length=CONTEXT, within_documents=False):
    return sampled_split(
        of,
        context_length=context_length,
        n_targets=n_targets,
        within_documents=within_documents,
    )


def windows_of(of, **options):
    """The windows of a pass over the whole split, by what is read of them."""
    found = set()
    for batch in evaluation_batches(of, context_length=CONTEXT, batch_size=5, **options):
        found |= {tuple(row) for row in batch.inputs.tolist()}
    return found


@pytest.mark.parametrize("within_documents", [False, True])
def test_its_windows_are_those_of_the_whole_pass(within_documents):
    whole = split(starts=(0, 3, 4, 30, 31, 200))
    found = sample(whole, 100, within_documents=within_documents)
    assert found is not None
    all_windows = windows_of(whole, within_documents=within_documents)
    read = [tuple(whole.tokens[start : stop - 1].tolist()) for start, stop, _ in found.windows()]
    assert all(any(window[: len(row)] == row for window in all_windows) for row in read)
    starts = found.bounds[:, 0]
    assert (np.diff(starts) > 0).all()
    assert found.n_targets == sum(n for _, _, n in found.windows())
    assert 100 <= found.n_targets < 108


def test_it_is_the_same_every_time_and_spread_over_the_split():
    whole = split(100_000)
    found = sample(whole, 4000)
    assert np.array_equal(found.bounds, sample(whole, 4000).bounds)
    quarters = np.histogram(found.bounds[:, 0], bins=4, range=(0, 100_000))[0]
    assert quarters.min() > 80  # of 125 each
    larger = {tuple(each) for each in sample(whole, 8000).bounds.tolist()}
    assert {tuple(each) for each in found.bounds.tolist()} < larger


def test_no_sample_is_as_large_as_the_split():
    whole = split()
    assert sample(whole, N_TOKENS - 1) is None
    assert sample(whole, 10 * N_TOKENS) is None
    assert sample(whole, N_TOKENS - 20) is not None


def test_in_conversations_answers_are_counted_and_windows_without_one_left_out():
    n_tokens = 4000
    ids = np.random.default_rng(5).integers(0, VOCABULARY, n_tokens).astype(np.uint16)
    bounds = np.array([[start + 2, start + 5] for start in range(0, n_tokens, 40)], dtype=np.int64)
    answers = AssistantRanges(bounds, 3 * len(bounds), 3 * len(bounds))
    starts = np.arange(0, n_tokens, 40, dtype=np.int64)
    chat = TokenSplit("val", TokenSequence([ids], 0, n_tokens), n_tokens, starts, answers)
    found = sample(chat, 30, within_documents=True)
    assert found is not None
    assert found.n_targets == 30
    assert len(found.bounds) == 10
    for start, stop, _ in found.windows():
        assert start % 40 == 0
        assert answers.mask(start + 1, stop).sum() == 3
    metrics = evaluate(stage(), found, name="val-sample", step=0, batch_size=4)
    assert metrics.tokens == 30


def test_its_loss_is_the_mean_over_its_windows():
    model, whole = stage(), split()
    found = sample(whole, 200)
    metrics = evaluate(model, found, name="val-sample", step=3, batch_size=4)
    assert (metrics.split, metrics.step, metrics.tokens) == ("val-sample", 3, found.n_targets)
    total = 0.0
    for start, stop, n in found.windows():
        tokens = TokenSequence([whole.tokens[start:stop]], 0, stop - start)
        one = TokenSplit("one", tokens, 1)
        total += n * evaluate(model, one, name="one", step=0, batch_size=1).loss
    assert metrics.loss == pytest.approx(total / metrics.tokens, rel=1e-12)  # of another order
