"""PyTorch's matmuls in parts, one for each thread, have the bits of the whole."""

import weakref

import pytest
import torch

from pentameter.fused_cpu import native
from pentameter.fused_cpu.captured import matmul_parts
from pentameter.fused_cpu.captured.matmul_parts import in_parts
from pentameter.fused_cpu.captured.native_calls import NativeCalls

ROWS, PADDED = 96, 112
SHAPES = {  # m, k, n and the number of matrices
    "rows": (ROWS, 64, 32),
    "columns": (64, 40, ROWS),
    "sizes that no block divides": (77, 33, 13),
    "columns that no block divides": (5, 7, 71),
    "less than a block": (3, 4, 5),
    "batch": (16, 24, 8, 6),
    "batch that threads do not divide": (16, 24, 8, 5),
    "one in a batch": (16, 24, 8, 1),
}


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(generator, dtype, *sizes, turned=False):
    """A matrix, or one whose rows are columns in memory, with room behind each."""
    if not turned:
        return torch.randn(*sizes, generator=generator).to(dtype)
    *batch, rows, columns = sizes
    return random(generator, dtype, *batch, columns, rows + 16)[..., :rows].transpose(-1, -2)


def factors(shape, dtype=torch.bfloat16, turned=(False, False)):
    (m, k, n, *batch), generator = SHAPES[shape], torch.Generator().manual_seed(1)
    left = random(generator, dtype, *batch, m, k, turned=turned[0])
    return left, random(generator, dtype, *batch, k, n, turned=turned[1])


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_those_of_the_product(loaded, monkeypatch, shape, turned, dtype, threads):
    monkeypatch.setattr(matmul_parts, "LEAST_PRODUCTS", 1)
    monkeypatch.setattr(matmul_parts, "LEAST_COMPARED", 1)  # seconds of so small matrices
    left, right = factors(shape, dtype, turned)
    expected = torch.matmul(left, right)
    out = torch.full_like(expected, torch.nan)
    if (call := in_parts(out, left, right)) is not None:
        NativeCalls([call])()
        assert torch.equal(out, expected)
    monkeypatch.setattr(matmul_parts, "_is_equal", lambda *_: True)
    NativeCalls([in_parts(out.fill_(torch.nan), left, right)])()
    torch.testing.assert_close(out, expected)


def test_each_thread_has_a_part_of_what_is_longer():
    sizes = {}
    for shape in SHAPES:
        left, right = factors(shape)
        whole = matmul_parts._Matmul(left @ right, left, right)
        sizes[shape] = [tuple(part.out.shape) for part in whole.parts(2)]
    assert sizes == {
        "rows": [(32, 32), (64, 32)],
        "columns": [(64, 32), (64, 64)],
        "sizes that no block divides": [(32, 13), (45, 13)],
        "columns that no block divides": [(5, 32), (5, 39)],
        "less than a block": [(3, 5)],
        "batch": [(3, 16, 8)] * 2,
        "batch that threads do not divide": [(3, 16, 8), (2, 16, 8)],
        "one in a batch": [(1, 16, 8)],
    }


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_there_are_no_parts_where_bits_would_differ(loaded, monkeypatch, threads):
    monkeypatch.setattr(matmul_parts, "LEAST_PRODUCTS", 1)
    left, right = factors("rows")
    rows_of = matmul_parts._Matmul.parts

    calls = []

    def wrongly(whole, n_parts):
        calls.append(whole)
        first, *others = rows_of(whole, n_parts)
        if len(calls) < 3:  # the parts of the matmul, those of a first trial
            return [first, *others]
        return [first._replace(left=whole.left[1 : 1 + len(first.left)]), *others]

    monkeypatch.setattr(matmul_parts._Matmul, "parts", wrongly)
    matmul_parts._is_equal.cache_clear()
    assert in_parts(left @ right, left, right) is None
    matmul_parts._is_equal.cache_clear()


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_small_matmuls_are_one_threads(loaded, monkeypatch, threads):
    monkeypatch.setattr(matmul_parts, "_is_equal", lambda *_: True)  # whatever the processor
    left, right = factors("rows")
    out, found = left @ right, []
    for least in (out.numel() * 64 // 2, out.numel() * 64 // 2 + 1):
        monkeypatch.setattr(matmul_parts, "LEAST_PRODUCTS", least)
        found.append(in_parts(out, left, right).arguments[2])
    assert found == [2, 1]


def test_without_a_library_or_in_another_dtype_pytorch_computes_it(loaded, monkeypatch):
    left, right = factors("rows")
    out = left @ right
    assert in_parts(out.double(), left.double(), right.double()) is None
    with native.without("vector"):
        assert in_parts(out, left, right) is None

    def gone():
        raise OSError("no such file")

    monkeypatch.setattr(matmul_parts, "_c_interface", gone)
    assert in_parts(out, left, right) is None


def test_tensors_are_not_held(loaded):
    left, right = factors("batch")
    out = left @ right
    held = [weakref.ref(x) for x in (out, left, right)]
    call = in_parts(out, left, right)
    del out, left, right
    assert call is not None
    assert [each() for each in held] == [None] * 3
