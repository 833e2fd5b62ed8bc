"""Columns and documents: every token where it belongs, padding where nothing is to be predicted."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.batches.step import TrainingBatches
from pentameter.data.shards.dataset import AssistantRanges, TokenSequence, TokenSplit
from pentameter.errors import ConfigError
from pentameter.evaluate.split import evaluation_batches


def documents_of(lengths):
    """Documents whose tokens name their place in the split."""
    n_tokens = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = TokenSequence([np.arange(n_tokens, dtype="<u4")], 0, n_tokens)
    return TokenSplit("train", tokens, n_tokens, starts)


def batches_of(split, order, *, batch_size=4, context_length=5, seed=0, packing=False):
    return TrainingBatches(
        split,
        order,
        seed=seed,
        batch_size=batch_size,
        context_length=context_length,
        packing=packing,
    )


def pairs(batch):
    """(input, target) of every place that counts."""
    counted = batch.targets >= 0
    return list(zip(batch.inputs[counted].tolist(), batch.targets[counted].tolist(), strict=True))


@given(st.integers(8, 200), st.integers(1, 4), st.integers(1, 9))
def test_columns_show_each_column_once_an_epoch_in_order(n_tokens, batch_size, context_length):
    batches = batches_of(
        documents_of([n_tokens]), "columns", batch_size=batch_size, context_length=context_length
    )
    height = n_tokens // batch_size
    n_steps = batches.rows_per_epoch // batch_size
    assert n_steps * batch_size == batches.rows_per_epoch
    for epoch in range(2):
        shown = [batches.batch(epoch * n_steps + step) for step in range(n_steps)]
        for column in range(batch_size):
            targets = np.concatenate([batch.targets[column] for batch in shown])
            first = column * height
            assert targets[targets >= 0].tolist() == list(range(first + 1, first + height))
        assert all(b.n_targets == batch_size * context_length for b in shown[:-1])


def test_columns_need_two_tokens_each():
    with pytest.raises(ConfigError, match=r"'train' has 7 tokens; 4 columns .* need 8"):
        batches_of(documents_of([7]), "columns")


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(0, 9))
def test_a_document_a_row_once_an_epoch(lengths, seed):
    split = documents_of([*lengths, 3])
    batches = batches_of(split, "documents", batch_size=1, seed=seed)
    n_documents = sum(n >= 2 for n in lengths) + 1  # a single token predicts nothing
    assert batches.rows_per_epoch == n_documents
    for epoch in range(2):
        shown = [batches.batch(epoch * n_documents + step) for step in range(n_documents)]
        rows = sorted(pair for batch in shown for pair in pairs(batch))
        expected = []
        for start, n in zip(split.document_starts, [*lengths, 3], strict=True):
            expected += [(start + i, start + i + 1) for i in range(min(n - 1, 5))]
        assert rows == expected
        assert all((batch.inputs[batch.targets < 0] == 0).all() for batch in shown)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(0, 9))
def test_packing_fills_rows_with_whole_documents_and_drops_nothing(lengths, seed):
    split = documents_of([*lengths, 6])
    batches = batches_of(split, "documents", batch_size=1, seed=seed, packing=True)
    n_rows = batches.rows_per_epoch
    assert n_rows == (split.n_tokens - 1) // 5
    for epoch in range(2):
        rows = [batches.batch(epoch * n_rows + step) for step in range(n_rows)]
        assert all(batch.n_targets == 5 for batch in rows)
        text = np.concatenate([rows[0].inputs[0, :1], *(batch.targets[0] for batch in rows)])
        assert len(set(text.tolist())) == len(text)  # every token once, but those of the tail
        assert len(text) == 5 * n_rows + 1
        starts = set(split.document_starts.tolist())
        ends = {start - 1 for start in starts} | {split.n_tokens - 1}
        for here, after in zip(text.tolist(), text.tolist()[1:], strict=False):
            assert after == here + 1 or (here in ends and after in starts)


def test_epochs_and_seeds_permute_documents_differently():
    split = documents_of([2] * 100)

    def order(packing, seed, epoch):
        batches = batches_of(split, "documents", batch_size=10, seed=seed, packing=packing)
        first = epoch * (batches.rows_per_epoch // 10)
        return [batches.batch(first + step).inputs.tolist() for step in range(3)]

    for packing in (False, True):
        orders = [order(packing, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
        assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


@pytest.mark.parametrize(("order", "packing"), [("documents", True), ("columns", False)])
def test_rows_are_the_same_however_they_are_divided(order, packing):
    batches = batches_of(documents_of([3, 9, 1, 14, 6]), order, packing=packing)
    for step in range(9):
        whole = batches.batch(step)
        for row in range(4):
            one = batches.batch(step, np.array([row]))
            np.testing.assert_array_equal(one.inputs[0], whole.inputs[row])
            np.testing.assert_array_equal(one.targets[0], whole.targets[row])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 4))
def test_evaluation_within_documents_never_crosses_one(lengths, batch_size):
    split = documents_of([*lengths, 3])
    batches = list(
        evaluation_batches(split, context_length=5, batch_size=batch_size, within_documents=True)
    )
    starts = set(split.document_starts.tolist())
    targets = sorted(target for batch in batches for _, target in pairs(batch))
    assert targets == [token for token in range(split.n_tokens) if token not in starts]
    assert all(b == a + 1 for batch in batches for a, b in pairs(batch))


def test_documents_of_one_token_are_no_rows():
    with pytest.raises(ConfigError, match="no document of two tokens"):
        batches_of(documents_of([1, 1, 1]), "documents")
    for stride in (None, 2):
        with pytest.raises(ConfigError, match="no document of two tokens"):
            evaluation_batches(
                documents_of([1, 1, 1]),
                context_length=5,
                batch_size=2,
                stride=stride,
                within_documents=True,
            )


def test_answers_beyond_the_context_are_refused_with_the_way_out():
    answers = AssistantRanges(np.array([[8, 10], [18, 20]]), n_tokens=4, n_bytes=4)
    split = dataclasses.replace(documents_of([10, 10]), assistant=answers)
    with pytest.raises(ConfigError, match=r"context_length=5 .*: raise model\.context_length"):
        batches_of(split, "documents")
