"""Checks that compiled kernels compute what their source says, before a run relies on them.

A compiler may be wrong: g++ 11 and 12 lose stores in a kernel that `torch.compile` writes, and NaN
or stale memory takes the gradients' place (`benchmarks/inductor_tile.py`). So each kernel runs once
beside its plain form (PyTorch's operations), on random numbers in the shapes, strides and dtypes of
a run. If the results differ, it is built with less optimization; if they still differ, it is not
used. Verdicts are kept in the cache folder, by all that they depend on: compiler, flags, torch,
processor, threads and source.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pentameter.disk.atomic import make_folder, write_atomic
from pentameter.disk.cache import cache_folder
from pentameter.disk.record import read_record, write_record
from pentameter.errors import StorageError
from pentameter.machine.capabilities import compiler_command, machine_capabilities

Level = Literal["-O3", "-O2", "plain"]
LEVELS: tuple[Level, ...] = ("-O3", "-O2", "plain")
"""The ways to run a kernel, the fastest first: as the compiler makes it, as it makes it with less
optimization, or in its plain form, by PyTorch's operations."""

MOST_ROUNDINGS = {2: 16.0, 4: 512.0, 8: 512.0}
"""Bytes of the narrowest dtype that a kernel reads or writes → the largest error allowed in a
result, in units of that dtype's rounding error at the result's largest number. For 16 bits it is
small: few such numbers are rounded one after another, and sums are in fp32. For wider dtypes, sums
of 2^18 numbers may be off by 512 roundings of either sign. Lost or stale numbers give far larger
errors: as large as the largest number, 256 roundings of bf16."""

LEAST_COMPARED = 2**18
"""Least number of 16-bit results on which two ways to multiply are found to have the same bits: a
sum in another order is another bf16 number in one case of 6,000 (1,024 terms) to 140,000 (16)."""

_COMPILED = ("model", "fused_cpu")
"""Packages whose code is compiled; their sources are part of a verdict's key."""


def worst(*levels: Level) -> Level:
    """Return the slowest of the levels."""
    return max(levels, key=LEVELS.index)


