"""A Cluster (the planner's description of devices and links) for the machines that this run uses:
GPUs by driver name, else this machine as measured by `doctor --measure`, else typical CPU
figures."""

from __future__ import annotations

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
from pentameter.machine.cores import host_memory_bytes

if TYPE_CHECKING:
    from pentameter.machine.capabilities import Capabilities

CORE_TFLOPS = {"fp32": 0.08, "bf16": 0.03, "fp64": 0.04}
CORE_TFLOPS_BF16 = 0.4
"""TFLOP/s per core in bf16 matmuls with hardware for them; CORE_TFLOPS without
(benchmarks/measurements/README.md: 0.33 TFLOP/s in fp32 and 0.78 to 2.2 in bf16 on two cores)."""
CORE_BYTES_PER_SECOND = 8e9
SHARED_MEMORY_BYTES_PER_SECOND = 2e9


def this_cluster(world_size: int, local_size: int) -> tuple[Cluster, bool]:
    """Return (Cluster, whether its figures are published or measured rather than typical) for
    `world_size` processes, `local_size` per machine.

    Published figures are taken for a known GPU. Those that `doctor --measure` saved are taken
    without GPUs, if all processes are on this machine. In all other cases they are typical for a
    CPU with this many cores.
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
