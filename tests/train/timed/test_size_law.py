"""The law by which `train --time` chooses a size."""

from __future__ import annotations

import pytest

from pentameter.train.timed.size_law import (
    SIZES,
    Size,
    best_rate,
    best_size,
    best_vocabulary,
    gated_width,
    loss_above_floor,
    sizes_within,
    step_tokens,
)


def flops_per_token(size: Size) -> float:
    return 6.0 * size.n_matrix_parameters


def test_more_arithmetic_wants_a_larger_model():
    chosen = [best_size(SIZES, flops_per_token, 10.0**power, 10**12) for power in range(11, 22)]
    widths = [size.d_model for size in chosen]
    assert widths == sorted(widths)
    assert len(set(widths)) > 6


def test_a_token_seen_again_teaches_less():
    once, fresh = loss_above_floor(1e6, 1e6, 1e6), loss_above_floor(1e6, 4e6, 4e6)
    again = loss_above_floor(1e6, 4e6, 1e6)
    assert fresh < again < once
    long, longer = (loss_above_floor(1e6, passes * 1e6, 1e6) for passes in (100, 200))
    assert long == pytest.approx(longer, rel=1e-3)  # nothing is left to learn


def test_a_short_text_wants_no_larger_model():
    flops = 1e15
    short, endless = (best_size(SIZES, flops_per_token, flops, n) for n in (10**5, 10**12))
    assert short.n_matrix_parameters >= endless.n_matrix_parameters  # passes are worth less


def test_the_users_width_and_depth_stay():
    assert {size.d_model for size in sizes_within(SIZES, 100, None)} == {100}
    assert {size.n_layers for size in sizes_within(SIZES, None, 3)} == {3}
    assert sizes_within(SIZES, 100, 3) == [Size(100, 3, 256)]
    assert sizes_within(SIZES, None, None) == list(SIZES)


@pytest.mark.parametrize(
    ("n_bytes", "n_tokens", "tokenizer"),
    [
        (100_000, 1e9, "char"),
        (10**6, 1e9, "bpe:2048"),
        (10**9, 1e5, "bpe:1024"),
        (10**9, 1e3, "char"),
    ],
)
def test_a_vocabulary_that_text_and_time_can_teach(n_bytes, n_tokens, tokenizer):
    assert best_vocabulary(n_bytes, lambda _: n_tokens) == tokenizer


def test_batches_grow_with_the_run_and_rates_fall_with_the_width():
    assert step_tokens(10) == step_tokens(1e6) == 2048
    assert step_tokens(1500 * 10_000) == 8192
    assert best_rate(128) > best_rate(256) > best_rate(1024)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size.d_model))
def test_a_gate_costs_no_parameters(size):
    width = gated_width(size.d_model)
    assert width % 32 == 0
    # Half a multiple of 32 is a tenth at most of the narrowest one.
    assert 3 * width == pytest.approx(8 * size.d_model, rel=0.1)
