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


def _bounds(tensor: LazyTensor, region: tuple[slice, ...] | EllipsisType) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in tensor.shape) if region is ... else region
