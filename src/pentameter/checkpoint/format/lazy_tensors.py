"""Functions on tensors by name, where a tensor is a torch.Tensor or lazy (computed at each access,
as a whole or one region): comparison with those that a model expects, and copying."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Literal

from pentameter.errors import CorruptError, few

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor | LazyTensor"]
"""Mapping from name to tensor, in memory or lazy."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed at each access; its shape and dtype are known beforehand.

    It is indexed like a torch.Tensor: `tensor[...]` is the whole; `tensor[0:2, 4:8]` is one region,
    for which nothing else is computed. The result is a new tensor on the CPU. Slices need both
    start and stop. Methods are named as in torch.Tensor and return lazy tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[torch.Tensor, tuple[slice, ...]], None]
    """Function that fills a tensor with one region, given by start and stop for each dimension.
    Both have the same shape; values are converted to the tensor's dtype."""

    def __getitem__(self, region: tuple[slice, ...] | EllipsisType) -> torch.Tensor:
        import torch

        bounds = _bounds(self, region)
        tensor = torch.empty([each.stop - each.start for each in bounds], dtype=self.dtype)
        self.fill(tensor, bounds)
        return tensor

    def t(self) -> LazyTensor:
        """Return the transpose (m, n) of a tensor (n, m)."""

        def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
            self.fill(target.t(), region[::-1])

        return LazyTensor(self.shape[::-1], self.dtype, fill)

    def flatten(self, first: Literal[0], last: Literal[1]) -> LazyTensor:
        """Return a tensor (n, m, …) as (n · m, …): dimensions `first` to `last`, which must be 0
        and 1, become one."""
        n, m, *others = self.shape

        def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
            rows, *rest = region
            for offset in range(rows.start - rows.start % m, rows.stop, m):
                start, stop = max(rows.start, offset), min(rows.stop, offset + m)
                part = target.narrow(0, start - rows.start, stop - start).unsqueeze(0)
                index = offset // m
                within = slice(start - offset, stop - offset)
                self.fill(part, (slice(index, index + 1), within, *rest))

        return LazyTensor((n * m, *others), self.dtype, fill)

    def unflatten(self, dim: Literal[0], sizes: tuple[int, int]) -> LazyTensor:
        """Return a tensor (n · m, …) as (n, m, …), with `sizes` (n, m); `dim` must be 0."""
        n, m = sizes

        def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
            outer, rows, *rest = region
            for number, offset in enumerate(range(outer.start * m, outer.stop * m, m)):
                part = target.select(0, number)
                self.fill(part, (slice(offset + rows.start, offset + rows.stop), *rest))

        return LazyTensor((n, m, *self.shape[1:]), self.dtype, fill)


def copy_region(
    target: torch.Tensor,
    source: torch.Tensor | LazyTensor,
    region: tuple[slice, ...] | EllipsisType = ...,
) -> None:
    """Fill `target`, in place, with one region of `source`: one slice per dimension, or `...` for
    the whole. Shapes must be equal; values are converted to the target's dtype. A lazy source is
    computed directly into `target`."""
    if isinstance(source, LazyTensor):
        source.fill(target, _bounds(source, region))
    else:
        target.copy_(source[region])


def _bounds(tensor: LazyTensor, region: tuple[slice, ...] | EllipsisType) -> tuple[slice, ...]:
    """Return the region's slices; for `...`, slices over the whole tensor."""
    return tuple(slice(0, size) for size in tensor.shape) if region is ... else region


def check_fits(
    name: str,
    found: torch.Tensor | LazyTensor,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """Raise CorruptError, naming the tensor, unless a stored tensor `found` has the expected
    `shape` and `dtype` (None: any dtype). Nothing is read."""
    if tuple(found.shape) != tuple(shape) or dtype not in (None, found.dtype):
        raise CorruptError(
            f"the checkpoint's {name} is {tuple(found.shape)} of {found.dtype}, "
            f"the configuration asks for {tuple(shape)} of {dtype or 'any dtype'}"
        )


def check_weights(
    weights: Tensors, expected: Mapping[str, tuple[Sequence[int], torch.dtype | None]], where: Path
) -> None:
    """Raise CorruptError, naming the folder `where`, unless the weights have exactly the names,
    shapes and dtypes in `expected`: name → (shape, dtype), where None allows any dtype."""
    if differences := name_differences(expected, weights):
        raise CorruptError(f"{where}: its tensors are not its configuration's; {differences}")
    for name, (shape, dtype) in expected.items():
        check_fits(name, weights[name], shape, dtype)


def name_differences(expected: Iterable[str], found: Iterable[str]) -> str:
    """Describe the expected names that are missing and the found ones that are unexpected, as a
    clause for an error message; empty if there are none."""
    missing, unexpected = set(expected) - set(found), set(found) - set(expected)
    parts = [f"missing: {few(missing)}"] if missing else []
    parts += [f"unexpected: {few(unexpected)}"] if unexpected else []
    return "; ".join(parts)