def disagreement(
    results: Sequence[Tensor],
    expected: Sequence[Tensor],
    *,
    may_differ: float = 0.0,
    bound: float | None = None,
    least_top: float = 0.0,
) -> str | None:
    """Return a phrase that says how a kernel's `results` differ from `expected`, those of its plain
    form, by more than rounding: in shape, dtype, numbers that are not finite, or value. None if
    they agree.

    may_differ: the fraction of a result's finite numbers that may have any value. bound: the
    largest error allowed ÷ the result's largest number; by default `bound_of` the least precise
    dtype. least_top: lower limit for that largest number, where a result may be nothing but
    rounding errors.
    """
    dtypes = {x.dtype for x in (*results, *expected) if x.is_floating_point()}
    bound = max(map(bound_of, dtypes), default=0.0) if bound is None else bound
    for number, (x, y) in enumerate(zip(results, expected, strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"result {number} is {tuple(x.shape)} in {x.dtype}, not {tuple(y.shape)}"
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return f"result {number} differs"
        else:
            how = _difference(_wide(x), _wide(y), bound, may_differ, least_top)
            if how is not None:
                return f"result {number} is {how}"
    return None


def _difference(
    x: Tensor, y: Tensor, bound: float, may_differ: float, least_top: float
) -> str | None:
    finite = y.isfinite()
    odd_x, odd_y = x.masked_fill(finite, 0), y.masked_fill(finite, 0)
    if not (x.isfinite() == finite).all() or not odd_x.isclose(odd_y, equal_nan=True).all():
        return "not finite"
    if not finite.any():
        return None
    error, top = (x - y)[finite].abs_(), y[finite].abs().amax().clamp(least_top)
    if (error > bound * top).float().mean() > may_differ:
        return f"off by {error.amax():.1e} of {top:.1e}"
    return None


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def bound_of(dtype: torch.dtype) -> float:
    """Return the largest error allowed of a kernel that reads or writes `dtype` ÷ its result's
    largest number, from MOST_ROUNDINGS."""
    return torch.finfo(dtype).eps / 2 * MOST_ROUNDINGS[dtype.itemsize]


def stand_in(x: Tensor, seed: int) -> Tensor:
    """Return a tensor with x's shape, strides and dtype, for running a kernel on. It holds normal
    random numbers drawn with `seed`; if x has integers or numbers that are not finite, as a mask
    has, x's own values."""
    size, strides = x.shape, x.stride()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    flat = x.detach().new_empty(max(extent, 0) if x.numel() else 0)
    if x.is_floating_point() and bool(x.isfinite().all()):
        flat.normal_(generator=torch.Generator().manual_seed(seed))
        made = flat.as_strided(size, strides)
    elif 0 in strides:
        made = x.detach()
    else:
        made = flat.as_strided(size, strides).copy_(x.detach())
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(made, x.requires_grad)
    return made.requires_grad_(x.requires_grad)


def recall(key: str) -> dict[str, Any] | None:
    """Return the verdict that `record` has kept under `key`, from `key_of`; None if there is none,
    or it is damaged."""
    verdict = read_record(_folder() / f"{key}.json", dict[str, Any]) or {}
    is_whole = isinstance(verdict.get("name"), str) and verdict.get("level") in LEVELS
    return verdict if is_whole else None


def record(key: str, name: str, level: Level, **more: Any) -> None:
    """Keep a verdict in the cache folder under `key`: that the kernels called `name` run at
    `level`, with further values in `more`. If the folder cannot be written, the next start checks
    again."""
    verdict = {"name": name, "level": level, "toolchain": toolchain(), **more}
    with suppress(StorageError):
        make_folder(_folder())
        write_record(_folder() / f"{key}.json", verdict)


def verdicts() -> Iterator[tuple[str, Level]]:
    """Yield (name, level) for each verdict in the cache that was found with the present
    toolchain."""
    for path in sorted(_folder().glob("*.json")):
        verdict = recall(path.stem)
        if verdict is not None and verdict.get("toolchain") == toolchain():
            yield verdict["name"], verdict["level"]


def key_of(*parts: object) -> str:
    """Return the key for the verdict on a kernel: a hash over `parts`, which describe it, by their
    `repr`, the toolchain, and the sources of compiled code."""
    content = repr((toolchain(), _sources(), parts))
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def toolchain() -> str:
    """Return a hash over all but the source on which a compiled kernel depends: compiler, flags,
    torch, processor, vector instructions and the number of threads."""
    cpu = machine_capabilities().cpu
    command = compiler_command()
    flags = sorted(
        item for item in os.environ.items() if item[0].startswith(("TORCHINDUCTOR_CPP", "ATEN_"))
    )
    content = repr((str(torch.__version__), cpu, _version(command), flags))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@functools.cache
def _version(command: str | None) -> tuple[object, ...]:
    """Return values that distinguish a compiler from others: its path, size, modification time and
    the output of `--version`; () if it is not found."""
    path = None if command is None else shutil.which(command)
    if path is None:
        return ()
    said = b""
    with suppress(OSError, subprocess.TimeoutExpired):  # `find_compiler` says what is wrong with it
        done = subprocess.run([path, "--version"], capture_output=True, check=False, timeout=30)
        said = done.stdout
    about = os.stat(path)
    return path, about.st_size, about.st_mtime_ns, said


@functools.cache
def _sources() -> str:
    """Return a hash over the sources of compiled code and of this file."""
    package = Path(__file__).parents[1]
    files = sorted(path for name in _COMPILED for path in (package / name).rglob("*.*"))
    files.append(Path(__file__))
    sources = (path.read_bytes() for path in files if path.suffix in (".py", ".cpp", ".h"))
    return hashlib.sha256(b"".join(sources)).hexdigest()


def careful_compiler() -> str:
    """Return the path of a script that calls the compiler with `-O2` after its other options, so
    that it optimizes no further. Raises StorageError if the cache cannot be written, lets no
    programs run, or has a path with a blank, at which PyTorch cuts its command lines."""
    command = compiler_command() or "g++"
    number = hashlib.sha256(command.encode()).hexdigest()[:8]
    path = _folder() / f"O2-{number}" / Path(command).name
    if shlex.quote(str(path)) != str(path):
        raise StorageError(f"cannot run {path}: its path has a blank or a quote")
    if not os.access(path, os.X_OK):
        make_folder(path.parent)
        # In one rename: another rank may run it as soon as it is there.
        script = f'#!/bin/sh\nexec {shlex.quote(command)} "$@" -O2\n'
        write_atomic(path, script.encode(), mode=0o755)
        if not os.access(path, os.X_OK):
            raise StorageError(f"cannot run {path}: its disk runs no programs (noexec)")
    return str(path)


def _folder() -> Path:
    return cache_folder() / "kernels"
