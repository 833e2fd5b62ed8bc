"""A run's choices for this machine (device, precision, compilation, kernels), each with its
reason."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from pentameter.errors import ConfigError
from pentameter.fused_cpu import native
from pentameter.fused_cpu.amx_attention import attention_obstacle
from pentameter.fused_cpu.rehearsal import rehearse, settle
from pentameter.machine.capabilities import (
    Capabilities,
    Compiled,
    Compiler,
    compiler_command,
    find_compiler,
    machine_capabilities,
)
from pentameter.machine.choices import (
    choose_compile,
    choose_device,
    choose_precision,
    emulates,
)
from pentameter.machine.environment import device_name, environment
from pentameter.machine.fastest_matmul import Ceiling, ceiling
from pentameter.machine.peaks import peak_flops
from pentameter.model.fp8_matmul import fp8_obstacle
from pentameter.model.gpu.forms import (
    PLAIN_FORMS,
    GpuForms,
    loss_obstacle,
    obstacle_of,
    sums_obstacle,
)
from pentameter.model.grouped_matmul import at_once_disagreement, at_once_obstacle
from pentameter.parallel.context.run_attention import chip_obstacle, kernel_obstacle, ring_obstacle
from pentameter.parallel.memory.malloc import tune_allocator
from pentameter.parallel.precision import arithmetic, set_matmul_precision
from pentameter.planning.fused_step import dropout_kernel_obstacle
from pentameter.planning.layouts.layout_checks import compile_obstacle, uncompiled_blocks
from pentameter.planning.plan import Plan
from pentameter.processes.group.join import local_device
from pentameter.processes.group.world import World

Load = Callable[[native.Name], str | None]
"""Loads a library of kernels, or returns why not."""


@dataclass(frozen=True)
class Compute:
    """Device, precision (`bf16`, `fp32`, …), compilation and kernels chosen for one run, with the
    reasons in words. `ceiling_flops` is the FLOP/s of one device that count as an MFU of 1: a GPU's
    published dense peak, else the best matmul rate ever measured on this machine."""

    device: torch.device
    device_name: str
    precision: str
    precision_reason: str
    compiled: bool
    compile_reason: str
    ceiling_flops: float
    native_kernels: tuple[native.Name, ...]
    """Names of the C++ kernel libraries (`fused_cpu/native.py`) that a CPU step uses; results
    depend on them, as they round differently."""
    n_threads: int
    """Threads per process for arithmetic on the CPU."""
    measured: Ceiling | None = None
    """The measured matmul rate; None if a peak is published."""
    measure_again: Callable[[], Ceiling] | None = None
    """A function that measures the matmul rate once more, in this process alone, and returns the
    best so far; None if a peak is published."""
    forms: GpuForms = PLAIN_FORMS
    """Faster forms of operations that a GPU's trials found right, and why others were left."""
    gpu_obstacle: str | None = None
    """The reason that `train.device` = auto took the CPU of a machine with a GPU; else None."""

    def peak_memory_bytes(self) -> int:
        """Return the most memory, in bytes, that this process has held so far: GPU memory allocated
        by PyTorch, or on a CPU resident memory."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB

    def environment(self) -> Mapping[str, Any]:
        """Return the content of environment.json in the run folder: versions, devices and these
        choices."""
        return {
            **environment(self.device),
            "precision": self.precision,
            "compiled": self.compiled,
            "native_kernels": list(self.native_kernels),
            "fused_attention_dropout": self.forms.drops_by_blocks,
            "gpu_forms": self.forms.facts(),
            "n_threads": self.n_threads,
            "ceiling_flops": self.ceiling_flops,
        }


def choose_compute(plan: Plan, world: World | None = None) -> Compute:
    """Choose device, precision, compilation and kernels for `plan` on this machine; on a CPU also
    tune this process's memory allocator. `world` None means a single process.

    Collective: rank 0 chooses precision and compilation for all. If one rank cannot compile or use
    a kernel, no rank does, since different machines must not compute differently.
    """
    world = world or World()
    train = plan.config.train
    capabilities = machine_capabilities()
    device = local_device(choose_device(train.device, capabilities), world)
    n_devices = world.size if device.type == "cuda" else world.size // world.local_size
    precision, precision_reason = world.on_main(
        lambda: choose_precision(train.precision, device, capabilities)
    )

    @cache  # a compiler that fails takes seconds
    def load(name: native.Name) -> str | None:
        return native.load(name, capabilities)

    def compilation() -> tuple[bool, str]:
        return _choose_compile(plan, device, precision, capabilities, n_devices, load)

    compiled, compile_reason = world.on_main(compilation)
    if compiled:
        compiled, compile_reason = min(world.all_gather(compilation()))
    native_kernels: tuple[native.Name, ...] = ()
    forms = PLAIN_FORMS
    if device.type != "cpu":  # before trials, and before measuring a GPU whose peak is not known
        set_matmul_precision(train.matmul_precision, precision)
    if train.matmuls is not None:
        _check_matmuls(train.matmuls, device, precision, capabilities, world)
    if device.type == "cuda" and plan.built_by is None:
        forms = _try_forms(plan, device, precision, capabilities, world)
    if device.type == "cpu":
        tune_allocator(sparing=plan.layout.zero > 0)
        if compiled:
            how, native_kernels = _choose_kernels(plan, precision, capabilities, world, load)
            compile_reason += how
    if compiled and (exception := uncompiled_blocks(plan.config, plan.layout)) is not None:
        compile_reason += f"; {exception}"
    name = device_name(device, capabilities)
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
        measured=measured,
        measure_again=measure_again,
        gpu_obstacle=(
            capabilities.gpu_obstacle if train.device == "auto" and device.type == "cpu" else None
        ),
        forms=forms,
    )


def _choose_compile(
    plan: Plan,
    device: torch.device,
    precision: str,
    capabilities: Capabilities,
    n_devices: int,
    load: Load,
) -> tuple[bool, str]:
    """Return whether to compile the step, and the reason in words. With `train.compile` = auto, the
    time to compile is weighed against the run's FLOPs per device. `n_devices` counts GPUs, or on
    CPUs machines. `load` loads a library of kernels."""
    train = plan.config.train
    obstacle = compile_obstacle(plan.layout)
    if obstacle is not None:
        return False, obstacle
    makes = _makes(plan, device, precision, capabilities)
    return choose_compile(
        train.compile,
        device,
        total_flops=plan.total_tokens * plan.least_flops_per_token / max(1, n_devices),
        precision=precision,
        capabilities=capabilities,
        makes=makes,
        find=partial(_find_compiler, plan, precision, makes, load),
    )


def _find_compiler(
    plan: Plan,
    precision: str,
    makes: Compiled | None,
    load: Load,
    device: torch.device,
    capabilities: Capabilities,
) -> Compiler:
    """Return the compiler of the fused step's C++ kernels if it builds them on this CPU, else that
    of `torch.compile`, tried out. A fused step asks `torch.compile` only for kernels that the C++
    does not take, and each of these is tried, and left to PyTorch, by itself."""
    command = compiler_command()
    fused = device.type == "cpu" and plan.fused_obstacle is None
    takes = fused and "vector" in _wanted_kernels(plan, precision)
    if command is None or not takes or load("vector") is not None:
        return find_compiler(device, capabilities)
    return Compiler(command, True, f"{command} builds", makes)


def _makes(
    plan: Plan, device: torch.device, precision: str, capabilities: Capabilities
) -> Compiled | None:
    """Return "kernels in C++" if these are all that a compiled step of `plan` needs, as far as can
    be said without building them; else None."""
    model = plan.config.model
    if device.type != "cpu" or plan.fused_obstacle is not None:
        return None
    widths = (*native.vector_widths(model).values(), model.head_channels)
    whole = all(width % native.CHANNELS == 0 for width in widths) and not model.context_length % 32
    takes = "vector" in _wanted_kernels(plan, precision) and whole
    if not takes or native.machine_obstacle("vector", capabilities) is not None:
        return None
    return "kernels in C++"


def _wanted_kernels(plan: Plan, precision: str) -> list[native.Name]:
    """Return the libraries of C++ kernels that compute in a fused step's dtypes and widths."""
    products = arithmetic(precision).products
    wanted = [name for name, dtypes in native.DTYPES.items() if products in dtypes]
    widths = native.vector_widths(plan.config.model).values()
    if "vector" in wanted and all(width % native.CHANNELS for width in widths):
        wanted.remove("vector")
    return wanted


