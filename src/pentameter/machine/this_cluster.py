"""The cluster that a run is on: GPUs by the name that their driver gives, else this machine as
`doctor --measure` has measured it, else usual figures of a CPU."""

from __future__ import annotations

from pentameter.disk.cache import cache_folder
from pentameter.machine.capabilities import Capabilities, machine_capabilities
from pentameter.machine.cores import host_memory_bytes
from pentameter.planning.cluster import (
    MEASURED_FILE,
    UNCALIBRATED,
    Cluster,
    Device,
    device_of_driver,
    read_devices,
)

CORE_TFLOPS = {"fp32": 0.08, "bf16": 0.03, "fp64": 0.04}
CORE_TFLOPS_BF16 = 0.4
"""Products of a core, without and with bf16 in hardware (docs/performance.md: 0.33 TFLOP/s in fp32
and 0.78 to 2.2 in bf16 on two cores)."""
CORE_BYTES_PER_SECOND = 8e9
SHARED_MEMORY_BYTES_PER_SECOND = 2e9


def this_cluster(
    world_size: int, local_size: int, capabilities: Capabilities | None = None
) -> tuple[Cluster, bool]:
    """The Cluster of so many processes, `local_size` in each machine, and whether its figures are
    published or measured ones, not usual ones."""
    capabilities = capabilities or machine_capabilities()
    n_nodes = max(1, world_size // local_size)
    shape = {"node_size": local_size, "n_nodes": n_nodes}
    if capabilities.gpus:
        gpu = capabilities.gpus[0]
        device = device_of_driver(gpu.name)
        if device is not None and device.can_be_planned:
            device = device.model_copy(update={"memory_bytes": float(gpu.memory_bytes)})
            return Cluster(device_key=gpu.name, device=device, **shape), True
    measured = cache_folder() / MEASURED_FILE
    if not capabilities.gpus and n_nodes == 1 and measured.is_file():
        (device,) = read_devices(measured).values()
        return Cluster(device_key="this machine", device=device, **shape), True
    return Cluster(device_key="cpu", device=usual_cpu(capabilities), **shape), False


def usual_cpu(capabilities: Capabilities) -> Device:
    """A CPU by its number of cores alone."""
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
