"""Lazy tensors: computed at each access, whole or one region."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed at each access, whole or one region; its shape and dtype are known
    beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    compute: Callable[[tuple[slice, ...]], torch.Tensor]
    """Computes exactly the region given by the start and stop for each dimension."""


def materialize(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """Return the whole tensor, computed now if it is lazy."""
    return read_region(tensor, tuple(slice(0, size) for size in tensor.shape))


def read_region(tensor: torch.Tensor | LazyTensor, region: tuple[slice, ...]) -> torch.Tensor:
    """Return the region of a tensor given by the start and stop for each dimension; from a lazy
    tensor, only this region is computed."""
    return tensor.compute(region) if isinstance(tensor, LazyTensor) else tensor[region]
