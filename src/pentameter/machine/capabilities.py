"""This machine's capabilities: processor, accelerators, memory, and a compiler tried out for
`torch.compile`."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch

from pentameter.disk import macos
from pentameter.errors import ConfigError
from pentameter.machine.cores_and_memory import host_memory_bytes, n_usable_cores

NAMES_OF_ANY = ("AMD Radeon Graphics",)
"""Names that the driver gives to several chips (an MI210 is one), so that they identify none."""


@dataclass(frozen=True)
class CpuCapabilities:
    """The processor: its name, usable cores, torch's threads, and whether it has instructions for
    bf16 matmuls: AMX, AVX-512 or ARM's."""

    name: str
    n_cores: int
    n_threads: int
    amx_bf16: bool
    avx512_bf16: bool
    vector: str
    """Vector instruction set that torch's kernels use: `AVX512`, `AVX2`, `DEFAULT`, …"""
    arm_bf16: bool = False

    @property
    def fast_bf16(self) -> bool:
        """Whether bf16 matmuls are known to run faster than fp32 ones: with AMX or AVX-512 BF16.
        ARM's have not been measured."""
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
    others. `gpus` are those that torch can compute on, up to the first that it cannot."""

    cpu: CpuCapabilities
    gpus: tuple[GpuCapabilities, ...]
    gpu_runtime: str | None
    """The runtime that torch is built for, `cuda 12.8` or `rocm 6.4`; None if it is built for the
    CPU only."""
    mps: bool
    gpu_obstacle: str | None = None
    """A sentence that says why a GPU of this machine is left out of `gpus`; None if none is left
    out."""

    def gpu(self, device: torch.device) -> GpuCapabilities:
        """Return the GPU with `device`'s index (0 if it has none). Raises ConfigError if
        there are fewer GPUs."""
        index = device.index or 0
        if index >= len(self.gpus):
            why = "" if self.gpu_obstacle is None else f": {self.gpu_obstacle}"
            raise ConfigError(f"{device} is not here: this machine has {len(self.gpus)}{why}")
        return self.gpus[index]


Compiled = Literal["kernels in C++", "Inductor's C++", "Inductor's Triton"]
"""The name of a step's compiled code: the fused step's kernels on a CPU, or the code that
`torch.compile` generates for the plain model, in C++ on a CPU and in Triton on a GPU."""


@dataclass(frozen=True)
class Compiler:
    """The compiler command that `torch.compile` calls (None if there is none), whether it works,
    and why or why not."""

    command: str | None
    works: bool
    reason: str
    makes: Compiled | None = None
    """The name of the code that it compiles for a step; None for what `torch.compile` generates."""


def machine_capabilities(root: Path = Path("/")) -> Capabilities:
    """Return this machine's Capabilities, read from torch and the kernel's files. Nothing is
    compiled, and nothing is allocated on a device. root: where /proc and /dev are."""
    runtime = None
    if torch.version.hip:
        runtime = f"rocm {torch.version.hip}"
    elif torch.version.cuda:
        runtime = f"cuda {torch.version.cuda}"
    gpus, obstacle = _usable_gpus()
    if not gpus and obstacle is None and runtime is not None:
        obstacle = _driver_obstacle(runtime, root)
    about = _about_processor(root)
    flags = about.get("flags", about.get("Features", "")).split()  # x86's word, and ARM's
    cpu = CpuCapabilities(
        name=macos.chip() or _processor_name(about, root),
        n_cores=n_usable_cores(),
        n_threads=torch.get_num_threads(),
        amx_bf16="amx_bf16" in flags,
        avx512_bf16="avx512_bf16" in flags,
        vector=torch.backends.cpu.get_cpu_capability(),
        arm_bf16="bf16" in flags,
    )
    return Capabilities(cpu, gpus, runtime, torch.backends.mps.is_available(), obstacle)


def _usable_gpus() -> tuple[tuple[GpuCapabilities, ...], str | None]:
    """Return (GPUs that torch can compute on, obstacle). GPUs are listed up to the first that this
    torch has no kernels for, so that their numbers stay torch's. `obstacle` is a sentence that
    names that one; None if there is none."""
    gpus: list[GpuCapabilities] = []
    if not torch.cuda.is_available():
        return (), None
    built_for = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:
            # "gfx942:sramecc+:xnack-": what follows the colon are modes, not the chip
            architecture = str(getattr(properties, "gcnArchName", "gfx")).split(":")[0]
        name = gpu_name(properties.name, architecture)
        if not has_kernels(architecture, built_for):
            older = "" if torch.version.hip else ", such as one for CUDA 12.6,"
            return tuple(gpus), (
                f"{name} ({architecture}) is left out, as this torch, {torch.__version__}, has "
                f"kernels for {', '.join(built_for)} alone: install a build of PyTorch{older} that "
                "has them for it, or leave it out by CUDA_VISIBLE_DEVICES"
            )
        gpus.append(GpuCapabilities(name, architecture, properties.total_memory))
    return tuple(gpus), None


def has_kernels(architecture: str, built_for: Sequence[str]) -> bool:
    """Return whether a build of torch has kernels for a GPU, `sm_86` or `gfx90a`. built_for: the
    architectures in the build, from `torch.cuda.get_arch_list`; an empty list does not say, and
    counts as yes.

    NVIDIA's machine code (`sm_80`) runs from its minor version to the last of its major one, code
    with an `a` on its own chip only, and PTX (`compute_80`) on all later ones (CUDA C++ Programming
    Guide, "Binary Compatibility", "PTX Compatibility"). AMD's runs on its own chip, or generic code
    (`gfx11-generic`) on a family.
    """
    if not built_for or {architecture, f"{architecture}a"} & {*built_for}:
        return True
    number = re.fullmatch(r"sm_(\d+)", architecture)
    if number is None:
        return any(each.endswith("-generic") for each in built_for)
    wanted = int(number[1])
    for kind, digits in re.findall(r"\b(sm|compute)_(\d+)f?\b", " ".join(built_for)):
        same_major = int(digits) // 10 == wanted // 10
        if int(digits) <= wanted and (same_major or kind == "compute"):
            return True
    return False


_OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""CUDA's major version → the oldest NVIDIA driver for it (CUDA Toolkit Release Notes, "CUDA minor
version compatibility")."""


