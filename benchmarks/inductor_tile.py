"""A kernel that `torch.compile` writes and g++ makes wrong, on a CPU with AVX-512: bf16 numbers are
transposed in a tile on the stack, the stores to the tile are lost, and what lay there is read.

    python benchmarks/inductor_tile.py

It needs nothing but torch and g++. Each row builds the same function anew, by a g++ to which more
flags are given. `TORCHINDUCTOR_CPP_MARCH=x86-64-v4` tunes for no processor, as `-march=native` does
on a processor that g++ does not know; a g++ that knows it may inline what it would else clone, and
is right by luck.

Debian 12's g++ 12.2, torch 2.13, on an AMD EPYC (Zen 4) printed, of 442,368 numbers:

    march      more flags                      wrong
    native                                         0
    x86-64-v4                                426,816
    x86-64-v4  -O2                                 0
    x86-64-v4  -fno-tree-slp-vectorize             0
    x86-64-v4  -fno-ipa-cp-clone                   0
    x86-64-v4  -fno-strict-aliasing          426,585
    x86-64-v4  -ftrivial-auto-var-init=zero  426,816

With `-ftrivial-auto-var-init=zero` the wrong numbers are zeros, so it is the stores that are
missing. On a Xeon with AMX it is wrong with `-march=native`, too, there even for one result.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import config

ROWS = (
    (None, ""),
    ("x86-64-v4", ""),
    ("x86-64-v4", "-O2"),
    ("x86-64-v4", "-fno-tree-slp-vectorize"),
    ("x86-64-v4", "-fno-ipa-cp-clone"),
    ("x86-64-v4", "-fno-strict-aliasing"),
    ("x86-64-v4", "-ftrivial-auto-var-init=zero"),
)
"""(-march, or None for PyTorch's own choice; more flags)"""


def two_results(g: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Read a transposed g in two loops, so that the code that transposes a tile has two callers."""
    wide = g.float()
    return (wide * scale).contiguous(), (wide * weight).sum(0)


def main() -> None:
    """Print how many numbers are wrong for each -march and more flags."""
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(384, 1152, generator=generator).bfloat16().t()
    scale = torch.randn(384, generator=generator)
    weight = torch.randn(1152, 384, generator=generator)
    expected = two_results(g, scale, weight)[0]
    compiler = shutil.which(os.environ.get("CXX", "g++")) or "g++"
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {capability}, {g.numel():,} numbers")
    print(f"{'march':10} {'more flags':30} {'wrong':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for number, (march, more) in enumerate(ROWS):
            told = Path(folder, str(number), "g++")
            told.parent.mkdir()
            told.write_text(f'#!/bin/sh\nexec {compiler} "$@" {more}\n', encoding="utf-8")
            told.chmod(0o755)
            torch.compiler.reset()
            with config.patch({"cpp.cxx": (None, str(told)), "cpp.march": march}):
                compiled = torch.compile(two_results, dynamic=False)
                result = compiled(g, scale, weight)[0]
            wrong = int((result != expected).sum())
            print(f"{march or 'native':10} {more:30} {wrong:8,}", flush=True)


if __name__ == "__main__":
    main()
