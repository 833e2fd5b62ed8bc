"""Lazy tensors: computed at each access, whole or one region."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed at each access; its shape and dtype are known beforehand.

    It is indexed as a torch.Tensor is: `tensor[...]` is the whole, `tensor[0:2, 4:8]` one region,
    for which nothing else is computed. The result is a new tensor on the CPU; slices need both
    start and stop.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[torch.Tensor, tuple[slice, ...]], None]
    """Fills a tensor with one region, given by the start and stop for each dimension; shapes are
    equal, and values are converted to the tensor's dtype."""

    def __getitem__(self, region: tuple[slice, ...] | EllipsisType) -> torch.Tensor:
        import torch

        bounds = _bounds(self, region)
        tensor = torch.empty([each.stop - each.start for each in bounds], dtype=self.dtype)
        self.fill(tensor, bounds)
        return tensor


def copy_region(
    target: torch.Tensor,
    source: torch.Tensor | LazyTensor,
    region: tuple[slice, ...] | EllipsisType = ...,
) -> None:
    """Fill `target`, in place, with one region from `source`, or with the whole (`...`); shapes
    must be equal, and values are converted to the target's dtype.

    `region` has one slice per dimension. A lazy source is computed directly into `target`.
    """
    if isinstance(source, LazyTensor):
        source.fill(target, _bounds(source, region))
    else:
        target.copy_(source[region])


def flattened(tensor: torch.Tensor | LazyTensor) -> torch.Tensor | LazyTensor:
    """Return a tensor (n, m, …) as (n · m, …): a view, or a lazy tensor of the lazy one."""
    if not isinstance(tensor, LazyTensor):
        return tensor.flatten(0, 1)
    n, m, *others = tensor.shape

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        rows, *rest = region
        for first in range(rows.start - rows.start % m, rows.stop, m):
            start, stop = max(rows.start, first), min(rows.stop, first + m)
            part = target.narrow(0, start - rows.start, stop - start)
            within = slice(start - first, stop - first)
            tensor.fill(part.unsqueeze(0), (slice(first // m, first // m + 1), within, *rest))

    return LazyTensor((n * m, *others), tensor.dtype, fill)


def unflattened(tensor: LazyTensor, n: int) -> LazyTensor:
    """Return a tensor (n · m, …) as (n, m, …)."""
    m = tensor.shape[0] // n

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        outer, rows, *rest = region
        for number, first in enumerate(range(outer.start * m, outer.stop * m, m)):
            tensor.fill(
                target.select(0, number), (slice(first + rows.start, first + rows.stop), *rest)
            )

    return LazyTensor((n, m, *tensor.shape[1:]), tensor.dtype, fill)


def _bounds(tensor: LazyTensor, region: tuple[slice, ...] | EllipsisType) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in tensor.shape) if region is ... else region
