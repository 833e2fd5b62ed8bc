"""The hash by which copies are compared: of the bits alone, and changed by each of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pentameter.checkpoint.state.replicas import content_hash

SIZE = 2**18 * 2 + 5  # more than one row of 64-bit words, and not a whole number of them


@pytest.fixture(scope="module")
def numbers():
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1))


def test_equal_contents_have_one_hash(numbers):
    matrix = numbers[: 999 * 7].view(999, 7)
    hashes = {int(content_hash(each)) for each in (matrix, matrix.clone(), matrix.t().clone().t())}
    assert len(hashes) == 1
    shifted = torch.empty(999 * 7 + 1)[1:].copy_(matrix.reshape(-1))  # off the 64-bit words
    assert {int(content_hash(shifted))} == hashes


@given(index=st.integers(0, SIZE - 1), bit=st.integers(0, 31))
def test_every_bit_counts(numbers, index, bit):
    before = int(content_hash(numbers))
    words = numbers.view(torch.int32)
    flip = torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
    words[index] ^= flip
    changed = int(content_hash(numbers))
    words[index] ^= flip
    assert changed != before == int(content_hash(numbers))


@given(first=st.integers(0, SIZE - 1), second=st.integers(0, SIZE - 1))
def test_places_count(numbers, first, second):
    swapped = numbers.clone()
    swapped[[first, second]] = swapped[[second, first]]
    is_same = torch.equal(swapped, numbers)
    assert (int(content_hash(swapped)) == int(content_hash(numbers))) is is_same


def test_a_bit_that_flips_everywhere_counts(numbers):
    flipped = (numbers.view(torch.int32) ^ (1 << 22)).view(torch.float32)
    assert int(content_hash(flipped)) != int(content_hash(numbers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool], ids=str)
def test_any_dtype(dtype):
    ones = torch.ones(3, dtype=dtype)
    other = ones.clone()
    other[2] = 0
    assert int(content_hash(ones)) != int(content_hash(other))
    assert int(content_hash(ones[:0])) == 0
    assert int(content_hash(ones[0])) != int(content_hash(other[2]))
