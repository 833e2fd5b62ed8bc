"""What a proof finds, what it lets pass, and where its verdicts are kept."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from pentameter.errors import StorageError
from pentameter.machine import kernel_checks


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_disagreement(dtype):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = x.to(dtype)
    again = rounded * (1 + torch.finfo(dtype).eps)
    assert kernel_checks.disagreement([rounded], [again]) is None
    assert kernel_checks.disagreement([], []) is None
    assert kernel_checks.disagreement([rounded[:0]], [again[:0]]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 0.0, 9.0])
def test_one_wrong_number_is_found(dtype, wrong):
    expected = torch.linspace(1, 4, 96 * 64).view(96, 64).to(dtype)
    result = expected.clone()
    result[50, 7] = wrong
    assert kernel_checks.disagreement([expected, result], [expected, expected])
    assert kernel_checks.disagreement([expected], [expected]) is None


def test_what_is_infinite_in_both_agrees():
    x = torch.tensor([1.0, -torch.inf, torch.nan])
    assert kernel_checks.disagreement([x], [x.clone()]) is None


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_wrong_number_in_an_infinite_ones_place_is_found(wrong):
    expected = torch.tensor([1.0, -torch.inf])
    assert kernel_checks.disagreement([torch.tensor([1.0, wrong])], [expected])


def test_integers_shapes_and_dtypes_must_be_equal():
    x = torch.arange(6)
    assert kernel_checks.disagreement([x], [x + 1])
    assert kernel_checks.disagreement([x.float()], [x.view(2, 3).float()])
    assert kernel_checks.disagreement([x.float()], [x.double()])


def test_a_share_may_differ_but_be_finite():
    expected, result = torch.ones(1000), torch.ones(1000)
    result[0] = 5.0
    assert kernel_checks.disagreement([result], [expected])
    assert kernel_checks.disagreement([result], [expected], may_differ=1e-3) is None
    result[0] = torch.nan
    assert kernel_checks.disagreement([result], [expected], may_differ=1e-3)


def test_stand_ins_lie_as_their_tensors():
    whole = torch.zeros(64, 96, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.zeros(4))
    for x in (whole.t(), whole[:, :90], whole[::2], whole[:1].expand(8, 96), parameter, whole[:0]):
        made = kernel_checks.stand_in(x, 1)
        assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
        assert (type(made), made.requires_grad) == (type(x), x.requires_grad)
        assert not x.any()
        assert made.any() or not x.numel()
        assert torch.equal(made, kernel_checks.stand_in(x, 1))
    keys, mask = torch.arange(5), torch.tensor([0.0, -torch.inf])
    assert torch.equal(kernel_checks.stand_in(keys, 1), keys)
    assert torch.equal(kernel_checks.stand_in(mask, 1), mask)


def test_verdicts_hold_for_their_toolchain(monkeypatch):
    key = kernel_checks.key_of("kernel", (3, 4))
    assert kernel_checks.recall(key) is None
    kernel_checks.record(key, "kernel", "-O2", why="a test")
    assert kernel_checks.recall(key)["why"] == "a test"
    assert list(kernel_checks.verdicts()) == [("kernel", "-O2")]
    assert kernel_checks.key_of("kernel", (3, 4)) == key
    assert kernel_checks.key_of("kernel", (4, 3)) != key
    monkeypatch.setenv("CXX", "true")  # another compiler
    assert kernel_checks.key_of("kernel", (3, 4)) != key
    assert list(kernel_checks.verdicts()) == []


def test_flags_of_the_compiler_are_part_of_the_toolchain(monkeypatch):
    before = kernel_checks.toolchain()
    monkeypatch.setenv("TORCHINDUCTOR_CPP_MARCH", "x86-64-v4")
    assert kernel_checks.toolchain() != before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"name": "kernel", "level": "-O9"}',
        '{"name": 1, "level": "-O3"}',
        "[" * 9999,
    ],
)
def test_a_damaged_verdict_is_none(text, tmp_path):
    kernel_checks.record("key", "kernel", "-O3")
    (verdict,) = tmp_path.rglob("key.json")
    verdict.write_text(text)
    assert kernel_checks.recall("key") is None
    assert list(kernel_checks.verdicts()) == []


def test_a_pipe_in_a_verdicts_place_is_not_waited_for(tmp_path):
    kernel_checks.record("key", "kernel", "-O3")
    (verdict,) = tmp_path.rglob("key.json")
    verdict.unlink()
    os.mkfifo(verdict)
    assert kernel_checks.recall("key") is None


def test_a_compiler_that_does_not_run_has_a_toolchain_of_its_own(monkeypatch, tmp_path):
    before = kernel_checks.toolchain()
    broken = tmp_path / "g++"
    broken.write_bytes(b"\x00no program\x00")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert kernel_checks.toolchain() != before


def test_the_careful_compiler_may_run_as_soon_as_it_is_there(monkeypatch):
    seen, replace = [], os.replace

    def watched(part, target):
        seen.append(os.access(part, os.X_OK))
        replace(part, target)

    monkeypatch.setattr(os, "replace", watched)
    path = Path(kernel_checks.careful_compiler())
    assert seen == [True]
    path.chmod(0o644)  # as one is left that was killed before it could set this
    assert os.access(kernel_checks.careful_compiler(), os.X_OK)


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_verdict(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kernel_checks.record("key", "kernel", "-O3")
    assert kernel_checks.recall("key") is None


def test_the_careful_compiler_optimizes_less(monkeypatch, tmp_path):
    told = tmp_path / "g++"
    told.write_text('#!/bin/sh\necho "$@"\n')
    told.chmod(0o755)
    monkeypatch.setenv("CXX", str(told))
    careful = kernel_checks.careful_compiler()
    assert careful == kernel_checks.careful_compiler()
    said = subprocess.run([careful, "-O3", "a b"], capture_output=True, text=True, check=True)
    assert said.stdout == "-O3 a b -O2\n"
    Path(careful).chmod(0o644)  # as if a process had been killed over it
    subprocess.run([kernel_checks.careful_compiler()], capture_output=True, check=True)


def test_a_cache_that_runs_no_programs_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "another-g++"))
    monkeypatch.setattr(kernel_checks.os, "access", lambda path, mode: False)
    with pytest.raises(StorageError, match="noexec"):
        kernel_checks.careful_compiler()


def test_a_result_that_is_rounding_alone_is_held_to_the_size_it_is_given():
    expected, result = torch.tensor([4e-11]), torch.tensor([-1e-11])
    assert kernel_checks.disagreement([result], [expected])
    assert kernel_checks.disagreement([result], [expected], least_top=1e-3) is None
    assert kernel_checks.disagreement([result + 1], [expected], least_top=1e-3)
    assert kernel_checks.disagreement([result * torch.nan], [expected], least_top=1e-3)
