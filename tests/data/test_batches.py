import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.batches.orders import ORDERS
from pentameter.data.batches.step import Batch, TrainingBatches, evaluation_rows
from pentameter.data.shards.dataset import TokenSequence, TokenSplit
from pentameter.errors import ConfigError
from pentameter.evaluate.split import evaluation_batches
from pentameter.planning.layouts.layout import Layout


def split_of(n_tokens, name="train"):
    """Tokens that name their own place."""
    tokens = np.arange(n_tokens, dtype="<u4")
    parts = [part for part in np.array_split(tokens, 3) if part.size] or [tokens]
    return TokenSplit(name, TokenSequence(parts, 0, n_tokens), n_tokens)


def batch_of(
    split, order, *, step=0, rows=None, batch_size=8, context_length=5, seed=0, packing=False
):
    batches = TrainingBatches(
        split,
        order,
        seed=seed,
        batch_size=batch_size,
        context_length=context_length,
        packing=packing,
    )
    return batches.batch(step, rows)


WINDOWS = ["random", "sequential", "shuffled"]


@given(
    st.sampled_from(sorted(ORDERS)),
    st.integers(16, 60),
    st.tuples(st.integers(0, 2**40), st.integers(0, 10**6)),
    st.permutations(range(8)),
    st.integers(0, 8),
)
def test_rows_are_the_same_however_they_are_divided(order, n_tokens, place, rows, cut):
    seed, step = place
    split = split_of(n_tokens)
    whole = batch_of(split, order, step=step, seed=seed)
    for part in (rows[:cut], rows[cut:]):
        batch = batch_of(split, order, step=step, seed=seed, rows=np.array(part, dtype=np.int64))
        np.testing.assert_array_equal(batch.inputs, whole.inputs[part])
        np.testing.assert_array_equal(batch.targets, whole.targets[part])
        assert batch.rows.tolist() == list(part)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))
def test_an_evaluation_batch_is_split_evenly_and_every_target_counts_once(n_rows, data, pipeline):
    layout = Layout(data=data, pipeline=pipeline)
    inputs = np.arange(2 * n_rows).reshape(n_rows, 2)
    whole = Batch(inputs, inputs + 1, np.arange(n_rows))
    ranks = [layout.rank_of(data=index) for index in range(data)]
    parts = [evaluation_rows(whole, layout, rank) for rank in ranks]
    (length,) = {len(part.rows) for part in parts}
    assert length % pipeline == 0
    assert length * data < n_rows + data * pipeline
    targets = np.concatenate([part.targets for part in parts])
    np.testing.assert_array_equal(targets[:n_rows], whole.targets)
    assert (targets[n_rows:] == -1).all()
    np.testing.assert_array_equal(np.concatenate([p.inputs for p in parts])[:n_rows], inputs)


def test_missing_rows_of_an_evaluation_need_integer_targets():
    whole = Batch(np.zeros((3, 2)), {"x": np.zeros((3, 2))}, np.arange(3))
    with pytest.raises(ConfigError, match=r"3 rows over 2 parts .* evaluate a multiple, 4 rows"):
        evaluation_rows(whole, Layout(data=2), 0)
    assert len(evaluation_rows(whole, Layout(data=3), 2).rows) == 1


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint64, np.int8])
def test_missing_rows_are_masked_whatever_integers_the_labels_are(kind):
    labels = np.array([[255 if kind != np.int8 else 7]] * 3, kind)
    batch = Batch(np.zeros((3, 1)), labels, np.arange(3))
    last = evaluation_rows(batch, Layout(data=2), 1)
    assert last.targets.tolist() == [labels[0].tolist(), [-1]]
    assert last.n_targets == 1


@pytest.mark.parametrize("order", WINDOWS)
def test_targets_follow_inputs(order):
    batch = batch_of(split_of(30), order, step=3)
    assert batch.inputs.shape == batch.targets.shape == (8, 5)
    assert batch.inputs.dtype == batch.targets.dtype == batch.rows.dtype == np.int64
    np.testing.assert_array_equal(batch.inputs + 1, batch.targets)
    assert np.diff(batch.inputs, axis=1).min() == np.diff(batch.inputs, axis=1).max() == 1


