import ast
import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from source_files import SOURCE, files, nodes

from pentameter import keyed
from pentameter.keyed import bits, folded, make_key, permute

DRAWS = ("bits", "permute")
N = 2**18
WORD = 2**32 - 1
# A change of any of these changes every run ever made.
GOLDEN_KEY = (-1397055188, 439095480)
GOLDEN_BITS = [-768817297, 515462381, 1171320828, 1128195385, -914135440, 2099345828]
GOLDEN_BITS_OF_ZERO = [0, 69681622, -236984087, -1141334719, 873894713, 1139898825]
GOLDEN_PERMUTATION = [2, 9, 7, 1, 8, 5, 4, 0, 6, 3]

words = st.integers(-(2**31), 2**31 - 1)


def signed(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31


def twin(key: tuple[int, int], index: int) -> int:
    """The hash again, over plain unsigned Python numbers."""
    x = (index ^ key[0]) & WORD
    x = x * 0xED5AD4BB & WORD
    x = x ^ (x >> 11) ^ (key[1] & WORD)
    x = x * 0xAC4C1B51 & WORD
    x = x ^ (x >> 15)
    x = x * 0x31848BAB & WORD
    return signed(x ^ (x >> 14))


def stream(key: tuple[int, int], n: int = N) -> np.ndarray:
    return bits(key, np.arange(n, dtype=np.int32))


def centred(x: np.ndarray) -> np.ndarray:
    """Uniform over ±1/2 if x is uniform over the words; its variance is then 1/12."""
    return x.astype(np.float64) / 2**32


def correlation_sigmas(a: np.ndarray, b: np.ndarray) -> float:
    return float((centred(a) * centred(b)).mean() * 12 * math.sqrt(len(a)))


def check_normal(sigmas: list[float]) -> None:
    """Refuse what a sample of N(0, 1) of this size would almost never be."""
    z = np.array(sigmas)
    assert np.abs(z).max() < 5
    assert abs(z.mean()) * math.sqrt(len(z)) < 4
    assert 0.8 < z.std() < 1.2


def test_golden_values() -> None:
    assert make_key(1337, "dropout", 0) == GOLDEN_KEY
    index = np.array([0, 1, 2, 2**31 - 1, -(2**31), -1], dtype=np.int32)
    assert bits(GOLDEN_KEY, index).tolist() == GOLDEN_BITS
    assert bits((0, 0), index).tolist() == GOLDEN_BITS_OF_ZERO
    assert permute(GOLDEN_KEY, 10, np.arange(10)).tolist() == GOLDEN_PERMUTATION


@given(words, words, st.lists(words, min_size=1, max_size=20))
def test_numpy_and_torch_agree_with_the_twin(k0: int, k1: int, index: list[int]) -> None:
    expected = [twin((k0, k1), i) for i in index]
    from_numpy = bits((k0, k1), np.array(index, dtype=np.int32))
    from_torch = bits((k0, k1), torch.tensor(index, dtype=torch.int32))
    assert from_numpy.dtype == np.int32
    assert from_torch.dtype == torch.int32
    assert from_numpy.tolist() == from_torch.tolist() == expected


def test_compiled_bits_are_the_same_with_a_key_per_row() -> None:
    keys = torch.tensor([make_key(row) for row in range(3)], dtype=torch.int32)
    index = torch.arange(-1000, 1003, dtype=torch.int32)  # an odd length, so a scalar tail too

    def hashed(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return bits((keys[:, 0, None], keys[:, 1, None]), index)

    compiled = torch.compile(hashed, dynamic=False)(keys, index)
    assert torch.equal(compiled, hashed(keys, index))
    for row in range(3):
        assert compiled[row].tolist() == [twin(make_key(row), i) for i in index.tolist()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_are_the_same_on_a_gpu() -> None:
    index = torch.arange(-1000, 1003, dtype=torch.int32)
    key = make_key("gpu")
    expected = bits(key, index)
    assert torch.equal(bits(key, index.cuda()).cpu(), expected)
    assert torch.equal(torch.compile(bits)(key, index.cuda()).cpu(), expected)


@given(words, words, st.integers(0, 500), st.integers(0, 500), st.integers(1, 7))
def test_any_slice_is_a_slice_of_the_whole(k0: int, k1: int, a: int, b: int, step: int) -> None:
    index = np.arange(500, dtype=np.int32)
    assert np.array_equal(bits((k0, k1), index[a:b:step]), bits((k0, k1), index)[a:b:step])


def test_either_word_of_a_key_may_be_an_array_and_none_is_written_to() -> None:
    index, word = np.arange(3, dtype=np.int32), np.array([[1], [2]], np.int32)
    second = bits((1, word), index)
    assert second.shape == bits((word, 1), index).shape == (2, 3)
    assert (second[1] == bits((1, 2), index)).all()
    assert (bits((0, 0), index) != index).any()
    assert index.tolist() == [0, 1, 2]
    assert word.tolist() == [[1], [2]]


def test_keys_name_their_parts_with_type_and_length() -> None:
    keys = [
        make_key(*parts)
        for parts in [
            (1,),
            ("1",),
            (1, 2),
            (12,),
            ("a", "b"),
            ("ab",),
            ("b", "a"),
            (),
            ("",),
            (-1,),
        ]
    ]
    assert len(set(keys)) == len(keys)
    assert make_key(2**100, "x") == make_key(2**100, "x")
    assert make_key(np.int64(7)) == make_key(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        make_key(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("stride", [1, 384, 2**12])
def test_bits_and_bytes_are_uniform(stride: int) -> None:
    index = (np.arange(N, dtype=np.int64) * stride).astype(np.uint32).view(np.int32)
    byte_sigmas, bit_sigmas = [], []
    for key in (make_key("uniform", i) for i in range(16)):
        x = bits(key, index).view(np.uint32)
        for shift in (0, 8, 16, 24):
            counts = np.bincount((x >> shift) & 255, minlength=256)
            chi_square = ((counts - N / 256) ** 2 / (N / 256)).sum()  # 255 degrees of freedom
            byte_sigmas.append((chi_square - 255) / math.sqrt(2 * 255))
        for bit in range(32):
            n_ones = int(((x >> bit) & 1).sum())
            bit_sigmas.append((n_ones - N / 2) / math.sqrt(N / 4))
    check_normal(byte_sigmas)
    check_normal(bit_sigmas)


def test_neighbouring_indices_are_independent() -> None:
    sigmas = []
    for key in (make_key("serial", i) for i in range(16)):
        x = stream(key)
        sigmas += [correlation_sigmas(x[lag:], x[:-lag]) for lag in (1, 2, 3, 64, 256, 384)]
    check_normal(sigmas)


def test_pairs_of_neighbours_are_uniform() -> None:
    sigmas = []
    for key in (make_key("pairs", i) for i in range(32)):
        x = stream(key).view(np.uint32) >> 28
        counts = np.bincount(16 * x[::2] + x[1::2], minlength=256)
        expected = N / 2 / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        sigmas.append((chi_square - 255) / math.sqrt(2 * 255))
    check_normal(sigmas)


def test_neighbouring_steps_and_sites_are_independent() -> None:
    by_step = [stream(make_key(1337, "dropout", step, 0)) for step in range(33)]
    by_site = [stream(make_key(1337, "dropout", 0, site)) for site in range(33)]
    check_normal(
        [
            correlation_sigmas(a, b)
            for family in (by_step, by_site)
            for a, b in itertools.pairwise(family)
        ]
    )


def test_keys_that_share_a_word_are_independent() -> None:
    """The worst accident between two digests; two multiplications fail here."""
    sigmas = []
    for i in range(32):
        (k0, k1), (other_k0, other_k1) = make_key("a", i), make_key("b", i)
        for other in ((k0, other_k1), (other_k0, k1), (k0 ^ 5, other_k1)):
            sigmas.append(correlation_sigmas(stream((k0, k1)), stream(other)))
    check_normal(sigmas)


def test_rows_keyed_by_bits_are_independent() -> None:
    row = np.arange(256, dtype=np.int32)[:, None]
    key = make_key(1337, "dropout", 0, 3)
    x = centred(
        bits((bits(key, 2 * row), bits(key, 2 * row + 1)), np.arange(2**12, dtype=np.int32))
    )
    correlations = (x @ x.T) * 12 / math.sqrt(2**12)
    check_normal(correlations[np.triu_indices(256, 1)].tolist())


@settings(max_examples=60)
@given(words, words, st.integers(1, 3000))
def test_permute_is_a_bijection_and_ints_agree(k0: int, k1: int, n: int) -> None:
    places = permute((k0, k1), n, np.arange(n))
    assert places.dtype == np.int64
    assert np.array_equal(np.sort(places), np.arange(n))
    for i in (0, n // 2, n - 1):
        assert permute((k0, k1), n, i) == places[i] == permute((k0, k1), n, np.int64(i))


def test_permute_leaves_its_argument_alone_and_takes_any_shape() -> None:
    index = np.arange(12).reshape(3, 4)
    places = permute(make_key(1), 12, index)
    assert places.shape == (3, 4)
    assert np.array_equal(index, np.arange(12).reshape(3, 4))


def test_permute_reaches_every_order_about_equally() -> None:
    counts: dict[tuple[int, ...], int] = {}
    n_keys = 24 * 100
    for i in range(n_keys):
        order = tuple(permute(make_key("order", i), 4, np.arange(4)).tolist())
        counts[order] = counts.get(order, 0) + 1
    chi_square = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert len(counts) == 24
    assert chi_square < 23 + 5 * math.sqrt(2 * 23)


def test_permuted_neighbours_are_far_apart() -> None:
    n = 100_003
    places = permute(make_key(2), n, np.arange(n)).astype(np.float64) / n - 0.5
    assert abs((places[1:] * places[:-1]).mean()) * 12 * math.sqrt(n) < 4
    assert abs((places * np.linspace(-0.5, 0.5, n)).mean()) * 12 * math.sqrt(n) < 4


def test_permute_handles_its_largest_domain() -> None:
    n, key = 2**62, make_key(3)
    index = np.array([0, 1, n - 1])
    places = permute(key, n, index)
    assert places.tolist() == [permute(key, n, int(i)) for i in index]
    assert len(set(places.tolist())) == 3


@pytest.mark.parametrize(("n", "index"), [(0, 0), (2**62 + 1, 0), (5, 5), (5, -1)])
def test_permute_refuses_what_it_cannot_do(n: int, index: int) -> None:
    with pytest.raises(ValueError, match="must be in"):
        permute((1, 2), n, index)
    with pytest.raises(ValueError, match="must be in"):
        permute((1, 2), n, np.array([index]))


def test_the_table_of_counters_names_every_file_that_draws() -> None:
    drawing = {
        path.relative_to(SOURCE).as_posix()
        for path in files()
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", None) or getattr(node.func, "attr", "")) in DRAWS
        and re.search(
            r"^from pentameter(\.keyed)? import .*(keyed|bits|permute)", path.read_text(), re.M
        )
    }
    named = set(re.findall(r"^\| `(\S+\.py)`", str(keyed.__doc__), re.M))
    assert named == drawing | {"model/attention/dropout_kernels.py"}  # which repeats the hash


def test_each_block_has_a_key_of_its_own_and_the_first_the_key_itself() -> None:
    key = make_key("some", "stream")
    blocks = np.arange(1000, dtype=np.int32)
    first, second = folded(key, blocks)
    assert (int(first[0]), int(second[0])) == key
    assert len(set(zip(first.tolist(), second.tolist(), strict=True))) == 1000
    ours = folded(
        tuple(torch.tensor([word], dtype=torch.int32) for word in key), torch.from_numpy(blocks)
    )
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(ours, (first, second), strict=True))
