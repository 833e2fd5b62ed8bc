"""How many elements are read from the files of stored tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pentameter.checkpoint.format.tensor_reader import StoredTensors


class _Counting:
    """A stored region whose parts are counted when they are read."""

    def __init__(self, tensor: torch.Tensor, counts: list[int]) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype
        self._counts = counts

    def __getitem__(self, region: Any) -> torch.Tensor:
        part = self.tensor[region]
        self._counts.append(part.numel())
        return part


def counted_reads(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of elements of each read, as long as `patch` lasts."""
    read, counts = StoredTensors.read, list[int]()
    patch.setattr(StoredTensors, "read", lambda self, region: _Counting(read(self, region), counts))
    return counts
