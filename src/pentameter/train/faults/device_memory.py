"""Memory that runs out: the check before the first step that a run fits, the micro-batches that do,
and the message of a run that found none."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import torch

from pentameter.errors import ConfigError, divisors
from pentameter.estimating.bytes.changes import fitting_micro_batches, settings_that_fit
from pentameter.estimating.bytes.fit import CONTEXT_BYTES, Verdict, memory_verdict
from pentameter.estimating.bytes.plan_estimates import plan_memory, plan_state_bytes
from pentameter.machine.capabilities import held_by_others, memory_bytes
from pentameter.machine.cores_and_memory import INTERPRETER_BYTES, or_container
from pentameter.planning.plan import Plan
from pentameter.processes.group.world import World
from pentameter.train.compute import Compute

RELEASE_SECONDS = 10
"""Longest wait for the memory of processes that have ended, such as a killed run's, which a driver
gives back seconds later."""


def fit_micro_batches(plan: Plan, compute: Compute, world: World) -> Plan:
    """Return `plan` with the largest micro-batches that fit this GPU's memory, if the configuration
    leaves their size open. The steps' results change by rounding only. Return `plan` itself on a
    CPU, whose kernels were chosen for its micro-batches, and for a custom model, whose activations
    are not known. Collective: all ranks take the size that fits the one with the least memory."""
    device, is_open = compute.device, plan.asked_micro_batch_size is None
    if device.type != "cuda" or plan.built_by is not None or not is_open:
        return plan
    there = memory_bytes(device)
    assert there is not None  # a GPU says
    usable = there - CONTEXT_BYTES - held_by_others(device)
    if plan.config.train.offload:
        usable += plan_state_bytes(plan).state_bytes
    drops_by_blocks = compute.forms.drops_by_blocks
    size = fitting_micro_batches(plan, usable, compute.precision, drops_by_blocks=drops_by_blocks)
    size = min(world.all_gather(size))
    return plan if size == plan.micro_batch_size else plan.with_micro_batches(size)


def check_device_memory(plan: Plan, compute: Compute, local_size: int) -> None:
    """Raise ConfigError if a rank's predicted peak exceeds the device's memory, or its offloaded
    tensors the host's; the message names settings that fit. On a CPU, `local_size` processes share
    the memory; on a GPU other programs may hold some. For a custom model only weights, gradients
    and optimizer state are counted."""
    state = plan_state_bytes(plan).state_bytes
    # Only the state of a custom model is known.
    total = _planned_bytes(plan, compute) if plan.built_by is None else state
    needs = [(compute.device, total)]
    if plan.config.train.offload:
        needs = [(torch.device("cpu"), state), (compute.device, max(0, total - state))]
    for where, needed in needs:
        if (there := memory_bytes(where)) is None:
            continue
        n_sharing = 1 if where.type == "cuda" else local_size
        there -= int(CONTEXT_BYTES) if where.type == "cuda" else local_size * INTERPRETER_BYTES
        held = 0
        if memory_verdict(needed * n_sharing, there) != "does not fit":
            held = _held(where, there - needed * n_sharing)
            there -= held
        if memory_verdict(needed * n_sharing, there) == "does not fit":
            ways: Sequence[tuple[str, Verdict]] = ()
            if plan.built_by is None and not plan.config.train.offload:
                ways = _settings_that_fit(plan, compute, there / n_sharing)
            raise ConfigError(_too_large(plan, where, needed, there, n_sharing, ways, held))


def _planned_bytes(plan: Plan, compute: Compute) -> int:
    """Return the predicted peak of the fullest rank, in bytes, with the kernels chosen."""
    drops_by_blocks = compute.forms.drops_by_blocks
    return plan_memory(plan, compute.precision, drops_by_blocks=drops_by_blocks).total_bytes


def _settings_that_fit(
    plan: Plan, compute: Compute, usable_bytes: float
) -> Sequence[tuple[str, Verdict]]:
    """Return settings that fit into `usable_bytes`, or are tight, with the verdict, the best
    first."""
    drops_by_blocks = compute.forms.drops_by_blocks
    return settings_that_fit(plan, usable_bytes, compute.precision, drops_by_blocks=drops_by_blocks)


def _held(device: torch.device, most: int) -> int:
    """Return how many bytes of a GPU's memory other programs hold. Waits until they are at most
    `most`, but no longer than RELEASE_SECONDS, as a program that has just ended frees its memory
    late."""
    for _ in range(RELEASE_SECONDS):
        held = held_by_others(device)
        if held <= most:
            return held
        time.sleep(1)
    return held_by_others(device)


_SAYS_MEMORY = re.compile(
    r"\b(cuda|hip|mps|nccl)\b.*out of memory|can't allocate memory|status_alloc_failed",
    re.IGNORECASE,
)
"""Messages of RuntimeErrors by which the CUDA driver, MPS, NCCL, the CPU and cuBLAS run out of
memory, where PyTorch's CUDA allocator raises `torch.OutOfMemoryError`. A hook that says "out of
memory" of something else does not match."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that a device's or the host's memory is used up."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS_MEMORY.search(str(error)) is not None


