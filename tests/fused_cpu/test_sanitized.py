"""The C++ kernels read and write what is theirs, and nothing that they do is undefined: their tests
run with libraries in which the compiler checks each access."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentameter.machine.capabilities import compiler_command

CHECKS = "-g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
RUNTIMES = ("libasan.so", "libubsan.so")
OPTIONS = {
    # Python leaves memory behind, and frames of GCC 12 to 13.2 that are kept after a return are
    # misaligned for AVX-512 (GCC's bug 110027).
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "PYTHONMALLOC": "malloc",  # so that numpy's and Python's memory has bounds, too
}
TESTS = Path(__file__).parents[1]


def runtimes():
    """The paths of the compiler's libraries for its checks; skips where it has none."""
    compiler = compiler_command()
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no C++ compiler, or none that the kernels are for")
    asked = [[compiler, f"-print-file-name={name}"] for name in RUNTIMES]
    found = [subprocess.run(each, capture_output=True, text=True, check=True) for each in asked]
    paths = [each.stdout.strip() for each in found]
    if not all(map(os.path.isabs, paths)):
        pytest.skip(f"{compiler} has no libasan and libubsan")
    return compiler, " ".join(paths)


@pytest.mark.parametrize(
    ("library", "tests", "chosen"),
    [
        ("vector", ["fused_cpu/vector", "fused_cpu/test_around_matmuls.py"], "[64-"),
        ("vector", ["fused_cpu/experts"], "[64 or [64-"),
        ("rows", ["generation/test_few_rows.py"], "bits or order"),
        ("rows", ["generation/test_token_pass.py"], "threads and [64-"),
        ("amx", ["fused_cpu/test_amx.py"], "threads or anyhow or over_rows or itself"),
    ],
)
def test_kernels_keep_to_their_memory(tmp_path, library, tests, chosen):
    compiler, preloaded = runtimes()
    checked = tmp_path / "checked-g++"
    checked.write_text(f'#!/bin/sh\nexec {compiler} "$@" {CHECKS}\n')
    checked.chmod(0o755)
    own = {"CXX": str(checked), "XDG_CACHE_HOME": str(tmp_path), "LD_PRELOAD": preloaded}
    options = ["-q", "-s", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-m", "not slow"]
    paths = [str(TESTS / each) for each in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", chosen, *paths],
        cwd=TESTS.parent, env={**os.environ, **OPTIONS, **own},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-10_000:]
    built = list(tmp_path.glob(f"pentameter/native/{library}-*/*.so"))
    assert built
    assert all(b"__asan_" in each.read_bytes() for each in built)
