"""Measure this machine's CPU for `doctor --measure`, as a description that `plan` and
`--layout best` read instead of typical figures.

Operations are timed in isolation, as PyTorch and the fused step (training's hand-written CPU
kernels) compute them; then steps with a small model, which show how much slower operations are
within a step, because each finds the caches filled by the others.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.config.files.write import toml_value
from pentameter.config.schema import Config
from pentameter.config.tables import packaged_table
from pentameter.data.batches.step import Batch
from pentameter.disk.atomic import make_folder, write_atomic
from pentameter.disk.cache import cache_folder
from pentameter.disk.lock import scratch_folder
from pentameter.errors import ConfigError
from pentameter.estimating.seconds.cluster import (
    MEASURED_FILE,
    Calibration,
    Cluster,
    Device,
    ProductShares,
)
from pentameter.estimating.seconds.estimate import make_estimate
from pentameter.fused_cpu import native
from pentameter.fused_cpu.functions import (
    AmxAttention,
    AmxFeedForward,
    CausalAttention,
    FeedForward,
)
from pentameter.fused_cpu.heads import HeadShape
from pentameter.machine.capabilities import Capabilities, find_compiler, machine_capabilities
from pentameter.machine.child import PythonChild
from pentameter.machine.cores_and_memory import host_memory_bytes
from pentameter.machine.peaks import measure_matmul, shortest_seconds
from pentameter.parallel.assemble import assemble
from pentameter.parallel.memory.malloc import tune_allocator
from pentameter.planning.plan import Plan, make_plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
TENSOR_BYTES, N_TENSORS = 1 << 21, 64
"""Bytes in each tensor, and number of tensors, that a timed operation reads one after another: in
total more than the caches near a core hold, with results in recently freed memory."""
MESSAGE_BYTES, SMALL_MESSAGE_BYTES, N_MESSAGES = 1 << 24, 1 << 16, 20
PRODUCT = (2048, 512, 512)
"""A linear layer's matmul as in small models, (rows, outputs, inputs), whose speed is compared with
the fastest matmul measured."""
FEED_FORWARD = (4096, 512, 2048)
"""(Token rows, d_model, d_ff) with which the fused feed-forward layer is timed."""
ATTENTION = (4, 8, 256, 64)
"""(Sequences, heads, tokens, head size) with which attention is timed."""
STEP_ROWS = (1, 8)
"""Sequences per micro-batch in the timed steps: few in the one, many in the other."""
SHORT, LONG = 1e-12, 1e-4
"""Two minimum times per operation, in seconds. From the planner's estimates for both follows how
many operations it counts in a step."""
LEAST_TURNS = 5
STEP_SECONDS = 1.5
"""Seconds for which each kind of step (precision, size, fused or not) is repeated."""
MEASURED_SPREAD = (0.95, 1.1)
"""(Least, most) measured ÷ planned seconds of a step, which four in five cases of
benchmarks/plan_truth.py were between, rounded outwards (benchmarks/measurements/planner.md has the
twenty)."""
LARGEST_SHARE = 4.0
"""Largest credible `step_share`, the ratio of isolated to in-step operation times. A larger one, or
one below 1 / LARGEST_SHARE, means that other programs disturbed the measurement."""


def measure_machine() -> Path:
    """Measure this machine's CPU, and return the path of the TOML file in the cache folder to which
    the figures were written, for `plan` and `--layout best` to read.

    Takes a minute, and half a minute more if the fused step is not compiled yet. Resources that
    other programs use meanwhile are missing from the figures. Raises ConfigError, and leaves an
    older file as it is, if timed steps show that other programs keep the machine busy.
    """
    device = measured_device(machine_capabilities())
    make_folder(cache_folder())
    path = cache_folder() / MEASURED_FILE
    write_atomic(path, "\n".join(_file(device)).encode())
    return path


def measured_device(capabilities: Capabilities) -> Device:
    """Measure this machine's CPU, and return its figures (FLOP/s, bandwidths, memory and measured
    efficiencies) as a Device, the planner's term for a processor. The figures are not saved.

    capabilities: this machine's, from `machine_capabilities`. Raises ConfigError if timed steps
    show that other programs keep the machine busy: `step_share` then exceeds LARGEST_SHARE, or is
    below its inverse.
    """
    tune_allocator(sparing=True)  # as in a run with ZeRO
    fresh = _fresh_bandwidth()
    tune_allocator()  # as in any other run
    peaks = {name: measure_matmul("cpu", dtype, seconds=1.0) for name, dtype in DTYPES.items()}
    shares = {name: _shares(dtype, peaks[name]) for name, dtype in DTYPES.items()}
    fused = {}
    if find_compiler(torch.device("cpu"), capabilities).works:
        fused = {name: _fused_shares(name, peaks[name], capabilities) for name in ("fp32", "bf16")}
    best = max(("bf16", "fp32"), key=peaks.__getitem__)
    link, hop = _measured_link()
    calibration = Calibration(
        fitted_on="doctor --measure on this machine",
        assumes="this machine as it was measured, with nothing else running",
        spread=dict.fromkeys(peaks, MEASURED_SPREAD),
        **shares[best].model_dump(),
        precisions={name: each for name, each in shares.items() if name != best},
        fused=fused,
        memory_share=1.0,
        link_share=1.0,
        network_share=1.0,
        interference_share=1.0,
        exponential_seconds=_exponential_seconds(),
        fresh_bytes_per_second=fresh,
        hop_seconds=hop,
    )
    device = Device(
        name="".join(filter(str.isprintable, capabilities.cpu.name)),
        tflops={name: flops / 1e12 for name, flops in peaks.items()},
        memory_bytes=float(host_memory_bytes() or 8 << 30),
        memory_bytes_per_second=_bandwidth(),
        link_bytes_per_second=link,
        shared=True,
        calibration=calibration,
        source="doctor --measure",
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )
    return _within_steps(device, best)


# -- operations ---------------------------------------------------------------------------------


def _best_seconds(act: Callable[[], object], seconds: float = 0.3) -> float:
    """Return the shortest time of `act` in seconds, of at least LEAST_TURNS: heaps grow in the
    first ones."""
    return shortest_seconds(act, seconds, LEAST_TURNS)


def _bandwidth() -> float:
    """Measure how many bytes per second an element-wise operation on fp32 tensors reads and writes
    in total, on more tensors than fit the caches."""
    tensors = [torch.ones(TENSOR_BYTES // 4) for _ in range(N_TENSORS)]
    seconds = _best_seconds(lambda: [torch.add(each, 1.0) for each in tensors])
    return 2 * TENSOR_BYTES * N_TENSORS / seconds


def _fresh_bandwidth() -> float:
    """Measure how many bytes per second are written when a new 2 MiB tensor is allocated and
    filled, under the allocator's present settings."""
    seconds = _best_seconds(lambda: torch.ones(TENSOR_BYTES // 4))
    return TENSOR_BYTES / seconds


def _exponential_seconds() -> float:
    """Measure the seconds per element for an activation function (GELU, forward, fp32), including
    its memory access."""
    tensors = [torch.ones(TENSOR_BYTES // 4) for _ in range(N_TENSORS // 4)]
    gelu = torch.nn.functional.gelu
    return _best_seconds(lambda: [gelu(each) for each in tensors]) / sum(map(len, tensors))


def _passes_seconds(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
    """Return the shortest measured seconds for `function(*inputs)`, and those for its backward
    pass, with gradients for all inputs."""
    y = function(*inputs)
    backward = partial(torch.autograd.grad, y, inputs, y.detach(), retain_graph=True)
    return _best_seconds(partial(function, *inputs)), _best_seconds(backward)


def _shares(dtype: torch.dtype, peak: float) -> ProductShares:
    """Measure what fraction of the peak matmul rate `peak` (FLOP/s) PyTorch reaches in `dtype`: in
    the matmuls of a linear layer, forward and backward, of the sizes in PRODUCT, and in causal
    attention of the sizes in ATTENTION."""
    m, n, k = PRODUCT
    x, weight = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((m, k), (n, k)))
    seconds = sum(_passes_seconds(torch.nn.functional.linear, x, weight))
    B, H, T, K = ATTENTION
    qkv = [torch.randn(B, T, H, K, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    return _shares_of(6 * m * n * k / seconds, _passes_seconds(attend, *qkv), peak)


def _fused_shares(precision: str, peak: float, capabilities: Capabilities) -> ProductShares:
    """Measure how much the fused step's CPU kernels reach, as fractions of the peak matmul rate
    `peak` (FLOP/s): in a feed-forward layer with its activation function, forward and backward, and
    in attention.

    precision: `fp32` or `bf16`. capabilities: this machine's, by which the C++ kernels are built
    and loaded. They stay loaded; AMX kernels are timed if they serve the precision.
    """
    dtype = DTYPES[precision]
    for name in native.DTYPES:
        native.load(name, capabilities)
    tiles = native.serves("AMX", torch.float32, dtype)
    m, D, d_ff = FEED_FORWARD
    scale, up, down = torch.ones(D), torch.randn(d_ff, D) * D**-0.5, torch.randn(D, d_ff) * D**-0.5
    layer = AmxFeedForward if tiles else FeedForward

    def feed_forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y: Tensor = layer.apply(x, scale, None, down, "gelu", up)
        return y

    B, H, T, K = ATTENTION
    shape, keys = HeadShape(H, H, K, 1e-5, T, 0.0), torch.zeros(B, 2, dtype=torch.int32)
    attention = AmxAttention if tiles else CausalAttention

    def attend(projected: Tensor) -> Tensor:
        y: Tensor = attention.apply(shape, keys, projected, *5 * (None,))
        return y

    x = torch.randn(1, m, D, dtype=dtype)
    inputs = [each.requires_grad_() for each in (x, up, down)]
    projected = torch.randn(B, T, 3 * H * K, dtype=dtype, requires_grad=True)
    products = sum(_passes_seconds(feed_forward, *inputs))
    return _shares_of(12 * m * D * d_ff / products, _passes_seconds(attend, projected), peak)


def _shares_of(
    products_per_second: float, attention_seconds: tuple[float, float], peak: float
) -> ProductShares:
    """Return measured rates divided by the peak matmul rate `peak` (FLOP/s), at most 1, and the
    ratio of attention's backward to its forward time.

    products_per_second: the linear layers' matmuls, in FLOP/s. attention_seconds: forward and
    backward time of causal attention with the sizes ATTENTION; its masked half is not counted.
    """
    B, H, T, K = ATTENTION
    forward, backward = attention_seconds
    return ProductShares(
        product_share=min(1.0, products_per_second / peak),
        attention_share=min(1.0, 2 * B * H * T * T * K / forward / peak),
        attention_backward=backward / forward,
    )


# -- steps --------------------------------------------------------------------------------------


def _within_steps(device: Device, best: str) -> Device:
    """Time steps with a small model, and return a copy of `device` whose calibration also has
    `step_share` and `kernel_seconds` (see `_within_step`) for each precision, fused and not. fp64
    gets fp32's.

    device: figures from operations timed in isolation. best: the fastest precision's name, `bf16`
    or `fp32`, whose figures the calibration holds at its top level.
    """
    plain = {name: _within_step(device, name, fused=False) for name in ("fp32", "bf16")}
    plain["fp64"] = plain["fp32"]
    calibration = device.calibration
    changed: dict[str, Any] = {
        **plain[best],
        "precisions": {
            name: each.model_copy(update=plain[name])
            for name, each in calibration.precisions.items()
        },
        "fused": {
            name: each.model_copy(update=_within_step(device, name, fused=True))
            for name, each in calibration.fused.items()
        },
    }
    return device.model_copy(update={"calibration": calibration.model_copy(update=changed)})


def _within_step(device: Device, precision: str, *, fused: bool) -> dict[str, float]:
    """Time whole training steps of a small model in one precision, with the fused kernels if
    `fused`, else with PyTorch's own. Return two numbers by name: `step_share`, the time that the
    step's operations take when each is timed by itself ÷ the time of the whole step, and
    `kernel_seconds`, the least seconds that any operation takes, however small.

    Two batch sizes give two equations for the two unknowns: a step's forward and backward passes
    take (o + n · k) / s seconds, where s is `step_share`, k is `kernel_seconds`, n the number of
    operations, and o the seconds that `device` predicts for them if k is 0. Raises ConfigError if
    the results are implausible, as when other programs keep the machine busy.
    """
    configs, step = [], packaged_table("calibrate/step.toml")
    for size in STEP_ROWS:
        rows = {"batch_size": 2 * size, "micro_batch_size": size}
        train = {**step["train"], **rows, "precision": precision, "compile": fused}
        configs.append(Config.model_validate({**step, "train": train}))
    small, large = ([_planned(device, each, k) for k in (SHORT, LONG)] for each in configs)
    n = (small[1] - small[0]) / (LONG - SHORT)
    for _ in range(2):
        few, many = (_passes_of_step_seconds(make_plan(each)) for each in configs)
        share = (large[0] - small[0]) / max(1e-9, many - few)
        if 1 / LARGEST_SHARE < share < LARGEST_SHARE:
            return {"step_share": share, "kernel_seconds": max(SHORT, (share * few - small[0]) / n)}
    raise ConfigError(
        f"doctor --measure: a step of {STEP_ROWS[0]} row takes {few:.3g} s, one of {STEP_ROWS[1]} "
        f"rows {many:.3g} s: other programs keep this machine busy; measure it when they are done"
    )


def _planned(device: Device, config: Config, kernel_seconds: float) -> float:
    """Return the seconds that the planner estimates (nothing is run) for the forward and backward
    passes in one of `config`'s steps on `device`, with `kernel_seconds` as the minimum per
    operation."""
    least, old = {"kernel_seconds": kernel_seconds}, device.calibration
    fused = {name: each.model_copy(update=least) for name, each in old.fused.items()}
    precisions = {name: each.model_copy(update=least) for name, each in old.precisions.items()}
    new = old.model_copy(update={**least, "precisions": precisions, "fused": fused})
    changed = device.model_copy(update={"calibration": new})
    cluster = Cluster(device_key="this machine", device=changed, node_size=1, n_nodes=1)
    return make_estimate(config, cluster).time.compute


def _passes_of_step_seconds(plan: Plan) -> float:
    """Return the shortest measured seconds for the forward and backward passes in one step under
    `plan`, repeated for STEP_SECONDS on random tokens in this process."""
    train, model = plan.config.train, plan.config.model
    engine = assemble(plan, torch.device("cpu"), train.precision, compiled=train.compile is True)
    shape = (len(engine.rows), model.context_length + 1)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size or 0, shape)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], engine.rows)

    def passes() -> None:
        engine.forward_backward(batch, 0)
        engine.zero_gradients()

    return _best_seconds(passes, STEP_SECONDS)


# -- messages -----------------------------------------------------------------------------------


def _measured_link() -> tuple[float, float]:
    """Measure the connection between two processes on this machine by all-reduces. Return its bytes
    per second, and the seconds for a message with SMALL_MESSAGE_BYTES."""
    with scratch_folder() as folder, ExitStack() as stack:
        ranks = [
            PythonChild(f"{__name__}:_all_reduces", str(rank), str(folder)) for rank in range(2)
        ]
        for child in ranks:
            stack.callback(child.close)
        large, small = ranks[0].ask(None)
    return (MESSAGE_BYTES - SMALL_MESSAGE_BYTES) / max(1e-9, large - small), small


def _all_reduces(rank: str, folder: str) -> Callable[[None], list[float]]:
    """Time all-reduces of a large and of a small tensor between two processes, of which this one is
    rank `rank` (0 or 1, as text). Return a function that ignores its argument and returns the two
    times in seconds, as a `PythonChild` needs a request handler. Collective. folder: for the
    rendezvous file.

    Each all-reduce follows some matmuls, as in a step: the first rank to arrive waits, and is
    woken. Back to back, a message would take a fraction of that.
    """
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=int(rank), world_size=2)
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
    return lambda _: [max(0.0, each) for each in found]


# -- the file -----------------------------------------------------------------------------------


def _file(device: Device) -> Iterator[str]:
    """Yield the lines of a TOML file that describes `device`, in the format that
    `read_devices` reads."""
    values = device.model_dump(exclude_unset=True)
    calibration = values.pop("calibration")
    yield "# This machine, measured by `pentameter doctor --measure`; `pentameter plan` reads it."
    yield from _tables("calibrations.measured", calibration)
    yield from _tables("devices.this-machine", {**values, "calibration": "measured"})
    yield ""


def _tables(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for the TOML table `name` and its nested tables; floats have four digits, as
    precise as measurements."""
    yield f"\n[{name}]"
    for key, value in values.items():
        if not isinstance(value, dict):
            short = float(f"{value:.4g}") if isinstance(value, float) else value
            yield f"{key} = {toml_value(short)}"
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _tables(f"{name}.{key}", value)
