"""A run's choices for this machine (device, precision, compilation, kernels), each with its
reason."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
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
    precision, precision_reason = world.on_main(
        lambda: choose_precision(train.precision, device, capabilities)
    )
    choosing = _Choosing(plan, world, capabilities, device, precision)
    compiled, compile_reason = world.on_main(choosing.compilation)
    if compiled:
        compiled, compile_reason = min(world.all_gather(choosing.compilation()))
    native_kernels: tuple[native.Name, ...] = ()
    forms = PLAIN_FORMS
    if device.type != "cpu":  # before trials, and before measuring a GPU whose peak is not known
        set_matmul_precision(train.matmul_precision, precision)
    if train.matmuls is not None:
        choosing.check_matmuls(train.matmuls)
    if device.type == "cuda" and plan.built_by is None:
        forms = choosing.tried_forms()
    if device.type == "cpu":
        tune_allocator(sparing=plan.layout.zero > 0)
        if compiled:
            how, native_kernels = choosing.loaded_kernels()
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


@dataclass(frozen=True, eq=False)
class _Choosing:
    """Chooses compilation and kernels for `plan` on this rank's `device`, which computes in
    `precision`. `capabilities` are the machine's."""

    plan: Plan
    world: World
    capabilities: Capabilities
    device: torch.device
    precision: str

    @cached_property
    def products(self) -> torch.dtype:
        """The dtype in which the run multiplies."""
        return arithmetic(self.precision).products

    @cached_property
    def load(self) -> Callable[[native.Name], str | None]:
        """The function that loads a library of kernels, or returns why not; once for each, as a
        compiler that fails takes seconds."""
        return cache(lambda name: native.load(name, self.capabilities))

    def compilation(self) -> tuple[bool, str]:
        """Return whether to compile the step, and the reason in words. With `train.compile` = auto,
        the time to compile is weighed against the run's FLOPs per GPU, or on CPUs per machine."""
        plan, world = self.plan, self.world
        obstacle = compile_obstacle(plan.layout)
        if obstacle is not None:
            return False, obstacle
        n_devices = world.size if self.device.type == "cuda" else world.size // world.local_size
        makes = self._makes()
        return choose_compile(
            plan.config.train.compile,
            self.device,
            total_flops=plan.total_tokens * plan.least_flops_per_token / max(1, n_devices),
            precision=self.precision,
            capabilities=self.capabilities,
            makes=makes,
            find=partial(self._find_compiler, makes),
        )

    def _find_compiler(
        self, makes: Compiled | None, device: torch.device, capabilities: Capabilities
    ) -> Compiler:
        """Return the compiler of the fused step's C++ kernels if it builds them on this CPU, else
        that of `torch.compile`, tried out. A fused step asks `torch.compile` only for kernels that
        the C++ does not take, and each of these is tried, and left to PyTorch, by itself."""
        command = compiler_command()
        takes = self._is_fused and "vector" in self._wanted_kernels
        if command is None or not takes or self.load("vector") is not None:
            return find_compiler(device, capabilities)
        return Compiler(command, True, f"{command} builds", makes)

    def _makes(self) -> Compiled | None:
        """Return "kernels in C++" if these are all that a compiled step needs, as far as can be
        said without building them; else None."""
        model = self.plan.config.model
        if not self._is_fused or "vector" not in self._wanted_kernels:
            return None
        widths = (*native.vector_widths(model).values(), model.head_channels)
        if any(width % native.CHANNELS for width in widths) or model.context_length % 32:
            return None
        obstacle = native.machine_obstacle("vector", self.capabilities)
        return "kernels in C++" if obstacle is None else None

    @property
    def _is_fused(self) -> bool:
        return self.device.type == "cpu" and self.plan.fused_obstacle is None

    @cached_property
    def _wanted_kernels(self) -> list[native.Name]:
        """The libraries of C++ kernels that compute in a fused step's dtypes and widths."""
        wanted = [name for name, dtypes in native.DTYPES.items() if self.products in dtypes]
        widths = native.vector_widths(self.plan.config.model).values()
        if "vector" in wanted and all(width % native.CHANNELS for width in widths):
            wanted.remove("vector")
        return wanted

    def loaded_kernels(self) -> tuple[str, tuple[native.Name, ...]]:
        """Load the C++ kernels for a compiled step on a CPU, and check each compiled part against
        PyTorch's own results. Return (a phrase to append to the reason for compiling, the names of
        the loaded kernels). Collective: all ranks use a kernel, or none does."""
        plan, model = self.plan, self.plan.config.model
        if (obstacle := plan.fused_obstacle) is not None:
            return f"; the plain model as a whole, as the fused step does not know {obstacle}", ()
        missing = {name: self.load(name) for name in self._wanted_kernels}
        everywhere = self.world.all_gather(missing)
        for name in missing:
            reasons = [each[name] for each in everywhere if each[name] is not None]
            if reasons:
                native.unload(name)  # it rounds differently from the kernels on the other ranks
                missing[name] = reasons[0]
        levels = rehearse(model, self.products, plan.micro_batch_size, self.capabilities)
        wrong = settle(self.world.all_gather(levels), self.capabilities)
        served = tuple(
            name for name, why in missing.items() if why is None and native.is_loaded(name)
        )
        how = f"; with {' and '.join(served)} kernels" if served else ""
        obstacle = attention_obstacle(model) if "AMX" in served else None
        how += f", but not for attention: {obstacle}" if obstacle else ""
        how += "".join(f"; {reason}" for reason in missing.values() if reason is not None) + wrong
        widths = native.vector_widths(model)
        odd = [f"model.{key}={width}" for key, width in widths.items() if width % native.CHANNELS]
        if odd and self.products in native.DTYPES["vector"]:
            how += f"; the vector kernels want multiples of {native.CHANNELS}, not {', '.join(odd)}"
        return how, served

    def check_matmuls(self, matmuls: str) -> None:
        """Raise ConfigError if a rank's device cannot multiply in the format `matmuls`
        (`train.matmuls`), or got it wrong in a trial. Collective."""
        device, chip = self.device, None
        if device.type == "cuda":
            chip = self.capabilities.gpu(device).compute_capability
        obstacle = self.world.first(obstacle_of(lambda: fp8_obstacle(self.products, device, chip)))
        if obstacle is not None:
            raise ConfigError(
                f"train.matmuls={matmuls!r} is not possible on "
                f"{device_name(device, self.capabilities)}: {obstacle}; leave it out, or set "
                "train.device='cpu', which emulates it"
            )

    def tried_forms(self) -> GpuForms:
        """Try each faster kernel that a step of a GPT could use on this GPU. Return those whose
        results are right, with the reason for each that is not used. Collective: all ranks use one,
        or none does."""
        model, layout = self.plan.config.model, self.plan.layout
        products, device, gpu = self.products, self.device, self.capabilities.gpu(self.device)
        trials: dict[str, Callable[[], str | None]] = {}
        if model.attention.dropout:
            trials["drops_by_blocks"] = lambda: (
                dropout_kernel_obstacle(model, layout, self.precision)
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
            sizes = (self.plan.vocab_size_padded, model.vocab_size, model.logit_softcap)
            trials["one_pass_loss"] = partial(loss_obstacle, products, device, *sizes)
        if layout.has_ring:
            trials["fused_ring"] = partial(ring_obstacle, model, products, device)
        found = self.world.all_gather({name: obstacle_of(trial) for name, trial in trials.items()})
        obstacles = {
            name: reason for each in found for name, reason in each.items() if reason is not None
        }
        taken = {name: True for name in trials if name not in obstacles}
        return GpuForms(**taken, obstacles=obstacles)