def window_starts(order, n_tokens, n_rows, batch_size, **options):
    split = split_of(n_tokens)
    batches = [
        batch_of(split, order, step=step, batch_size=batch_size, **options)
        for step in range(-(-n_rows // batch_size))
    ]
    return np.concatenate([batch.inputs[:, 0] for batch in batches])[:n_rows]


@given(st.integers(6, 80), st.integers(1, 9), st.integers(0, 99))
def test_shuffled_shows_every_window_once_an_epoch(n_tokens, batch_size, seed):
    n_windows = (n_tokens - 1) // 5
    starts = window_starts("shuffled", n_tokens, 3 * n_windows, batch_size, seed=seed)
    for epoch in range(3):
        of_epoch = starts[epoch * n_windows : (epoch + 1) * n_windows]
        assert sorted(of_epoch) == list(range(0, 5 * n_windows, 5))


def test_shuffled_draws_a_new_order_for_each_epoch_and_seed():
    first, second = window_starts("shuffled", 1001, 400, 7).reshape(2, 200).tolist()
    assert first != second != sorted(second)
    assert first != window_starts("shuffled", 1001, 200, 7, seed=1).tolist()


def test_sequential_goes_through_the_text_and_wraps():
    assert window_starts("sequential", 18, 7, 2).tolist() == [0, 5, 10, 0, 5, 10, 0]


def test_random_is_uniform_over_every_place():
    n_places = 16  # of 20 tokens, windows of 4 + 1
    starts = window_starts("random", 20, 16_000, 64, context_length=4)
    counts = np.bincount(starts, minlength=n_places)
    assert counts.size == n_places
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 37.7  # the 99.9 % point at 15 degrees of freedom


def test_batches_are_pinned():
    """A change of these hashes is a change of every run: it breaks resuming."""
    split = split_of(100_003)
    hashes = {
        order: hashlib.sha256(
            "".join(
                batch_of(
                    split, order, step=step, seed=1337, batch_size=64, context_length=32
                ).hash()
                for step in (0, 1, 77)
            ).encode()
        ).hexdigest()[:16]
        for order in WINDOWS
    }
    assert hashes == {
        "random": "64a9362bed916e1d",
        "sequential": "c7c481cb807bc2f7",
        "shuffled": "cb10f4897aced888",
    }


def test_the_hash_sees_every_array():
    arrays = np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3), np.arange(2)
    hashes = {Batch(*arrays).hash()}
    for number in range(3):
        changed = list(arrays)
        changed[number] = changed[number] + 1
        hashes.add(Batch(*changed).hash())
    hashes.add(Batch(arrays[0].reshape(3, 2), *arrays[1:]).hash())
    assert len(hashes) == 5


@given(st.integers(2, 60), st.integers(1, 9), st.integers(1, 4))
def test_evaluation_makes_every_token_but_the_first_a_target_once(n_tokens, length, batch_size):
    batches = list(
        evaluation_batches(split_of(n_tokens), context_length=length, batch_size=batch_size)
    )
    inputs = np.concatenate([batch.inputs for batch in batches]).ravel()
    targets = np.concatenate([batch.targets for batch in batches]).ravel()
    counted = targets >= 0
    assert targets[counted].tolist() == list(range(1, n_tokens))
    np.testing.assert_array_equal(inputs[counted] + 1, targets[counted])
    assert (targets[~counted] == -1).all()
    assert (inputs[~counted] == 0).all()
    assert {batch.inputs.shape for batch in batches[:-1]} <= {(batch_size, length)}
    assert [row for batch in batches for row in batch.rows] == list(range(targets.size // length))


@pytest.mark.parametrize("order", WINDOWS)
def test_a_split_shorter_than_a_window_is_refused_with_the_remedy(order):
    with pytest.raises(ConfigError, match=r"'train' has 5 tokens.* needs 6.* at most 4"):
        batch_of(split_of(5), order)
    assert batch_of(split_of(6), order).inputs.tolist() == [[0, 1, 2, 3, 4]] * 8


def test_wrong_calls_are_refused():
    with pytest.raises(ConfigError, match=r"data\.order='zigzag'"):
        batch_of(split_of(20), "zigzag")
    with pytest.raises(ValueError, match="rows must be in 0 … 7"):
        batch_of(split_of(20), "random", rows=[8])
    for n_tokens in (0, 1):
        with pytest.raises(ConfigError, match=f"'val' has {n_tokens} tokens"):
            evaluation_batches(split_of(n_tokens, "val"), context_length=4, batch_size=2)
