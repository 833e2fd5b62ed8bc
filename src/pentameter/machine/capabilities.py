"""This machine's capabilities: processor, accelerators, memory, and a compiler tried out for
`torch.compile`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from pentameter.disk import macos
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
        name=macos.chip() or about.get("model name") or platform.processor() or platform.machine(),
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


_TRITON_CAPABILITY = 70
"""Least CUDA compute capability, times ten, that Triton generates kernels for."""


def find_compiler(device: torch.device, capabilities: Capabilities | None = None) -> Compiler:
    """Return the compiler that `torch.compile` would call for a device, and whether it works, found
    out by having `torch.compile` build a small function and run it: in the folder that a run will
    use, with the headers that a run will use. The first time that takes some 10 s on a CPU, most of
    which a run that compiles then need not take.

    On a CPU the generated C++ includes Python.h and OpenMP. On a GPU Triton generates the kernels,
    and needs a C compiler to launch them. On MPS the answer is always no. capabilities: this
    machine's, by default looked up.
    """
    if device.type == "mps":
        return Compiler(None, False, "torch.compile for MPS is still a prototype")
    if device.type == "cuda":
        return _find_triton(device, (capabilities or machine_capabilities()).gpu(device))
    command = compiler_command()
    if command is None:
        return Compiler(None, False, "no C++ compiler found; install g++ or set CXX")
    return _tried(device, command, f"{command} builds", {"cpp.cxx": (None, command)})


def compiler_command() -> str | None:
    """Return the C++ compiler that torch looks for, which is g++, on a Mac clang++, unless $CXX
    names another; None if it cannot be found."""
    return _first_found("CXX", ("clang++" if sys.platform == "darwin" else "g++",))


def _find_triton(device: torch.device, gpu: GpuCapabilities) -> Compiler:
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
    return _tried(device, command, f"triton with {command}", {})


def _first_found(variable: str, names: tuple[str, ...]) -> str | None:
    """Return the compiler that the environment variable `variable` names, if it is set, else the
    first in `names` that is on the PATH; None if it cannot be found."""
    named = os.environ.get(variable, "").strip()
    return next(filter(shutil.which, [named] if named else names), None)


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def _tried(device: torch.device, command: str, how: str, options: dict[str, Any]) -> Compiler:
    """Return the compiler with the verdict of a trial: `how` it works, or why it does not."""
    # With its own code, as PyTorch compiles the same code for few sets of options.
    probe = FunctionType(_probe.__code__.replace(), _probe.__globals__)
    try:
        compiled = torch.compile(probe, fullgraph=True, dynamic=False, options=options)
        wrong = compiled(torch.ones(64, device=device)).sum().item() != 3 * 64
    except Exception as error:  # the compiler's, the linker's, the disk's: all say that it cannot
        # PyTorch sets it as it looks for its folder, which is in TMPDIR and has the user's name.
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
        first = compiler_error(error)
        remedy = f"set TORCHINDUCTOR_CACHE_DIR or TMPDIR, now {folder}, to a folder {_NEEDED}"
        if "Python.h" in first:
            remedy = "install the Python headers"
        elif any(word in first for word in ("openmp", "omp.h", "lomp")):  # as Apple's has none
            remedy = "install OpenMP, on macOS by `brew install libomp`"
        return Compiler(command, False, f"{command} builds nothing that runs: {first} ({remedy})")
    if wrong:
        return Compiler(command, False, f"{command} builds what computes wrong numbers")
    return Compiler(command, True, how)


_NEEDED = "whose path has no blank, whose disk has room for 1 GB and lets programs run"


def compiler_error(error: Exception) -> str:
    """Return the words of a failed compilation that say what is wrong, of the many that PyTorch
    prints: the compiler's first error, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if " error: " in line]
    first = (said or lines or [type(error).__name__])[0]
    return first.partition(".  ")[0][:_LONGEST_ERROR]


_LONGEST_ERROR = 300
