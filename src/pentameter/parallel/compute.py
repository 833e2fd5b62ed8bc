"""The choices of a run for this machine: device, precision, compilation, each with its reason."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pentameter.fused_cpu import native
from pentameter.fused_cpu.amx_attention import attention_obstacle
from pentameter.machine.capabilities import Capabilities, machine_capabilities
from pentameter.machine.ceilings import Ceiling, ceiling
from pentameter.machine.choices import (
    choose_compile,
    choose_device,
    choose_precision,
    emulates,
    tune_allocator,
)
from pentameter.machine.environment import device_name, environment
from pentameter.machine.peaks import peak_flops
from pentameter.model.fused_dropout import chip_obstacle, kernel_obstacle
from pentameter.parallel.precision import arithmetic, set_matmul_precision
from pentameter.planning.fused_step import dropout_kernel_obstacle, fused_obstacle
from pentameter.planning.layout_checks import compile_obstacle
from pentameter.planning.plan import Plan
from pentameter.processes.join import local_device
from pentameter.processes.world import World


@dataclass(frozen=True)
class Compute:
    """The choices of one run. `ceiling_flops` is what MFU is a share of: the published dense peak
    of a GPU, else the best matrix product ever measured on this machine."""

    device: torch.device
    device_name: str
    precision: str
    precision_reason: str
    compiled: bool
    compile_reason: str
    ceiling_flops: float
    native_kernels: tuple[native.Name, ...]
    """The libraries of `fused_cpu/native.py` that the step uses, which round differently."""
    n_threads: int
    """Of each process, for arithmetic on the CPU."""
    fused_dropout: bool = False
    """Whether a GPU drops attention's weights in kernels, and does not write them out."""
    fused_dropout_obstacle: str | None = None
    """Why a GPU that is to drop them writes them out."""
    measured: Ceiling | None = None
    """The measured ceiling; None where a peak is published."""
    measure_again: Callable[[], Ceiling] | None = None
    """Measure it once more, in this process alone, and keep the best; None where a peak is
    published."""

    def peak_memory_bytes(self) -> int:
        """The most memory the run has held so far: the GPU's, or the process's on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB

    def environment(self) -> Mapping[str, Any]:
        """Versions, devices and choices, for environment.json."""
        return {
            **environment(self.device),
            "precision": self.precision,
            "compiled": self.compiled,
            "native_kernels": list(self.native_kernels),
            "fused_attention_dropout": self.fused_dropout,
            "n_threads": self.n_threads,
            "ceiling_flops": self.ceiling_flops,
        }


def choose_compute(plan: Plan, world: World | None = None) -> Compute:
    """The Compute for `plan` on this machine. Tunes the process's memory allocator on a CPU.

    Collective: the main process chooses precision and compilation for all of `world`, and what
    one process cannot do none does, since machines that differ must not compute differently.
    """
    world = world or World()
    train = plan.config.train
    capabilities = machine_capabilities()
    device = local_device(choose_device(train.device, capabilities), world)
    n_devices = world.size if device.type == "cuda" else world.size // world.local_size
    precision, precision_reason = world.on_main(
        lambda: choose_precision(train.precision, device, capabilities)
    )

    def compilation() -> tuple[bool, str]:
        return _choose_compile(plan, device, precision, capabilities, n_devices)

    compiled, compile_reason = world.on_main(compilation)
    if compiled:
        compiled, compile_reason = min(world.all_gather(compilation()))
    native_kernels: tuple[native.Name, ...] = ()
    fused_dropout, obstacle = False, None
    if device.type == "cuda" and plan.built_by is None and plan.config.model.attention_dropout:
        obstacle = _dropout_obstacle(plan, device, precision, capabilities, world)
        fused_dropout = obstacle is None
    if device.type == "cpu":
        tune_allocator(sparing=plan.layout.zero > 0)
        if compiled:
            how, native_kernels = _choose_kernels(plan, precision, capabilities, world)
            compile_reason += how
    name = device_name(device, capabilities)
    if device.type != "cpu":  # what a GPU multiplies in is measured, too, where it is not known
        set_matmul_precision(train.matmul_precision, precision)
    multiplied = "fp32" if emulates(precision, device, capabilities) else precision
    peak = peak_flops(name, precision, train.matmul_precision)
    measured = measure_again = None
    if peak is None:
        measure_again = partial(
            ceiling, name, device, arithmetic(multiplied).products, world.local_size
        )
        measured = measure_again(world.all_gather)
        peak = measured.flops
    return Compute(
        device,
        name,
        precision,
        precision_reason,
        compiled,
        compile_reason,
        peak,
        native_kernels,
        torch.get_num_threads(),
        fused_dropout,
        obstacle,
        measured,
        measure_again,
    )


def _choose_compile(
    plan: Plan,
    device: torch.device,
    precision: str,
    capabilities: Capabilities,
    n_devices: int,
) -> tuple[bool, str]:
    """Whether to compile, and why; `n_devices` share the run's arithmetic (a CPU is one)."""
    train = plan.config.train
    obstacle = compile_obstacle(plan.layout)
    if obstacle is not None:
        return False, obstacle
    return choose_compile(
        train.compile,
        device,
        total_flops=plan.total_tokens * plan.least_flops_per_token / max(1, n_devices),
        precision=precision,
        capabilities=capabilities,
    )


def _choose_kernels(
    plan: Plan, precision: str, capabilities: Capabilities, world: World
) -> tuple[str, tuple[native.Name, ...]]:
    """How a compiled step is computed on a CPU, a phrase for the reason of compiling, and the
    native kernels that serve it. Collective: they serve all processes of `world` or none."""
    obstacle = fused_obstacle(plan.config, plan.layout, plan.built_by)
    if obstacle is not None:
        return f"; the plain model as a whole, as the fused step does not know {obstacle}", ()
    products, model = arithmetic(precision).products, plan.config.model
    odd = native.odd_widths(model)
    wanted = [name for name, dtypes in native.DTYPES.items() if products in dtypes]
    if len(odd) == 2 and "vector" in wanted:
        wanted.remove("vector")
    missing = {name: native.load(name, capabilities) for name in wanted}
    everywhere = world.all_gather(missing)
    for name in wanted:
        reasons = [each[name] for each in everywhere if each[name] is not None]
        if reasons:
            native.unload(name)  # it rounds differently from what the others compute with
            missing[name] = reasons[0]
    served = tuple(name for name in wanted if missing[name] is None)
    how = f"; with {' and '.join(served)} kernels" if served else ""
    obstacle = attention_obstacle(model) if "AMX" in served else None
    how += f", but not for attention: {obstacle}" if obstacle else ""
    how += "".join(f"; {reason}" for reason in missing.values() if reason is not None)
    if odd and products in native.DTYPES["vector"]:
        how += f"; the vector kernels want multiples of {native.CHANNELS}, not {', '.join(odd)}"
    return how, served


def _dropout_obstacle(
    plan: Plan, device: torch.device, precision: str, capabilities: Capabilities, world: World
) -> str | None:
    """What keeps the kernels from dropping attention's weights on a GPU; None where they do, having
    agreed with the weights written out. Collective: they serve all processes of `world` or none.
    """
    model = plan.config.model
    obstacle = dropout_kernel_obstacle(model, plan.layout, precision)
    if obstacle is not None:
        return obstacle
    obstacle = chip_obstacle(capabilities.gpu(device))
    if obstacle is None:
        set_matmul_precision(plan.config.train.matmul_precision, precision)
        obstacle = kernel_obstacle(model, arithmetic(precision).products, device)
    return next((each for each in world.all_gather(obstacle) if each is not None), None)
