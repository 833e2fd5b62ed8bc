"""Initial weights as a function of (seed, parameter name, flat index), computed for any
region on any rank.

A rank that owns a slice of a tensor computes that slice only. Values are drawn on the CPU, in
float64, and rounded to fp32: the same values for every device and layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.keyed import bits, make_key
from pentameter.machine.cores_and_memory import n_usable_cores
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.gpt import parameter_table

BLOCK_ELEMENTS = 2**16  # its float64 temporaries stay in a core's cache
CHUNK_ELEMENTS = 2**22


CONSTANTS = {"zeros": 0.0, "ones": 1.0}
"""Maps the kinds of initial value (`Init.kind`) that need no random numbers to their constant."""

Region = tuple[tuple[int, int], ...]
"""Type of a rectangular block of a parameter: (start, stop) for each of its dimensions."""


def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set every parameter in a GPT, or in a slice of one, to its initial value, in place.

    `seed` determines the values; a slice gets the same values as in the whole model. Extra memory
    stays at some tens of MB, whatever the sizes.

    Raises:
        KeyError: the model has a parameter that `planning.gpt.parameter_table` does not list.
    """
    specs = {spec.name: spec for spec in parameter_table(config)}
    for name, parameter in model.named_parameters():
        whole = tuple((0, size) for size in parameter.shape)
        fill(specs[name], parameter.detach(), whole, seed)


def fill(spec: ParameterSpec, own: Tensor, region: Region, seed: int) -> None:
    """Set `own`, the local `region` of a parameter, to its initial value, in place.

    spec: the parameter's name, whole shape and kind of initial value. region: the block that `own`
    holds, (start, stop) for each dimension. seed: the run's, which determines the values. No other
    value is drawn, and extra memory stays at some MB, whatever the sizes.
    """
    if own.numel() == 0:
        return
    if spec.init.kind in CONSTANTS:
        own.fill_(CONSTANTS[spec.init.kind])
        return
    *sides, width = spec.shape
    firsts = [start for start, _ in region]
    if own.ndim == 1:  # as a column
        own, sides, width, firsts = own[:, None], [width], 1, [*firsts, 0]
    n_columns = min(own.shape[-1], CHUNK_ELEMENTS)
    n_rows = max(1, CHUNK_ELEMENTS // n_columns)

    def pieces() -> Iterator[tuple[Tensor, int]]:
        """Yield matrices that together are `own`, each with its first element's flat number."""
        for places in product(*(range(n) for n in own.shape[:-2])):
            for row, column in product(
                range(0, own.shape[-2], n_rows), range(0, own.shape[-1], n_columns)
            ):
                first = 0
                for size, start, place in zip(sides, firsts, (*places, row), strict=False):
                    first = first * size + start + place
                piece = own[places][row : row + n_rows, column : column + n_columns]
                yield piece, first * width + firsts[-1] + column

    # numpy lets other threads run while it computes.
    with ThreadPoolExecutor(max_workers=min(8, n_usable_cores())) as pool:
        list(pool.map(lambda each: _fill_matrix(spec, seed, width, *each), pieces()))


def _fill_matrix(spec: ParameterSpec, seed: int, width: int, own: Tensor, first: int) -> None:
    """Set `own`, a matrix that is part of a parameter, to its initial values, in place. `first` is
    the flat index of its first element in the whole parameter; in the whole parameter its rows are
    `width` elements apart."""
    n_columns = min(own.shape[1], BLOCK_ELEMENTS)
    n_rows = BLOCK_ELEMENTS // n_columns
    for row, column in product(range(0, own.shape[0], n_rows), range(0, own.shape[1], n_columns)):
        block = own[row : row + n_rows, column : column + n_columns]
        rows = first + (row + np.arange(block.shape[0], dtype=np.int64)) * width
        index = rows[:, None] + np.arange(column, column + block.shape[1], dtype=np.int64)
        block.copy_(torch.from_numpy(_drawn(spec, seed, index)))


def _drawn(spec: ParameterSpec, seed: int, index: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Draw initial values, float32 in the shape of `index`, for the elements with these flat
    indices in the whole parameter."""
    # A number's low 32 bits are the counter, as a signed word; the rest joins the key.
    low, high = index.astype(np.uint32).view(np.int32), index >> 32
    drawn = np.empty(index.shape, dtype=np.float32)
    for block in range(int(high.min()), int(high.max()) + 1):
        inside = high == block
        if inside.all():
            drawn[...] = _draw(spec, seed, block, low)
        elif inside.any():
            drawn[inside] = _draw(spec, seed, block, low[inside])
    return drawn


def _draw(
    spec: ParameterSpec, seed: int, block: int, counter: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """Draw initial values, in the shape of `counter`, for the elements with the flat indices
    `counter` + `block` · 2^32 in the whole parameter; a negative counter stands for itself +
    2^32."""

    def uniform(word: int) -> npt.NDArray[np.float64]:
        """Return a number in (0, 1) for each element, the center of its cell among 2^32 equal ones.
        `word` numbers the independent draws for an element."""
        key = make_key(seed, "weights", spec.name, word, block)
        drawn: npt.NDArray[np.float64] = bits(key, counter).view(np.uint32).astype(np.float64)
        return (drawn + 0.5) * 2.0**-32

    match spec.init.kind:
        case "uniform":
            return (2 * uniform(0) - 1) * spec.init.scale
        case "normal":
            # Box and Muller, "A note on the generation of random normal deviates" (1958); the sine
            # is left unused, so that an element needs no neighbour.
            radius = np.sqrt(-2 * np.log(uniform(0)))
            return radius * np.cos(2 * math.pi * uniform(1)) * spec.init.scale
        case other:
            raise ValueError(f"{spec.name}: initial values of kind {other!r} are not drawn")