def _driver_obstacle(runtime: str, root: Path) -> str | None:
    """Return a sentence that says why torch, built for `runtime`, finds no GPU although the system
    shows an NVIDIA one. None if it shows none, or CUDA_VISIBLE_DEVICES is set, which may hide
    it."""
    shown = any((root / "dev").glob("nvidia[0-9]*"))
    shown = shown or (root / "usr/lib/wsl/lib/nvidia-smi").exists()  # WSL has no such file in /dev
    if not runtime.startswith("cuda") or not shown or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    version = ""
    with suppress(OSError):  # WSL's driver is that of Windows
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")
        version = next(iter(re.findall(r"\s(\d+\.[\d.]+)\s", text)), "")
    oldest = _OLDEST_DRIVERS.get(runtime.removeprefix("cuda ").partition(".")[0])
    begins = f"torch, built for {runtime}, cannot use the NVIDIA GPU of this machine"
    if oldest is None or (version and int(version.partition(".")[0]) >= oldest):
        return f"{begins}, whose driver is {version or 'not known'}: does nvidia-smi show it?"
    has = f"this one is {version}" if version else "is this one older?"
    return (
        f"{begins}: it needs driver {oldest} or newer, {has}. Update the driver, or install a "
        "build of PyTorch for an older CUDA"
    )


_ARM_CORES = {
    ("0x41", "0xd08"): "ARM Cortex-A72",
    ("0x41", "0xd0b"): "ARM Cortex-A76",
    ("0x41", "0xd0c"): "ARM Neoverse N1",
    ("0x41", "0xd40"): "ARM Neoverse V1",
    ("0x41", "0xd49"): "ARM Neoverse N2",
    ("0x41", "0xd4f"): "ARM Neoverse V2",
}
"""(implementer, part) in an ARM's /proc/cpuinfo → its cores (Linux, arch/arm64/include/asm/
cputype.h)."""


