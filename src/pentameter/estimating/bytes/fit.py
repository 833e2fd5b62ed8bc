"""The verdict on planned memory: whether it fits a device, is tight, or does not fit."""

from __future__ import annotations

from typing import Literal

Verdict = Literal["fits", "tight", "does not fit"]

CONTEXT_BYTES = 1.5e9
"""GPU bytes that no run can use: the driver's context, libraries, communication buffers. An A100
and an H100 show 0.5 GB for the context; NCCL's and cuBLAS's buffers take the rest."""
MEMORY_MARGIN = 0.10
"""Bytes that a run may need beyond the planned ones, as a fraction of them. Planned tensors are
right within 5 % (docs/planner.md). An allocator reserves more than tensors take, up to 7 % of the
planned bytes in published runs of a program that keeps its state as ours does. The rest is for
NCCL's buffers beyond those in CONTEXT_BYTES and workspaces of cuBLAS and cuDNN."""


def memory_verdict(planned_bytes: float, usable_bytes: float) -> Verdict:
    """Return "fits" if a rank's planned bytes and MEMORY_MARGIN are at most the `usable_bytes` of
    its device. Return "tight" if only the planned bytes alone are: the run may or may not go out of
    memory. Else return "does not fit"."""
    if planned_bytes > usable_bytes:
        return "does not fit"
    return "fits" if planned_bytes * (1 + MEMORY_MARGIN) <= usable_bytes else "tight"
