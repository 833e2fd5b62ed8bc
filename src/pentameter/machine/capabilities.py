"""Capabilities of this machine: processors, accelerators, memory, and a compiler that compiles."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from pentameter.machine.load import host_memory_bytes
from pentameter.machine.threads import usable_cores


@dataclass(frozen=True)
class CpuCapabilities:
    """The processor, and the two ways it can multiply bf16 matrices in hardware."""

    name: str
    n_cores: int
    n_threads: int
    amx_bf16: bool
    avx512_bf16: bool
    vector: str
    """What torch's own kernels use: AVX512, AVX2, DEFAULT, …"""

    @property
    def fast_bf16(self) -> bool:
        """Whether bf16 products run faster than fp32 ones here."""
        return self.amx_bf16 or self.avx512_bf16


@dataclass(frozen=True)
class GpuCapabilities:
    """One CUDA or ROCm device."""

    name: str
    architecture: str
    """`sm_80` for CUDA, `gfx942` for ROCm."""
    major: int
    minor: int
    memory_bytes: int


@dataclass(frozen=True)
class Capabilities:
    """Processor and accelerators of a machine, as plain values, so that a test can fake them."""

    cpu: CpuCapabilities
    gpus: tuple[GpuCapabilities, ...]
    gpu_runtime: str | None
    """`cuda 12.8`, `rocm 6.4`, or None for a torch built for the CPU only."""
    mps: bool

    @property
    def rocm(self) -> bool:
        """Whether the GPUs are AMD's."""
        return (self.gpu_runtime or "").startswith("rocm")


@dataclass(frozen=True)
class Compiler:
    """The compiler that `torch.compile` would call, and whether it works."""

    command: str | None
    works: bool
    reason: str


def machine_capabilities() -> Capabilities:
    """The Capabilities that torch finds here; builds nothing, allocates nothing on a device."""
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            architecture = f"sm_{properties.major}{properties.minor}"
            if torch.version.hip:
                # "gfx942:sramecc+:xnack-": what follows the colon are modes, not the chip
                architecture = str(getattr(properties, "gcnArchName", "gfx")).split(":")[0]
            gpus.append(
                GpuCapabilities(
                    name=properties.name,
                    architecture=architecture,
                    major=properties.major,
                    minor=properties.minor,
                    memory_bytes=properties.total_memory,
                )
            )
    runtime = None
    if torch.version.hip:
        runtime = f"rocm {torch.version.hip}"
    elif torch.version.cuda:
        runtime = f"cuda {torch.version.cuda}"
    return Capabilities(_cpu(), tuple(gpus), runtime, torch.backends.mps.is_available())


def _cpu() -> CpuCapabilities:
    flags = _cpu_flags()
    cpuinfo = _proc_cpuinfo()
    name = cpuinfo.get("model name") or str(flags.get("cpu_name") or platform.processor())
    return CpuCapabilities(
        name=name or platform.machine(),
        n_cores=len(usable_cores()),
        n_threads=torch.get_num_threads(),
        amx_bf16=bool(flags.get("amx_bf16")),
        avx512_bf16=bool(flags.get("avx512_bf16")),
        vector=torch.backends.cpu.get_cpu_capability(),
    )


def _cpu_flags() -> Mapping[str, object]:
    """Feature names → value, from torch where it can say, else from the kernel."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        try:
            return capabilities()
        except RuntimeError:  # built without cpuinfo
            pass
    return dict.fromkeys(_proc_cpuinfo().get("flags", "").split(), True)


def _proc_cpuinfo() -> dict[str, str]:
    """The first processor's fields in Linux's /proc/cpuinfo; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in fields}


def memory_bytes(device: torch.device) -> int | None:
    """Total memory of a device in bytes; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory_bytes()  # which a GPU of Apple's shares


_PROBE = """#include <Python.h>
%s
extern "C" int pentameter_probe(void) { return PY_MAJOR_VERSION; }
"""


def find_compiler(device_type: str) -> Compiler:
    """The compiler that `torch.compile` would call for a device, tried once (0.3 s on a CPU).

    Args:
        device_type: `cpu`, `cuda` or `mps`.

    On a CPU the generated C++ includes Python.h and OpenMP, so a small source that does the same
    is really built. On a GPU Triton generates the kernels; it needs only a C compiler.
    """
    if device_type == "mps":
        return Compiler(None, False, "torch.compile for MPS is still a prototype")
    if sys.platform == "win32":
        return Compiler(None, False, "torch.compile is not used on Windows")
    if device_type == "cuda":
        return _triton()
    # torch looks for this one name unless $CXX says another
    command = _first_found("CXX", ("clang++" if sys.platform == "darwin" else "g++",))
    if command is None:
        return Compiler(None, False, "no C++ compiler found; install g++ or set CXX")
    return _try_building(command)


def _triton() -> Compiler:
    if find_spec("triton") is None:
        return Compiler(None, False, "triton is not installed")
    command = _first_found("CC", ("gcc", "clang", "cc"))
    if command is None:
        return Compiler(None, False, "triton needs a C compiler; install gcc or clang")
    return Compiler(command, True, f"triton with {command}")


def _first_found(variable: str, names: tuple[str, ...]) -> str | None:
    named = os.environ.get(variable, "").strip()
    for name in (named,) if named else names:
        if shutil.which(name):
            return name
    return None


def _try_building(command: str) -> Compiler:
    include = sysconfig.get_path("include")
    openmp = sys.platform == "linux"
    with tempfile.TemporaryDirectory(prefix="pentameter-") as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_PROBE % ("#include <omp.h>" if openmp else ""), encoding="utf-8")
        flags = ["-shared", "-fPIC", f"-I{include}", *(["-fopenmp"] if openmp else [])]
        if sys.platform == "darwin":
            flags += ["-undefined", "dynamic_lookup"]
        try:
            result = subprocess.run(
                [command, *flags, str(source), "-o", str(Path(folder, "probe.so"))],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Compiler(command, False, f"{command} does not run: {error}")
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        first = lines[0].strip() if lines else f"exit {result.returncode}"
        missing = " (install the Python headers)" if "Python.h" in first else ""
        return Compiler(command, False, f"{command} cannot build: {first}{missing}")
    return Compiler(command, True, f"{command} builds")
