import math

import numpy as np
import pytest
import torch

from pentameter.config.schema import ModelConfig
from pentameter.model.dropout import (
    AttentionDropout,
    Numbers,
    StreamDropout,
    dropout_keys,
    keep_mask,
    weight_index,
)

CONFIG = ModelConfig(vocab_size=5, context_length=16, n_layers=2, n_heads=2, d_model=8)


def test_keys_have_one_site_for_the_embedding_and_three_a_layer() -> None:
    keys = dropout_keys(CONFIG, seed=1, step=2, rows=range(4))
    assert keys.shape == (4, 7, 2)
    assert keys.dtype == torch.int32
    assert len({tuple(key) for key in keys.reshape(-1, 2).tolist()}) == 28


def test_keys_follow_the_global_row_seed_and_step() -> None:
    keys = dropout_keys(CONFIG, 1, 2, [0, 1, 2, 3])
    assert torch.equal(dropout_keys(CONFIG, 1, 2, np.array([3, 1])), keys[[3, 1]])
    assert torch.equal(dropout_keys(CONFIG, 1, 2, torch.tensor([2])), keys[[2]])
    for other in (dropout_keys(CONFIG, 2, 2, range(4)), dropout_keys(CONFIG, 1, 3, range(4))):
        assert not (other == keys).all(dim=-1).any()


def test_masks_follow_the_row_not_its_place_in_the_batch() -> None:
    dropout = StreamDropout(site=3, p=0.5, context_length=16)
    x = torch.ones(4, 16, 8)
    whole = dropout(x, dropout_keys(CONFIG, 1, 2, [0, 1, 2, 3]), torch.arange(16))
    few = dropout(x[:2], dropout_keys(CONFIG, 1, 2, [2, 1]), torch.arange(16))
    assert torch.equal(few, whole[[2, 1]])
    assert len({tuple(row.flatten().tolist()) for row in whole}) == 4


@pytest.mark.parametrize("positions", [range(5, 12), [0, 1, 14, 15], [9]])
def test_any_positions_of_the_stream_get_their_part_of_the_mask(positions) -> None:
    dropout = StreamDropout(site=3, p=0.5, context_length=16)
    keys = dropout_keys(CONFIG, 1, 2, [0, 1])
    whole = dropout(torch.ones(2, 16, 8), keys, torch.arange(16))
    part = dropout(torch.ones(2, len(positions), 8), keys, torch.tensor(positions))
    assert torch.equal(part, whole[:, list(positions)])


def test_a_part_of_the_attention_gets_its_part_of_the_mask() -> None:
    dropout = AttentionDropout(site=1, p=0.5, context_length=16)
    keys = dropout_keys(CONFIG, 1, 2, [0, 1])
    times = torch.arange(16)
    whole = dropout.acting(keys)(torch.ones(2, 4, 16, 16), times, times)
    part = dropout.acting(keys)(torch.ones(2, 4, 3, 7), times[4:7], times[2:9])
    assert torch.equal(part, whole[:, :, 4:7, 2:9])
    uneven = torch.tensor([1, 3, 12])
    part = dropout.acting(keys)(torch.ones(2, 4, 3, 16), uneven, times)
    assert torch.equal(part, whole[:, :, [1, 3, 12]])
    dropout.head_offset = 1
    part = dropout.acting(keys)(torch.ones(2, 2, 5, 5), times[3:8], times[3:8])
    assert torch.equal(part, whole[:, 1:3, 3:8, 3:8])


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9])
def test_the_share_dropped_is_p_and_the_mean_stays(p: float) -> None:
    dropout = StreamDropout(site=0, p=p, context_length=64)
    y = dropout(torch.ones(8, 64, 512), dropout_keys(CONFIG, 0, 0, range(8)), torch.arange(64))
    n = y.numel()
    assert abs((y == 0).float().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))


def test_the_threshold_is_exact_at_its_ends() -> None:
    keys = torch.zeros(1, 2, dtype=torch.int32)
    numbers = Numbers(torch.arange(1000, dtype=torch.int32))
    assert keep_mask(keys, numbers, 0.0).all()
    assert not keep_mask(keys, numbers, 1 - 2**-32).any()


