"""Freed memory is kept for the next step, or given back, as glibc is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pentameter.parallel.memory.malloc import tune_allocator


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_the_allocator_keeps_freed_memory():
    """In a process of its own, since it cannot be undone; page faults must all but vanish."""
    code = """
import resource, torch
from pentameter.parallel.memory.malloc import tune_allocator
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(4 * 2**20)  # 16 MiB, 4096 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
plain = faults()
applied = tune_allocator()
torch.zeros(4 * 2**20)
print(applied, plain, min(faults() for _ in range(5)))  # a busy kernel takes pages away meanwhile
"""
    # the variables are glibc's own way to set the same and would spoil the comparison
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "LD_PRELOAD"))}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean
    )
    applied, plain, tuned = result.stdout.split()
    if applied == "False":
        pytest.skip("the C library is not glibc")
    if int(plain) < 1000:
        pytest.skip("huge pages hide the page faults")
    assert int(tuned) < int(plain) / 10


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_the_sparing_allocator_gives_large_tensors_back():
    code = """
import torch
from pentameter.parallel.memory.malloc import tune_allocator
def resident_pages():
    return int(open("/proc/self/statm").read().split()[1])
applied = tune_allocator(sparing=True)
kept = [torch.zeros(2**18)]
before = resident_pages()
for _ in range(8):  # between tensors that stay, as gathered weights come and go
    gone = torch.zeros(8 * 2**20)
    kept.append(torch.zeros(2**18))
    del gone
print(applied, (resident_pages() - before) * 4096)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    applied, grown_bytes = result.stdout.split()
    if applied == "False":
        pytest.skip("the C library is not glibc")
    assert int(grown_bytes) < 2 * 8 * 4 * 2**18  # what stays is 8 MiB, a tensor that went 32 MiB


def test_the_allocator_of_other_systems_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tune_allocator() is False
