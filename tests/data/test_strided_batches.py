"""Overlapping windows: each token a target once, with as much context as the stride promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.shards.dataset import TokenSequence, TokenSplit
from pentameter.errors import ConfigError
from pentameter.evaluate.split import evaluation_batches
from pentameter.planning.architecture import IGNORED_TARGET


def numbered_split(n_tokens, starts=(0,)):
    """A split whose tokens say where they stand."""
    tokens = TokenSequence([np.arange(n_tokens, dtype=np.uint32)], 0, n_tokens)
    return TokenSplit("val", tokens, n_tokens, np.array(starts, dtype=np.int64))


@given(
    n_tokens=st.integers(2, 60),
    context_length=st.integers(1, 12),
    batch_size=st.integers(1, 7),
    data=st.data(),
)
def test_every_token_counts_once_with_the_context_promised(
    n_tokens, context_length, batch_size, data
):
    stride = data.draw(st.integers(1, context_length))
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, n_tokens - 1), max_size=4)))]
    within = data.draw(st.booleans())
    begins = starts if within else [0]
    if len(begins) == n_tokens:  # documents of one token: nothing to predict
        starts, begins, within = [0], [0], False
    counted = []
    for batch in evaluation_batches(
        numbered_split(n_tokens, starts),
        context_length=context_length,
        stride=stride,
        batch_size=batch_size,
        within_documents=within,
    ):
        assert batch.inputs.shape == batch.targets.shape == (len(batch.rows), context_length)
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            for place in np.flatnonzero(targets != IGNORED_TARGET):
                target = int(targets[place])
                begin = max(start for start in begins if start < target)
                n_context = place + 1
                assert inputs[: place + 1].tolist() == list(range(target - n_context, target))
                assert n_context == target - begin or n_context > context_length - stride
                assert target - n_context >= begin
                counted.append(target)
    assert counted == [token for token in range(n_tokens) if token not in begins]


@pytest.mark.parametrize("within", [False, True])
def test_a_stride_of_the_whole_context_is_the_plain_pass(within):
    split = numbered_split(50, (0, 7, 8, 31))
    settings = {"context_length": 6, "batch_size": 4, "within_documents": within}
    plain = [batch.hash() for batch in evaluation_batches(split, **settings)]
    assert [batch.hash() for batch in evaluation_batches(split, stride=6, **settings)] == plain


def test_rows_are_numbered_over_the_whole_pass():
    batches = list(evaluation_batches(numbered_split(12), context_length=4, stride=2, batch_size=3))
    assert [batch.rows.tolist() for batch in batches] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("stride", [0, -1, 5])
def test_a_stride_outside_the_context_is_refused(stride):
    with pytest.raises(ConfigError, match=rf"stride={stride} must be in 1 … 4"):
        evaluation_batches(numbered_split(12), context_length=4, stride=stride, batch_size=3)


def test_a_split_of_one_token_is_refused():
    with pytest.raises(ConfigError, match="evaluation needs at least 2"):
        evaluation_batches(numbered_split(1), context_length=4, stride=2, batch_size=3)
