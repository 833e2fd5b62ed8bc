"""The `auto` settings resolved on this machine, each with its reason: device, precision,
compilation, asynchronous checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal, get_args

import torch

from pentameter.config.choices import Precision, refuse_unknown
from pentameter.errors import ConfigError
from pentameter.machine.capabilities import (
    Capabilities,
    Compiled,
    Compiler,
    GpuCapabilities,
    find_compiler,
    machine_capabilities,
)
from pentameter.machine.peaks import peak_flops
from pentameter.planning.auto_precision import auto_precision

_PRECISIONS: tuple[str, ...] = get_args(Precision)
# AMD chips whose matrix units take bf16; MI300's (gfx942) also take tf32, which MI350's (gfx950)
# have no units for.
_ROCM_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_ROCM_TF32 = ("gfx94",)

COMPILE_SECONDS: dict[Compiled, float] = {
    # The quickstart's on two cores: 3.6 s to build, 0.2 to check them, or 7.0 s of one core.
    "kernels in C++": 8.0,
    # 30 to 60 s for models that the fused step does not know, on two cores.
    "Inductor's C++": 40.0,
    # The character GPT: 40 s on an H100, on an H200 28 until after its first step.
    "Inductor's Triton": 40.0,
}
"""Seconds of compiling by the name of a step's compiled code, for `compile = "auto"`, with an empty
cache: a choice that went by the cache would not be the same when a run is resumed. Figures are in
`benchmarks/measurements/startup.md` and `gpu.md`."""
# The share of an uncompiled step that compiling saves, on the careful side of what the character
# GPT shows on two CPU cores.
COMPILE_SAVING = 0.5
# FLOP/s that uncompiled training sustains, to tell a long run from a short one: per CPU core
# (a small model on two cores with AMX: 0.07 TFLOP/s; the character GPT in fp32: 0.13), per GPU.
_EAGER_CORE_BF16 = 0.05e12
_EAGER_CORE_FP32 = 0.07e12
_EAGER_GPU = 50e12
_EAGER_SHARE_OF_PEAK = 0.3


def choose_device(name: str, capabilities: Capabilities | None = None) -> torch.device:
    """Return the device that `train.device` names: `auto` is CUDA or ROCm, else MPS, else the CPU.
    Raises ConfigError, listing the devices present, if the machine lacks it.

    capabilities: this machine's, by default looked up.
    """
    capabilities = capabilities or machine_capabilities()
    present = ["cpu"]
    if capabilities.mps:
        present.insert(0, "mps")
    if capabilities.gpus:
        present.insert(0, "cuda")
    if name == "auto":
        return torch.device(present[0])
    if name in present:
        return torch.device(name)
    why = ""
    if name == "cuda" and capabilities.gpu_obstacle is not None:
        why = f": {capabilities.gpu_obstacle}"
    elif name == "cuda" and capabilities.gpu_runtime is None:
        why = f" (this torch, {torch.__version__}, is built without CUDA and ROCm)"
    elif name == "mps" and sys.platform != "darwin":
        why = " (MPS is Apple's)"
    raise ConfigError(
        f"train.device={name} is not on this machine{why}; present: {', '.join(present)}. "
        "Name one of these, or auto"
    )


def choose_precision(
    setting: str,
    device: torch.device,
    capabilities: Capabilities | None = None,
    *,
    key: str = "train.precision",
) -> tuple[str, str]:
    """Return (precision, reason): the matmul precision (`bf16`) that `setting`, the value of `key`,
    means on `device`, and the reason in words.

    `auto` is bf16 if the hardware multiplies it faster than fp32 (AMX or AVX-512 BF16 on a CPU,
    sm_80 and later, AMD's matrix units), fp16 on older tensor cores, else fp32. capabilities: this
    machine's, by default looked up. Raises ConfigError, listing the possible ones, if the device
    lacks the precision.
    """
    capabilities = capabilities or machine_capabilities()
    if device.type == "cuda":
        supported, faster, reason = _gpu_precisions(capabilities.gpu(device))
    elif device.type == "mps":
        supported, faster = ("fp32", "bf16", "fp16"), ()
        reason = "on MPS fp32 is the safe choice; bf16 can be asked for"
    else:
        supported = tuple(each for each in _PRECISIONS if each != "tf32")
        faster = ("bf16",) if capabilities.cpu.fast_bf16 else ()
        if capabilities.cpu.amx_bf16:
            reason = "this CPU multiplies bf16 matrices in hardware (AMX)"
        elif capabilities.cpu.avx512_bf16:
            reason = "this CPU multiplies bf16 in hardware (AVX-512 BF16)"
        elif capabilities.cpu.arm_bf16:
            reason = "whether this CPU's bf16 instructions (ARM's) are faster is not known here"
        else:
            reason = "this CPU has neither AMX, AVX-512 BF16 nor ARM's, so bf16 would be slower"
    best = auto_precision(faster)
    if setting == "auto":
        return best, reason
    if setting not in supported:
        raise ConfigError(
            f"{key}={setting} is not possible on {device.type} ({reason}); "
            f"possible: {', '.join(supported)}, auto"
        )
    note = ""
    if emulates(setting, device, capabilities):
        note = "; this CPU emulates it, slower than fp32"
    elif setting == "fp16" and best == "fp32" and device.type == "cuda":
        note = f"; {reason}: it halves activations, and need not be faster than fp32"
    return setting, f"asked for{note}"


def emulates(precision: str, device: torch.device, capabilities: Capabilities) -> bool:
    """Return whether `device` computes matmuls in `precision` by converting the inputs to fp32, so
    that fp32's peak is the limit. A CPU does so for fp16, and for bf16 if it has no hardware for
    it."""
    if device.type != "cpu":
        return False
    has_bf16 = capabilities.cpu.fast_bf16 or capabilities.cpu.arm_bf16
    return precision == "fp16" or (precision == "bf16" and not has_bf16)


def _gpu_precisions(gpu: GpuCapabilities) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return (supported, fast, reason) for a GPU: the precisions that it supports, those of 16 bits
    that its matrix units multiply fast, and a phrase that says why."""
    chip = f"{gpu.name}, {gpu.architecture}"
    if gpu.architecture.startswith("gfx"):  # AMD
        if not gpu.architecture.startswith(_ROCM_BF16):
            return ("fp64", "fp32", "fp16"), ("fp16",), f"{chip} has no bf16 matrix units"
        tf32 = ("tf32",) if gpu.architecture.startswith(_ROCM_TF32) else ()
        supported = ("fp64", "fp32", *tf32, "bf16", "fp16")
        return supported, ("bf16", "fp16"), f"{chip} has bf16 matrix units"
    capability = gpu.compute_capability
    assert capability is not None
    if capability >= 80:
        return _PRECISIONS, ("bf16", "fp16"), f"{chip} has bf16 tensor cores"
    if capability >= 70:
        reason = f"{chip} has fp16 tensor cores and no bf16"
        return ("fp64", "fp32", "fp16"), ("fp16",), reason
    return ("fp64", "fp32", "fp16"), (), f"{chip} has no tensor cores"


def choose_compile(
    setting: Literal["auto"] | bool,
    device: torch.device,
    *,
    total_flops: float,
    precision: str | None = None,
    capabilities: Capabilities | None = None,
    makes: Compiled | None = None,
    find: Callable[[torch.device, Capabilities], Compiler] | None = None,
) -> tuple[bool, str]:
    """Return (whether to compile the step, the reason in words). Nothing is compiled here but what
    `find` tries.

    setting: `train.compile`. `auto` compiles if a compiler works and the saved time of the whole
    run, `total_flops`, exceeds the COMPILE_SECONDS of what is compiled. The rest of the run does
    not count by itself, so that a resumed run chooses the same. precision: from `choose_precision`;
    None for its `auto`. capabilities: this machine's, by default looked up. makes: what is to be
    compiled; by default what `torch.compile` makes for the device. find: finds and tries the step's
    compiler, which may have to make what takes longer; by default `find_compiler`, that of
    `torch.compile`. Raises ConfigError if `setting` is True and no compiler works.
    """
    capabilities = capabilities or machine_capabilities()
    find = find or find_compiler
    match setting:
        case False:
            return False, "switched off"
        case True:
            compiler = find(device, capabilities)
            if compiler.works:
                return True, f"asked for; {compiler.reason}"
            raise ConfigError(
                f"train.compile=true cannot be: {compiler.reason}. Or set it to false"
            )
        case "auto":
            seconds = total_flops / _eager_flops(device, precision, capabilities)
            by_torch: Compiled = "Inductor's C++" if device.type == "cpu" else "Inductor's Triton"
            if (short := _too_short(seconds, makes or by_torch)) is not None:
                return False, short
            compiler = find(device, capabilities)
            if compiler.works and (short := _too_short(seconds, compiler.makes or by_torch)):
                return False, short
            return compiler.works, compiler.reason
        case unknown:
            refuse_unknown(unknown, "train.compile", "the engine")


def _too_short(seconds: float, makes: Compiled) -> str | None:
    """Return a phrase that says why a run that takes so many seconds uncompiled is too short to be
    compiled; None if it is not."""
    compiling = COMPILE_SECONDS[makes]
    if seconds * COMPILE_SAVING >= compiling:
        return None
    return (
        f"the run is too short (about {seconds:.0f} s) to earn back {compiling:.0f} s of compiling"
    )


def choose_asynchronous(
    setting: Literal["auto"] | bool, needed_bytes: int, host_bytes: int | None
) -> bool:
    """Return whether to write checkpoints while training goes on. `setting` is
    `checkpoint.asynchronous`: a bool decides; `auto` says yes unless the machine's memory is known
    and too small. needed_bytes: bytes that all processes on this machine need while they save.
    host_bytes: this machine's memory, None if not known."""
    match setting:
        case bool():
            return setting
        case "auto":
            return host_bytes is None or needed_bytes <= host_bytes
        case unknown:
            refuse_unknown(unknown, "checkpoint.asynchronous", "the trainer")


def _eager_flops(device: torch.device, precision: str | None, capabilities: Capabilities) -> float:
    """Return the FLOP/s to expect from uncompiled training on `device` in `precision`; None stands
    for its `auto`. The figures come from tables, so that a machine always gets the same one."""
    if precision is None:
        precision = choose_precision("auto", device, capabilities)[0]
    if device.type == "cpu":
        fast = precision == "bf16" and capabilities.cpu.fast_bf16
        return capabilities.cpu.n_cores * (_EAGER_CORE_BF16 if fast else _EAGER_CORE_FP32)
    if device.type == "cuda" and capabilities.gpus:
        peak = peak_flops(capabilities.gpus[device.index or 0].name, precision)
        if peak is not None:
            return _EAGER_SHARE_OF_PEAK * peak
    return _EAGER_GPU
