"""The cluster that a run is on: GPUs by the name that their driver gives, else this machine as
`doctor --measure` has measured it, else usual figures of a CPU."""

from __future__ import annotations

import datetime
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from pentameter.disk.atomic import make_folder, write_atomic
from pentameter.disk.cache import cache_folder
from pentameter.machine.capabilities import Capabilities, machine_capabilities
from pentameter.machine.choices import tune_allocator
from pentameter.machine.cores import host_memory_bytes
from pentameter.machine.peaks import product_ceiling
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


# -- measuring ----------------------------------------------------------------------------------

TENSOR_BYTES, N_TENSORS = 1 << 21, 64
"""Activations as an operation reads them one after another: more in all than caches hold near a
core, and the result in memory that was just freed."""
MESSAGE_BYTES, SMALL_MESSAGE_BYTES, N_MESSAGES = 1 << 24, 1 << 16, 20
PRODUCT = (2048, 512, 512)
"""Rows and sides of a linear layer's product as small models have them, against the best product
measured."""
ATTENTION = (4, 8, 256, 64)
"""Sequences, heads, tokens and channels of the attention that is timed."""
FILE = """# This machine, as `pentameter doctor --measure` measured it; `pentameter plan` reads it.

[calibrations.measured]
fitted_on = "doctor --measure on this machine"
{shares}
memory_share = 1.0
link_share = 1.0
network_share = 1.0
interference_share = 1.0
kernel_seconds = {kernel_seconds:.3g}
exponential_seconds = {exponential_seconds:.3g}
fresh_bytes_per_second = {fresh:.4g}
hop_seconds = {hop_seconds:.3g}

{precisions}[devices.this-machine]
name = {name}
tflops = {{ {tflops} }}
memory_bytes = {memory_bytes:.6g}
memory_bytes_per_second = {bandwidth:.4g}
link_bytes_per_second = {link:.4g}
shared = true
calibration = "measured"
source = "doctor --measure"
date = "{date}"
"""


def measure_machine(capabilities: Capabilities | None = None) -> Path:
    """The path of the file that describes this machine's CPU now, for `plan` and `--layout best`.

    Takes some ten seconds: products and attention by precision, single elements, a small layer,
    messages between two processes. What other programs take of the machine meanwhile is missing
    from it.
    """
    capabilities = capabilities or machine_capabilities()
    tune_allocator(sparing=True)  # as a run does under ZeRO
    fresh = _fresh_bandwidth()
    tune_allocator()  # as any other
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
    peaks = {name: product_ceiling("cpu", dtype, seconds=1.0) for name, dtype in dtypes.items()}
    shares = {name: _shares(dtype, peaks[name]) for name, dtype in dtypes.items()}
    best = max(("bf16", "fp32"), key=peaks.__getitem__)
    link, hop = _measured_link()
    name = "".join(c for c in capabilities.cpu.name if c.isprintable() and c not in '"\\')
    text = FILE.format(
        shares=shares.pop(best),
        precisions="".join(
            f"[calibrations.measured.precisions.{name}]\n{each}\n\n"
            for name, each in shares.items()
        ),
        kernel_seconds=_kernel_seconds(),
        exponential_seconds=_exponential_seconds(),
        fresh=fresh,
        hop_seconds=hop,
        name=f'"{name}"',
        tflops=", ".join(f"{name} = {flops / 1e12:.4g}" for name, flops in peaks.items()),
        memory_bytes=host_memory_bytes() or 8 << 30,
        bandwidth=_bandwidth(),
        link=link,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )
    make_folder(cache_folder())
    path = cache_folder() / MEASURED_FILE
    write_atomic(path, text.encode())
    return path


def _best_seconds(act: Callable[[], object], seconds: float = 0.3) -> float:
    """The shortest time of an action, repeated for so long."""
    best = math.inf
    act()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return best


def _bandwidth() -> float:
    """Bytes read and written per second by an operation on single elements."""
    tensors = [torch.ones(TENSOR_BYTES // 4) for _ in range(N_TENSORS)]
    seconds = _best_seconds(lambda: [torch.add(each, 1.0) for each in tensors])
    return 2 * TENSOR_BYTES * N_TENSORS / seconds


def _fresh_bandwidth() -> float:
    """Bytes per second of memory that is written to for the first time."""
    seconds = _best_seconds(lambda: torch.ones(TENSOR_BYTES // 4))
    return TENSOR_BYTES / seconds


def _exponential_seconds() -> float:
    """Time of the activation function of one number, with the memory that it is in."""
    tensors = [torch.ones(TENSOR_BYTES // 4) for _ in range(N_TENSORS // 4)]
    gelu = torch.nn.functional.gelu
    return _best_seconds(lambda: [gelu(each) for each in tensors]) / sum(map(len, tensors))


def _kernel_seconds() -> float:
    """Time of a pass of a linear layer of a handful of numbers, with what autograd adds to it."""
    few, weight = (torch.ones(16, 16, requires_grad=True) for _ in range(2))
    return sum(_passes_seconds(torch.nn.functional.linear, few, weight)) / 3


def _passes_seconds(of: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
    """The times of a function's forward and backward pass."""
    y = of(*inputs)
    backward = partial(torch.autograd.grad, y, inputs, y.detach(), retain_graph=True)
    return _best_seconds(partial(of, *inputs)), _best_seconds(backward)


def _shares(dtype: torch.dtype, peak: float) -> str:
    """The shares of a peak that a linear layer's three products reach, and causal attention, whose
    masked half is not counted; and the times of attention's passes, one ÷ the other. In TOML."""
    m, n, k = PRODUCT
    x, weight = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((m, k), (n, k)))
    products = sum(_passes_seconds(torch.nn.functional.linear, x, weight))
    B, H, T, K = ATTENTION
    qkv = [torch.randn(B, T, H, K, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    forward, backward = _passes_seconds(attend, *qkv)
    return (
        f"product_share = {min(1.0, 6 * m * n * k / products / peak):.4g}\n"
        f"attention_share = {min(1.0, 2 * B * H * T * T * K / forward / peak):.4g}\n"
        f"attention_backward = {backward / forward:.4g}"
    )


def _measured_link() -> tuple[float, float]:
    """Bytes per second, and seconds of a small message, between two processes of the machine: those
    of a ring, from all-reduces."""
    with tempfile.TemporaryDirectory(prefix="pentameter-") as folder:
        mp.spawn(_all_reduce, args=(folder,), nprocs=2)
        large, small = map(float, Path(folder, "seconds").read_text().split())
    hop = small / 2  # there and back
    return (MESSAGE_BYTES - SMALL_MESSAGE_BYTES) / max(1e-9, large - small), hop


def _all_reduce(rank: int, folder: str) -> None:
    """One of two processes that time all-reduces of a large and of a small tensor, each after some
    products, as in a step: whoever is done first waits, and is woken. Back to back a message takes
    a fraction of that."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    side = torch.randn(PRODUCT[1], PRODUCT[1])

    def turn(message: torch.Tensor | None) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(N_MESSAGES):
            for _ in range(2):
                torch.mm(side, side)
            if message is not None:
                dist.all_reduce(message)
        return (time.perf_counter() - start) / N_MESSAGES

    products = median(turn(None) for _ in range(5))
    messages = [torch.ones(n // 4) for n in (MESSAGE_BYTES, SMALL_MESSAGE_BYTES)]
    found = [median(turn(message) for _ in range(5)) - products for message in messages]
    if rank == 0:
        Path(folder, "seconds").write_text(" ".join(repr(max(0.0, each)) for each in found))
    dist.destroy_process_group()
