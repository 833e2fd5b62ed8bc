"""Initial weights as a function of (seed, parameter name, flat index), computed for any
region on any rank.

A rank that owns a slice of a tensor computes that slice only. Values are drawn on the CPU, in
float64, and rounded to fp32: the same values for every device and layout.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.keyed import bits, make_key
from pentameter.machine.cores import usable_cores
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.gpt import parameter_table

BLOCK_ELEMENTS = 2**16  # its float64 temporaries stay in a core's cache; divides 2^32
CHUNK_ELEMENTS = 2**22


CONSTANTS = {"zeros": 0.0, "ones": 1.0}
"""Kind of initial value (`Init.kind`) that needs no random numbers → the constant."""

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
    holds, (start, stop) for each dimension. seed: the run's, which determines the values.
    """
    if own.numel() == 0:
        return
    (start, stop), *others = region
    width = math.prod(spec.shape[1:])  # elements of a whole row
    is_sliced = [tuple(other) for other in others] != [(0, size) for size in spec.shape[1:]]
    n_rows = max(1, CHUNK_ELEMENTS // width)

    def fill_rows(first: int) -> None:
        last = min(first + n_rows, stop)
        values = initial_values(spec, seed, first * width, last * width)
        rows = values.view(last - first, *spec.shape[1:])
        if is_sliced:
            rows = rows[(slice(None), *(slice(*other) for other in others))]
        own[first - start : last - start].copy_(rows)

    # numpy lets other threads run while it computes.
    with ThreadPoolExecutor(max_workers=min(8, len(usable_cores()))) as pool:
        list(pool.map(fill_rows, range(start, stop, n_rows)))


def initial_values(
    spec: ParameterSpec, seed: int, start: int = 0, stop: int | None = None
) -> Tensor:
    """Return flat elements [start, stop) of a parameter's initial value, fp32
    (stop - start,), on the CPU.

    spec: the parameter's name, shape and kind of initial value. `stop` defaults to the parameter's
    end. Any two calls agree, bit for bit, on elements that both compute.

    Raises:
        ValueError: the range leaves the parameter.
    """
    stop = spec.n_elements if stop is None else stop
    if not 0 <= start <= stop <= spec.n_elements:
        raise ValueError(f"{spec.name}: [{start}, {stop}) must lie in [0, {spec.n_elements})")
    if spec.init.kind in CONSTANTS:
        return torch.full((stop - start,), CONSTANTS[spec.init.kind])
    values = np.empty(stop - start, dtype=np.float32)
    begin = start
    while begin < stop:
        end = min(stop, (begin // BLOCK_ELEMENTS + 1) * BLOCK_ELEMENTS)
        values[begin - start : end - start] = _draw(spec, seed, begin, end)
        begin = end
    return torch.from_numpy(values)


def _draw(spec: ParameterSpec, seed: int, start: int, stop: int) -> np.ndarray:
    """Draw the flat elements [start, stop) for a random initial value, float64 (stop - start,). The
    range lies in one block with BLOCK_ELEMENTS."""
    # The index's low 32 bits are the counter, as a signed word; the rest joins the key.
    index = np.arange(start, stop, dtype=np.int64).astype(np.uint32).view(np.int32)

    def uniform(word: int) -> np.ndarray:
        """Return a number in (0, 1) for each element, the center of its cell among 2^32 equal ones.
        `word` numbers the independent draws for an element."""
        key = make_key(seed, "weights", spec.name, word, start >> 32)
        return (bits(key, index).view(np.uint32).astype(np.float64) + 0.5) * 2.0**-32

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