def out_of_memory(plan: Plan, compute: Compute, when: str) -> str:
    """Return the message for a run that went out of memory `when`, such as "after step 6", to be
    continued by what the same command does. It names the settings that the Plan expects to take
    less than what this run was planned to take and less than is there."""
    device, micro_batch_size = compute.device, plan.micro_batch_size
    there, held, planned, remedy = memory_bytes(device), held_by_others(device), "", ""
    on = f"{device.type} has {there / 1e9:,.1f} GB" if there else device.type
    beside = f", of which other programs hold {held / 1e9:,.1f} GB" if held else ""
    if plan.built_by is None:
        needed = _planned_bytes(plan, compute)
        planned = f" (planned: {needed / 1e9:,.1f} GB)"
        usable = needed if there is None else min(needed, max(0, there - held - CONTEXT_BYTES))
        ways = _settings_that_fit(plan, compute, usable)
        remedy = next((options for options, verdict in ways if verdict == "fits"), "")
    elif micro_batch_size > 1:
        rows = plan.batch_size // plan.layout.n_batch_shards
        smaller = max(size for size in divisors(rows) if size < micro_batch_size)
        remedy = f"--train.micro-batch-size {smaller}"
    remedy = f"{remedy} takes less" if remedy else "a smaller model or more processes take less"
    if device.type == "cuda" and not plan.config.train.offload:
        remedy += ", and so does train.offload with parallel.zero"
    return (
        f"out of memory {when}, with {micro_batch_size} sequences at a time{planned}, "
        f"where {on}{beside}: {remedy}"
    )


def _too_large(
    plan: Plan,
    where: torch.device,
    needed: int,
    there: int,
    n_sharing: int,
    fitting: Sequence[tuple[str, Verdict]],
    held: int,
) -> str:
    """Return the error message for a run that needs more memory than there is: `needed` bytes in
    the fullest process, `there` bytes on the device `where`, shared by `n_sharing` processes,
    beside `held` bytes that other programs hold. `fitting` are settings that would fit or be tight,
    with the verdict, the best first."""
    whose = f"{needed / 1e9:,.1f} GB in the fullest process, and {n_sharing} share the "
    if n_sharing == 1:
        whose = f"{needed / 1e9:,.1f} GB, "
    limited = "" if where.type == "cuda" else or_container()
    beside = f", as other programs hold {held / 1e9:,.1f} GB of it" if held else ""
    if fitting:
        options, verdict = fitting[0]
        remedy = f"{options} {'fits' if verdict == 'fits' else 'is tight'}"
        if where.type == "cuda":
            remedy += ", and train.offload with parallel.zero takes less"
    else:
        offload = "train.offload with parallel.zero, " if where.type == "cuda" else ""
        remedy = (
            "choose a smaller model (--model.n-layers, --model.d-model), more processes with "
            f"parallel.zero, tensor or pipeline, {offload}or look at it with --dry-run"
        )
    return (
        f"a step of {plan.n_parameters:,} parameters, {plan.micro_batch_size} sequences at a time, "
        f"is planned to take {whose}{where.type}{limited} {'with' if n_sharing > 1 else 'has'} "
        f"{max(0, there) / 1e9:,.1f} GB{beside}; {remedy}. --force tries it all the same"
    )