def _choose_kernels(
    plan: Plan, precision: str, capabilities: Capabilities, world: World, load: Load
) -> tuple[str, tuple[native.Name, ...]]:
    """Load the C++ kernels for a compiled step on a CPU, and check each compiled part against
    PyTorch's own results. Return (a phrase to append to the reason for compiling, the names of the
    loaded kernels). Collective: all ranks use a kernel, or none does."""
    if (obstacle := plan.fused_obstacle) is not None:
        return f"; the plain model as a whole, as the fused step does not know {obstacle}", ()
    products, model = arithmetic(precision).products, plan.config.model
    widths = native.vector_widths(model)
    odd = [f"model.{key}={width}" for key, width in widths.items() if width % native.CHANNELS]
    wanted = _wanted_kernels(plan, precision)
    missing = {name: load(name) for name in wanted}
    everywhere = world.all_gather(missing)
    for name in wanted:
        reasons = [each[name] for each in everywhere if each[name] is not None]
        if reasons:
            native.unload(name)  # it rounds differently from the kernels on the other ranks
            missing[name] = reasons[0]
    levels = rehearse(model, products, plan.micro_batch_size, capabilities)
    wrong = settle(world.all_gather(levels), capabilities)
    served = tuple(name for name in wanted if missing[name] is None and native.is_loaded(name))
    how = f"; with {' and '.join(served)} kernels" if served else ""
    obstacle = attention_obstacle(model) if "AMX" in served else None
    how += f", but not for attention: {obstacle}" if obstacle else ""
    how += "".join(f"; {reason}" for reason in missing.values() if reason is not None) + wrong
    if odd and products in native.DTYPES["vector"]:
        how += f"; the vector kernels want multiples of {native.CHANNELS}, not {', '.join(odd)}"
    return how, served


