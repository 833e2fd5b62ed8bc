"""Several memory-mapped files of token ids, read as one array."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class TokenSequence:
    """A run of token ids over one or more memory-mapped arrays, read like one 1-D array.

    `tokens[a:b]` is an array (a view where it lies in one file), `tokens[i]` an int.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], start: int, stop: int) -> None:
        self._arrays = list(arrays)
        self._starts = [0]  # place of each array's first token in the whole, and the end
        for array in self._arrays:
            self._starts.append(self._starts[-1] + len(array))
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16 or uint32, little-endian."""
        return self._arrays[0].dtype

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> npt.NDArray[Any]: ...
    def __getitem__(self, place: int | slice) -> int | npt.NDArray[Any]:
        if not isinstance(place, slice):
            index = range(len(self))[place]  # IndexError, and negative places, as for a list
            return int(self[index : index + 1][0])
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise ValueError(f"tokens are read in steps of 1, not {step}")
        start, stop = self._start + start, self._start + max(start, stop)
        parts = []
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[number + 1])
            first = self._starts[number]
            parts.append(self._arrays[number][start - first : end - first])
            start, number = end, number + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.array(self[:], dtype=dtype)