def test_nothing_is_dropped_in_evaluation_without_keys_or_at_p_0() -> None:
    x = torch.ones(2, 16, 8)
    keys = dropout_keys(CONFIG, 0, 0, range(2))
    times = torch.arange(16)
    assert StreamDropout(0, 0.5, 16)(x, None, times) is x
    assert StreamDropout(0, 0.5, 16).eval()(x, keys, times) is x
    assert StreamDropout(0, 0.0, 16)(x, keys, times) is x


def test_sites_and_steps_are_independent() -> None:
    x, times = torch.ones(4, 16, 512), torch.arange(16)
    sigmas = []
    for seed in range(20):
        masks = [
            StreamDropout(site, 0.2, 16)(x, dropout_keys(CONFIG, seed, step, range(4)), times) != 0
            for site in (0, 1, 2)
            for step in (0, 1)
        ]
        z = torch.stack([(mask.double() - 0.8).flatten() / 0.4 for mask in masks])
        sigmas.append((z @ z.T / math.sqrt(x.numel()))[tuple(torch.triu_indices(6, 6, 1))])
    correlations = torch.cat(sigmas)  # 300 of N(0, 1), if masks have nothing in common
    assert correlations.abs().max() < 5
    assert abs(correlations.mean()) * math.sqrt(300) < 4
    assert 0.8 < correlations.std() < 1.2


def test_compiled_masks_are_the_eager_ones() -> None:
    stream, weights = StreamDropout(3, 0.2, 40), AttentionDropout(4, 0.3, 40)
    weights.head_offset = 1

    def masks(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        times = torch.arange(37)
        return (
            stream(torch.ones(3, 33, 51), keys, times[2:35]) != 0,
            weights.acting(keys)(torch.ones(3, 2, 33, 37), times[1:34], times) != 0,
        )

    compiled = torch.compile(masks, dynamic=False, fullgraph=True)
    for step in range(2):
        keys = dropout_keys(CONFIG, 0, step, range(3))
        for ours, expected in zip(compiled(keys), masks(keys), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("context_length", [16_384, 65_536, 100_000])
def test_no_two_heads_or_queries_share_a_mask_where_numbers_exceed_a_word(context_length) -> None:
    """At 16,384 tokens a word numbers the weights of 16 heads, at 65,536 those of one."""
    dropout = AttentionDropout(1, 0.5, context_length)
    row_keys = dropout_keys(CONFIG, 1, 2, [0, 1])
    queries, keys = torch.tensor([0, 7, context_length - 1]), torch.arange(512)
    masks = dropout.acting(row_keys)(torch.ones(2, 33, 3, 512), queries, keys) != 0
    rows = {tuple(row.tolist()) for row in masks.flatten(0, 2)}
    assert len(rows) == 2 * 33 * 3
    z = (masks.flatten(0, 2).double() - 0.5) / 0.5
    sigmas = (z @ z.T / math.sqrt(512))[tuple(torch.triu_indices(len(z), len(z), 1))]
    assert 0.9 < sigmas.std() < 1.1  # of N(0, 1), if masks have nothing in common
    dropout.head_offset = 20
    part = dropout.acting(row_keys)(torch.ones(2, 2, 1, 100), queries[2:], keys[50:150]) != 0
    assert torch.equal(part, masks[:, 20:22, 2:, 50:150])


def test_no_two_positions_of_a_long_stream_share_a_mask() -> None:
    dropout = StreamDropout(3, 0.5, 2**28)
    positions = torch.tensor([0, 5, 2**23, 2**23 + 5, 2**24, 2**28 - 1])
    y = dropout(torch.ones(1, 6, 512), dropout_keys(CONFIG, 1, 2, [0]), positions) != 0
    assert len({tuple(row.tolist()) for row in y[0]}) == 6


def test_elements_that_a_word_numbers_keep_their_masks() -> None:
    """The first block has the keys that it had before there were others."""
    keys = dropout_keys(CONFIG, 1, 2, [0])[:, 1]
    few = weight_index(range(2), torch.arange(3), torch.arange(5), 2**15)
    many = weight_index(range(9), torch.arange(3), torch.arange(5), 2**15)
    assert few.block is None
    assert many.block is not None
    masks = [keep_mask(keys, numbers, 0.5) for numbers in (few, many)]
    assert torch.equal(masks[0], masks[1][:, :2])