def _about_processor(root: Path) -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; none where there is no /proc."""
    with suppress(OSError):
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        fields = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
        return {key.strip(): value.strip() for key, _, value in fields}
    return {}


def _processor_name(about: Mapping[str, str], root: Path) -> str:
    """Return the processor's name, from `about`, the fields of /proc/cpuinfo: x86's own. ARM has
    none there, so it is the board's, or the cores'."""
    if "model name" in about:
        return about["model name"]
    with suppress(OSError):  # "Raspberry Pi 5 Model B Rev 1.0\0"
        model = (root / "proc/device-tree/model").read_text(errors="replace").strip("\0\n ")
        if model:
            return model
    maker, part = about.get("CPU implementer", ""), about.get("CPU part", "")
    if part:
        return _ARM_CORES.get((maker, part), f"ARM CPU part {part} of implementer {maker}")
    return platform.processor() or platform.machine()


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


_OWN_CONTEXT_BYTES = 500_000_000
"""GPU bytes that the driver takes for this process, beside its tensors; an A100 and an H100 show as
many."""


def held_by_others(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that other processes hold now, such as a desktop's screen
    or another run, to some 100 MB; 0 for any other device."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + _OWN_CONTEXT_BYTES
    return max(0, total - free - own)


_TRITON_CAPABILITY = 70
"""Least CUDA compute capability, times ten, that Triton generates kernels for."""


def find_compiler(device: torch.device, capabilities: Capabilities | None = None) -> Compiler:
    """Return the compiler that `torch.compile` calls for a device, and whether it works. That is
    found out by compiling and running a small function, in the folder and with the headers that a
    run will use. The first time this takes some 8 s on a CPU; most of it is saved when a run
    compiles later.

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
    # A precompiled header takes 5 s and 155 MB, and what is built once is built sooner without.
    options = {"cpp.cxx": (None, command), "cpp_cache_precompile_headers": False}
    return _tried(device, command, f"{command} builds", options)


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
    said = _launcher_error(command)
    if said is not None:
        return Compiler(command, False, f"{command} builds no launcher for triton: {said}")
    return _tried(device, command, f"triton with {command}", {})


def _launcher_error(command: str) -> str | None:
    """Return why `command` cannot build what Triton launches kernels with, a C library that
    includes Python.h, with a remedy; None if it can. Triton's own error says neither: it leaves the
    compiler's words to stderr."""
    # Triton's folder of headers, also where the system's Python has another by default (Debian's).
    headers = sysconfig.get_path("include", "posix_prefix")
    with tempfile.TemporaryDirectory() as folder:
        built = [f"-I{headers}", "-shared", "-fPIC", "-o", f"{folder}/launcher.so"]
        done = subprocess.run(
            [command, "-x", "c", "-", *built],
            input="#include <Python.h>\n",
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode == 0:
        return None
    said = compiler_error(done.stderr or f"exit code {done.returncode}")
    return f"{said} ({_remedy(said)})"


def _first_found(variable: str, names: tuple[str, ...]) -> str | None:
    """Return the compiler that the environment variable `variable` names, if it is set, else the
    first in `names` that is on the PATH; None if it cannot be found."""
    named = os.environ.get(variable, "").strip()
    return next(filter(shutil.which, [named] if named else names), None)


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def _tried(device: torch.device, command: str, how: str, options: dict[str, Any]) -> Compiler:
    """Have `torch.compile` build and run a small function, and return its compiler with the result.
    how: the reason to give if it works. options: those of `torch.compile`."""
    # With its own code, as PyTorch compiles the same code for few sets of options.
    probe = FunctionType(_probe.__code__.replace(), _probe.__globals__)
    try:
        compiled = torch.compile(probe, fullgraph=True, dynamic=False, options=options)
        wrong = compiled(torch.ones(64, device=device)).sum().item() != 3 * 64
    except Exception as error:  # the compiler's, the linker's, the disk's: all say that it cannot
        said = compiler_error(error)
        reason = f"{command} builds nothing that runs: {said} ({_remedy(said)})"
        return Compiler(command, False, reason)
    if wrong:
        return Compiler(command, False, f"{command} builds what computes wrong numbers")
    return Compiler(command, True, how)


_NEEDED = "whose path has no blank, whose disk has room for 1 GB and lets programs run"


def _remedy(said: str) -> str:
    """Return advice for the user on a failed compilation; `said` is what the compiler printed."""
    if "Python.h" in said:
        return "install the Python headers: python3-dev, python3-devel or conda's python"
    if "libcuda" in said:
        return "have the system's loader find the driver's libcuda.so.1: /sbin/ldconfig, as root"
    if any(word in said for word in ("openmp", "omp.h", "lomp")):  # as Apple's has none
        return "install OpenMP, on macOS by `brew install libomp`"
    # PyTorch sets it as it looks for its folder, which is in TMPDIR and has the user's name.
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    return f"set TORCHINDUCTOR_CACHE_DIR or TMPDIR, now {folder}, to a folder {_NEEDED}"


def compiler_error(error: Exception | str) -> str:
    """Return the line of a failed compilation's error that says what is wrong: the compiler's first
    error, else the exception at the end of a traceback from PyTorch's compiler processes, else the
    first line. PyTorch prints many more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if " error: " in line]
    if any(line.startswith("Traceback (most recent") for line in lines):
        said += [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)][-1:]
    first = (said or lines or [type(error).__name__])[0]
    return first.partition(".  ")[0][:_LONGEST_ERROR]


_LONGEST_ERROR = 300
