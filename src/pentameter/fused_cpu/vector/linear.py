"""Linear layers beside their matmuls, by the C++ kernels in `cpp/linear.cpp`, or where these do not
take a tensor by those of `torch.compile` (`fused_cpu/kernels.py`): weights with a norm's weight
folded in, the way back for their gradients, sums over rows, and transposed copies."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pentameter.fused_cpu import kernels
from pentameter.fused_cpu.kernels import ROWS_PER_SUM
from pentameter.fused_cpu.native import CHANNELS, Struct, call, fields, serves


class _Fold(Struct):
    """ctypes form of the C++ struct `Fold` in cpp/linear.cpp: the arguments of the kernels that
    fold one layer's weight and unfold its gradient."""

    _fields_ = fields("scale", int64="experts n N first k rows low")


class _Rows(Struct):
    """ctypes form of the C++ struct `Rows` in cpp/linear.cpp: the arguments of the kernel that sums
    rows."""

    _fields_ = fields(int64="M D rows low")


@dataclass
class _Step:
    """Results of `fold` and sums of their gradients that the micro-batches of a step share, by
    `fold`'s arguments, which are kept, too: another tensor might get the number of one that is
    gone."""

    folded: dict[Hashable, tuple[Tensor, object]] = field(default_factory=dict)
    sums: dict[Hashable, tuple[Tensor, object]] = field(default_factory=dict)
    more_follow: bool = False  # micro-batches that add to the sums


_step: ContextVar[_Step | None] = ContextVar("_step", default=None)


@contextmanager
def folding_once() -> Iterator[None]:
    """Context manager for a step's passes, in which no weight changes: inside it `fold` keeps its
    results, and the next micro-batch gets the same tensors. With `unfolding_later`, `unfold` waits
    for the last micro-batch, too."""
    step = _Step()
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)
    assert not step.sums, "the step's last micro-batch left out weights that earlier ones used"


@contextmanager
def unfolding_later(more_follow: bool) -> Iterator[None]:
    """Context manager for a micro-batch's passes, within `folding_once`. If `more_follow`, `unfold`
    keeps the gradients and adds them up; the first micro-batch after which none follows gets those
    of the sum."""
    step = _step.get()
    assert step is not None
    step.more_follow = more_follow
    try:
        yield
    finally:
        step.more_follow = False


def fold(weights: tuple[Tensor, ...], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return one matrix in `dtype` for several linear layers, as `kernels.fold` does: their weights
    (…, n, k) stacked by rows, each times `scale` (k,) unless it is None. Do not write to it: others
    may read it (`folding_once`)."""
    step = _step.get()
    if step is None:
        return _fold(weights, scale, dtype)
    key = (*map(id, weights), id(scale), dtype)
    if key not in step.folded:
        step.folded[key] = _fold(weights, scale, dtype), (weights, scale)
    return step.folded[key][0]


def _fold(weights: tuple[Tensor, ...], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the result of `fold`, computed anew."""
    if not _can_fold(weights, scale, dtype):
        return kernels.fold(weights, scale, dtype)
    *experts, _, k = weights[0].shape
    out = weights[0].new_empty(*experts, sum(x.shape[-2] for x in weights), k, dtype=dtype)
    for job, weight in zip(_jobs(weights, scale, out), weights, strict=True):
        call("vector", "fold", job, out, weight)
    return out


def unfold(
    g: Tensor, weights: tuple[Tensor, ...], scale: Tensor | None
) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Return (gradients, scale's gradient) for the arguments of `fold`, given its result's gradient
    g (…, n, k), as `kernels.unfold` does: one gradient per weight, in fp32, and the scale's (k,),
    or None without a scale. All are None while the gradient of a later micro-batch is to be added
    (`unfolding_later`), and g may be written to then."""
    step = _step.get()
    if step is None:
        return _unfold(g, weights, scale)
    key = (*map(id, weights), id(scale))
    if key in step.sums:
        g = step.sums.pop(key)[0].add_(g)
    if not step.more_follow:
        return _unfold(g, weights, scale)
    step.sums[key] = g.to(weights[0].dtype), (weights, scale)
    return [None] * len(weights), None


def _unfold(
    g: Tensor, weights: tuple[Tensor, ...], scale: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """Return the result of `unfold` for this gradient alone."""
    if not _can_fold(weights, scale, g.dtype):
        return kernels.unfold(g, weights, scale)
    g = g.contiguous()
    gradients, sums = [torch.empty_like(weight) for weight in weights], []
    for job, weight, gradient in zip(_jobs(weights, scale, g), weights, gradients, strict=True):
        n_sums = -(-(weight.numel() // job.k) // job.rows)
        sums.append(weight.new_empty(0 if scale is None else n_sums, job.k))
        call("vector", "unfold", job, gradient, sums[-1], g, weight)
    return gradients, None if scale is None else torch.cat(sums).sum(0)


def sum_rows(x: Tensor) -> Tensor:
    """Return x (…, D) summed over all dimensions but the last, (D,), in at least fp32."""
    if not serves("vector", torch.float32, x.dtype) or x.shape[-1] % CHANNELS:
        return kernels.sum_rows(x)
    x, D = x.contiguous(), x.shape[-1]
    job = _Rows(x.numel() // D, D, ROWS_PER_SUM, x.dtype is torch.bfloat16)
    sums = x.new_empty(-(-job.M // job.rows), D, dtype=torch.float32)
    call("vector", "sum_rows", job, sums, x)
    return sums.sum(0)


def transpose(x: Tensor) -> Tensor:
    """Return a copy (n, M) with x (M, n) transposed, its rows padded in memory, as
    `kernels.transpose` does."""
    if not serves("vector", x.dtype, torch.float32) or not x.is_contiguous():
        return kernels.transpose(x)
    M, n = x.shape
    padded = x.new_empty(n, M + kernels.PADDING)
    call("vector", "transpose", padded, x, M, n, M + kernels.PADDING)
    return padded[:, :M]


def _can_fold(weights: tuple[Tensor, ...], scale: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether the vector library is loaded and takes these weights, contiguous and in fp32
    as their scale, for matmuls in `dtype`."""
    given = weights if scale is None else (*weights, scale)
    return (
        serves("vector", torch.float32, dtype)
        and weights[0].shape[-1] % CHANNELS == 0
        and all(x.dtype is torch.float32 and x.is_contiguous() for x in given)
    )


def _jobs(weights: tuple[Tensor, ...], scale: Tensor | None, stacked: Tensor) -> list[_Fold]:
    """Return the C++ calls' arguments, one for each of the weights, which lie one after another in
    `stacked` (…, N, k)."""
    *experts, N, k = stacked.shape
    n_experts, low = experts[0] if experts else 1, stacked.dtype is torch.bfloat16
    jobs, first = [], 0
    for weight in weights:
        n = weight.shape[-2]
        jobs.append(_Fold(scale, n_experts, n, N, first, k, ROWS_PER_SUM, low))
        first += n
    return jobs
