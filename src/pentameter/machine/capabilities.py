"""This machine's capabilities: processor, accelerators, memory, and a compiler tried out for
`torch.compile`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from pentameter.disk.lock import scratch_folder
from pentameter.errors import ConfigError
from pentameter.machine.cores import host_memory_bytes, n_usable_cores

NAMES_OF_ANY = ("AMD Radeon Graphics",)
"""Names that the driver gives to several chips (an MI210 is one), so that they identify none."""


@dataclass(frozen=True)
class CpuCapabilities:
    """The processor: its name, usable cores, torch's threads, and whether it has AMX or AVX-512
    instructions for bf16 matmuls."""

    name: str
    n_cores: int
    n_threads: int
    amx_bf16: bool
    avx512_bf16: bool
    vector: str
    """Vector instruction set that torch's kernels use: `AVX512`, `AVX2`, `DEFAULT`, …"""

    @property
    def fast_bf16(self) -> bool:
        """Whether bf16 matmuls run faster than fp32 ones: with AMX or AVX-512 BF16."""
        return self.amx_bf16 or self.avx512_bf16


@dataclass(frozen=True)
class GpuCapabilities:
    """A CUDA or ROCm device: name, chip and memory."""

    name: str
    architecture: str
    """The chip: `sm_80` for CUDA, `gfx942` for ROCm."""
    memory_bytes: int

    @property
    def compute_capability(self) -> int | None:
        """CUDA's compute capability times ten (80 for 8.0); None for an AMD chip."""
        number = self.architecture.removeprefix("sm_")
        return int(number) if number.isdigit() else None


@dataclass(frozen=True)
class Capabilities:
    """A machine's processor and accelerators as plain values, so that a test can pretend to have
    others."""

    cpu: CpuCapabilities
    gpus: tuple[GpuCapabilities, ...]
    gpu_runtime: str | None
    """`cuda 12.8` or `rocm 6.4`, which torch is built for; None if it is built for the CPU only."""
    mps: bool

    def gpu(self, device: torch.device) -> GpuCapabilities:
        """Return the GPU with `device`'s index (0 if it has none). Raises ConfigError if
        there are fewer GPUs."""
        index = device.index or 0
        if index >= len(self.gpus):
            raise ConfigError(f"{device} is not here: this machine has {len(self.gpus)}")
        return self.gpus[index]


@dataclass(frozen=True)
class Compiler:
    """The compiler command that `torch.compile` would call (None if there is none), whether it
    works, and the reason for either."""

    command: str | None
    works: bool
    reason: str


def machine_capabilities() -> Capabilities:
    """Return this machine's Capabilities, read from torch and /proc/cpuinfo. Nothing is compiled,
    and nothing is allocated on a device."""
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            architecture = f"sm_{properties.major}{properties.minor}"
            if torch.version.hip:
                # "gfx942:sramecc+:xnack-": what follows the colon are modes, not the chip
                architecture = str(getattr(properties, "gcnArchName", "gfx")).split(":")[0]
            name = gpu_name(properties.name, architecture)
            gpus.append(GpuCapabilities(name, architecture, properties.total_memory))
    runtime = None
    if torch.version.hip:
        runtime = f"rocm {torch.version.hip}"
    elif torch.version.cuda:
        runtime = f"cuda {torch.version.cuda}"
    about: dict[str, str] = {}
    with suppress(OSError):  # no /proc: no other system runs on a processor that multiplies bf16
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        fields = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
        about = {key.strip(): value.strip() for key, _, value in fields}
    flags = about.get("flags", "").split()
    cpu = CpuCapabilities(
        name=about.get("model name") or platform.processor() or platform.machine(),
        n_cores=n_usable_cores(),
        n_threads=torch.get_num_threads(),
        amx_bf16="amx_bf16" in flags,
        avx512_bf16="avx512_bf16" in flags,
        vector=torch.backends.cpu.get_cpu_capability(),
    )
    return Capabilities(cpu, tuple(gpus), runtime, torch.backends.mps.is_available())


def gpu_name(name: str, architecture: str) -> str:
    """Return the GPU's name from the driver. The chip, `architecture` (`gfx90a`), is added if
    several chips have that name."""
    return f"{name} ({architecture})" if name in NAMES_OF_ANY else name


def memory_bytes(device: torch.device) -> int | None:
    """Return a device's total memory in bytes: a GPU's own, else the machine's; None if the
    system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory_bytes()  # which a GPU of Apple's shares


_PROBE = """#include <Python.h>
%s
extern "C" int pentameter_probe(void) { return PY_MAJOR_VERSION; }
"""


_TRITON_CAPABILITY = 70
"""Least CUDA compute capability, times ten, that Triton generates kernels for."""


def find_compiler(device: torch.device, capabilities: Capabilities | None = None) -> Compiler:
    """Return the compiler that `torch.compile` would call for a device, and whether it works, found
    out by trying it (0.3 s on a CPU).

    On a CPU the generated C++ includes Python.h and OpenMP, so a small source that does the same is
    really built. On a GPU Triton generates the kernels; it needs only a C compiler, and nothing is
    built. On MPS the answer is always no. capabilities: this machine's, by default looked up.
    """
    if device.type == "mps":
        return Compiler(None, False, "torch.compile for MPS is still a prototype")
    if device.type == "cuda":
        return _find_triton((capabilities or machine_capabilities()).gpu(device))
    command = compiler_command()
    if command is None:
        return Compiler(None, False, "no C++ compiler found; install g++ or set CXX")
    return _try_building(command)


def compiler_command() -> str | None:
    """Return the C++ compiler that torch looks for, which is g++, on a Mac clang++, unless $CXX
    names another; None if it cannot be found."""
    return _first_found("CXX", ("clang++" if sys.platform == "darwin" else "g++",))


def _find_triton(gpu: GpuCapabilities) -> Compiler:
    capability = gpu.compute_capability
    if capability is not None and capability < _TRITON_CAPABILITY:
        needed, has = _TRITON_CAPABILITY / 10, capability / 10
        reason = f"triton needs compute capability {needed}, and {gpu.name} has {has}"
        return Compiler(None, False, reason)
    if find_spec("triton") is None:
        return Compiler(None, False, "triton is not installed")
    command = _first_found("CC", ("gcc", "clang", "cc"))
    if command is None:
        return Compiler(None, False, "triton needs a C compiler; install gcc or clang")
    return Compiler(command, True, f"triton with {command}")


def _first_found(variable: str, names: tuple[str, ...]) -> str | None:
    """Return the compiler that the environment variable `variable` names, if it is set, else the
    first in `names` that is on the PATH; None if it cannot be found."""
    named = os.environ.get(variable, "").strip()
    return next(filter(shutil.which, [named] if named else names), None)


def _try_building(command: str) -> Compiler:
    include = sysconfig.get_path("include")
    openmp = sys.platform == "linux"
    with scratch_folder() as folder:
        source = folder / "probe.cpp"
        source.write_text(_PROBE % ("#include <omp.h>" if openmp else ""), encoding="utf-8")
        flags = ["-shared", "-fPIC", f"-I{include}", *(["-fopenmp"] if openmp else [])]
        if sys.platform == "darwin":
            flags += ["-undefined", "dynamic_lookup"]
        try:
            result = subprocess.run(
                [command, *flags, str(source), "-o", str(folder / "probe.so")],
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