def _check_matmuls(
    matmuls: str, device: torch.device, precision: str, capabilities: Capabilities, world: World
) -> None:
    """Raise ConfigError if a rank's device cannot multiply in the format `matmuls`
    (`train.matmuls`), or got it wrong in a trial. Collective."""
    chip = capabilities.gpu(device).compute_capability if device.type == "cuda" else None
    products = arithmetic(precision).products
    obstacle = world.first(obstacle_of(lambda: fp8_obstacle(products, device, chip)))
    if obstacle is not None:
        raise ConfigError(
            f"train.matmuls={matmuls!r} is not possible on {device_name(device, capabilities)}: "
            f"{obstacle}; leave it out, or set train.device='cpu', which emulates it"
        )


def _try_forms(
    plan: Plan, device: torch.device, precision: str, capabilities: Capabilities, world: World
) -> GpuForms:
    """Try each faster kernel that a step of a GPT could use on this GPU. Return those whose results
    are right, with the reason for each that is not used. Collective: all ranks use one, or none
    does."""
    model, layout, gpu = plan.config.model, plan.layout, capabilities.gpu(device)
    products = arithmetic(precision).products
    trials: dict[str, Callable[[], str | None]] = {}
    if model.attention.dropout:
        trials["drops_by_blocks"] = lambda: (
            dropout_kernel_obstacle(model, layout, precision)
            or chip_obstacle(gpu)
            or kernel_obstacle(model, products, device)
        )
    if model.experts.count is not None:
        n_experts = model.experts.count // layout.expert
        width = model.expert_width // layout.expert_tensor
        trials["experts_at_once"] = lambda: (
            at_once_obstacle(model, n_experts, width, products, gpu)
            or at_once_disagreement(n_experts, model.d_model, width, device)
        )
    if products.itemsize == 2:
        trials["precise_sums"] = partial(sums_obstacle, products, device)
    if products.itemsize <= 4 and layout.tensor == 1:  # else ranks shard the vocabulary
        assert model.vocab_size is not None  # resolved
        sizes = (plan.vocab_size_padded, model.vocab_size, model.logit_softcap)
        trials["one_pass_loss"] = partial(loss_obstacle, products, device, *sizes)
    if layout.has_ring:
        trials["fused_ring"] = partial(ring_obstacle, model, products, device)
    found = world.all_gather({name: obstacle_of(trial) for name, trial in trials.items()})
    obstacles = {
        name: reason for each in found for name, reason in each.items() if reason is not None
    }
    taken = {name: True for name in trials if name not in obstacles}
    return GpuForms(**taken, obstacles=obstacles)
