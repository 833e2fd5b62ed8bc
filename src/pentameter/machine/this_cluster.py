"""A Cluster (the planner's description of devices and links) for the machines that this run uses:
GPUs by driver name, else this machine as measured by `doctor --measure`, else typical CPU
figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.disk.cache import cache_folder
from pentameter.estimating.seconds.cluster import (
    MEASURED_FILE,
    UNCALIBRATED,
    Cluster,
    Device,
    device_of_driver,
    parse_cluster,
    read_devices,
)
from pentameter.estimating.seconds.estimate import Estimate
from pentameter.estimating.seconds.step_time import StepTime
from pentameter.machine.cores_and_memory import host_memory_bytes
from pentameter.planning.plan import Plan

if TYPE_CHECKING:
    from pentameter.machine.capabilities import Capabilities

CORE_TFLOPS = {"fp32": 0.08, "bf16": 0.03, "fp64": 0.04}
CORE_TFLOPS_BF16 = 0.4
"""TFLOP/s per core in bf16 matmuls, on a CPU with hardware for them; without, CORE_TFLOPS holds
(benchmarks/measurements/README.md: 0.33 TFLOP/s in fp32 and 0.78 to 2.2 in bf16 on two cores)."""
CORE_BYTES_PER_SECOND = 8e9
SHARED_MEMORY_BYTES_PER_SECOND = 2e9


def this_cluster(world_size: int, local_size: int) -> tuple[Cluster, bool]:
    """Describe the machines that this run is on, as a Cluster for estimates: `world_size`
    processes, `local_size` on each machine. Return (Cluster, True if its figures are published or
    measured, False if they are typical ones).

    Published figures are taken for a known GPU; those that `doctor --measure` saved, if there is no
    GPU and all processes are on this machine. Otherwise they are typical for a CPU with this many
    cores.
    """
    from pentameter.machine.capabilities import machine_capabilities  # it imports torch

    capabilities = machine_capabilities()
    n_nodes = max(1, world_size // local_size)
    shape = {"node_size": local_size, "n_nodes": n_nodes}
    if capabilities.gpus:
        gpu = capabilities.gpus[0]
        device = device_of_driver(gpu.name)
        if device is not None and device.can_be_planned:
            device = device.model_copy(update={"memory_bytes": float(gpu.memory_bytes)})
            return Cluster(device_key=gpu.name, device=device, **shape), True
    measured = None if capabilities.gpus or n_nodes > 1 else _measured_file()
    if measured is not None:
        (device,) = read_devices(measured).values()
        return Cluster(device_key="this machine", device=device, **shape), True
    return Cluster(device_key="cpu", device=typical_cpu(capabilities), **shape), False


SLOW = 1.3
"""Ratio of measured to planned step time above which steps count as slow."""
SlowStepWarning = Callable[[float, float], str | None]
"""Type of a function from the seconds that steps took, and the seconds of these that they waited
for a batch, to a warning; to None if they are as fast as planned."""


def slow_step_warning(
    plan: Plan, precision: str, device_type: str, local_size: int, *, compiled: bool
) -> SlowStepWarning | None:
    """Return a function that warns of a run's steps if they take more than SLOW × their predicted
    time; None if the devices' speed is neither published nor measured.

    precision: the steps' (`bf16`). device_type: `cpu` or `cuda`. local_size: processes per machine.
    compiled: whether `torch.compile` made the steps' kernels.
    """
    cluster, is_known = this_cluster(plan.layout.world_size, local_size)
    device, products = cluster.device, (precision, plan.config.train.matmul_precision)
    is_known = is_known and plan.built_by is None  # operations unknown
    if not is_known or device_type != ("cpu" if device.shared else "cuda"):
        return None
    if device.peak_flops(*products) is None:
        return None
    planned = Estimate(plan, cluster, precision).time
    launches = device_type == "cuda" and not compiled
    return lambda took, waited: (
        slow_step(planned, took, waited, launches=launches)
        if took > SLOW * planned.seconds
        else None
    )


def slow_step(
    planned: StepTime, took: float, waited_for_input: float, *, launches: bool = False
) -> str:
    """Return the warning's text for steps that are slower than predicted.

    planned: the predicted step time in seconds, with its parts: compute, communication, bubble.
    took: the measured seconds per step (a median).
    waited_for_input: the measured seconds per step, included in `took`, spent reading the batch.
    launches: whether the host launches a GPU's operations one by one, as without compiling.

    The text blames the batch if reading it takes more than half the excess, else launching or
    compute or communication.
    """
    late = took - planned.seconds
    waiting = sum(planned.exposed.values())
    said = (
        f"a step takes {took:.3g} s, {took / planned.seconds - 1:.0%} more than the "
        f"{planned.seconds:.3g} s planned ({planned.compute:.3g} s compute, "
        f"{waiting:.3g} s communication"
    )
    if planned.bubble:
        said += f", {planned.bubble:.3g} s of the pipeline's bubble"
    if waited_for_input > late / 2:
        return f"{said}): {waited_for_input:.3g} s of it go to reading the batch"
    if launches:
        return (
            f"{said}): small operations take a GPU less time than its host needs to launch them; "
            "--train.compile true launches fewer, or a larger train.micro_batch_size larger ones"
        )
    part = "compute or communication" if waiting else "compute"
    return f"{said}); the batch is not the reason, {part} is: --profile FIRST:LAST says which"


def measured_cluster() -> Cluster | None:
    """Return a Cluster with one process on this machine, from the figures that `doctor --measure`
    saved; None if it has not been run."""
    measured = _measured_file()
    return None if measured is None else parse_cluster(f"{measured}:1x1")


def _measured_file() -> Path | None:
    measured = cache_folder() / MEASURED_FILE
    return measured if measured.is_file() else None


def typical_cpu(capabilities: Capabilities) -> Device:
    """Return a Device, the planner's description of a processor, with typical figures for this
    CPU's number of cores."""
    cpu = capabilities.cpu
    tflops = {name: each * cpu.n_cores for name, each in CORE_TFLOPS.items()}
    if cpu.fast_bf16:
        tflops["bf16"] = CORE_TFLOPS_BF16 * cpu.n_cores
    return Device(
        name=cpu.name,
        tflops=tflops,
        memory_bytes=float(host_memory_bytes() or 8 << 30),
        memory_bytes_per_second=CORE_BYTES_PER_SECOND * cpu.n_cores,
        link_bytes_per_second=SHARED_MEMORY_BYTES_PER_SECOND,
        network_bytes_per_second=1e9,
        shared=True,
        calibration=UNCALIBRATED,
        source="usual figures of a core; doctor --measure measures this machine",
        date="2026-11",
    )
