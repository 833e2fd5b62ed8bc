"""Lazy tensors: computed at each access, whole or one region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Region = tuple[slice, ...]
"""Start and stop for each dimension of a tensor."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed at each access; its shape and dtype are known beforehand.

    It is indexed as a torch.Tensor is: `tensor[...]` is the whole, `tensor[0:2, 4:8]` one region,
    of which nothing else is computed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[torch.Tensor, Region], None]
    """Fills a tensor with the region of its shape, converted to its dtype."""

    def __getitem__(self, region: Region | EllipsisType) -> torch.Tensor:
        import torch

        if region is ...:
            region = whole(self.shape)
        tensor = torch.empty([each.stop - each.start for each in region], dtype=self.dtype)
        self.fill(tensor, region)
        return tensor


def whole(shape: Sequence[int]) -> Region:
    """Return the region that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def copy_region(target: torch.Tensor, source: torch.Tensor | LazyTensor, region: Region) -> None:
    """Fill `target` with the region of its shape in `source`; a lazy one is computed in place."""
    if isinstance(source, LazyTensor):
        source.fill(target, region)
    else:
        target.copy_(source[region])
