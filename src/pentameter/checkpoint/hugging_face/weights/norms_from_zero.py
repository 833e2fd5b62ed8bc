"""The norms of Gemma's folders, computed from parameters and back: they are stored as what is added
to 1, so that a weight of 0 leaves a channel as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.hugging_face.family import Packing, StoredForm

if TYPE_CHECKING:
    import torch


def pack(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return a folder's tensors, by name, from the parameters `tensors`: 1 is subtracted from the
    weights of norms."""
    return {name: _plus(tensor, -_offset(name)) for name, tensor in tensors.items()}


def unpack(tensors: Mapping[str, LazyTensor], names: Iterable[str]) -> dict[str, LazyTensor]:
    """Return the parameters `names` from a folder's `tensors`: the inverse of `pack`, exact for
    weights that were stored in 16 bits and are not tiny."""
    return {name: _plus(tensors[name], _offset(name)) for name in names}


def form_of(shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> StoredForm:
    """Return names and shapes of a folder's tensors, which are those of the parameters."""
    return StoredForm(shapes, frozenset())


NORMS_FROM_ZERO = Packing(pack, unpack, form_of)
"""The Packing for families whose norms multiply by 1 + their weight."""


def _offset(name: str) -> int:
    return int(name.endswith("norm.weight"))


def _plus(tensor: LazyTensor, offset: int) -> LazyTensor:
    """Return the tensor plus `offset`. The sum is computed in the dtype that is asked for, which
    need not be the stored one."""
    if not offset:
        return tensor

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        tensor.fill(target, region)
        target.add_(offset)

    return LazyTensor(tensor.shape, tensor.dtype, fill)
