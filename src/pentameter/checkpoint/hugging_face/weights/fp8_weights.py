"""Reading of FP8 weights that have a scale for each block of a matrix, as DeepSeek-V3 is published,
as fp32.

Beside each float8_e4m3fn matrix `NAME` lies `NAME_scale_inv`, with one number for each block of the
matrix. A weight is the stored element times its block's number. The last blocks of rows and columns
may be smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.config.messages import shown
from pentameter.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    import torch

SCALES = "_scale_inv"
"""Suffix that makes a weight's name the name of its scales."""


def block_size(content: Mapping[str, Any], path: Path) -> tuple[int, int] | None:
    """Return the rows and columns of a block, from `quantization_config` in config.json (`content`,
    its JSON object); None if the weights are not in FP8. `path` is for messages.

    Raises ConfigError for FP8 that is not e4m3 with scales by blocks.
    """
    found = content.get("quantization_config")
    if found is None or found["quant_method"] != "fp8":
        return None
    size = found.get("weight_block_size")
    if (
        found.get("fmt", "e4m3") != "e4m3"
        or not isinstance(size, list)
        or len(size) != 2
        or not all(type(n) is int and n > 0 for n in size)
    ):
        raise ConfigError(
            f"{path}: quantization_config={shown(found)} is not supported: FP8 weights are read as "
            "e4m3 with a scale for each block (weight_block_size); save others dequantised"
        )
    return size[0], size[1]


def dequantized(
    tensors: Mapping[str, LazyTensor], block: tuple[int, int] | None, where: Path
) -> dict[str, LazyTensor]:
    """Return `tensors`, name → lazy tensor, with each FP8 weight and its scales replaced by one
    fp32 tensor, whose regions are computed from theirs at access. `block` is the rows and columns
    of a block, None if nothing is quantized; `where`, a file or folder, is for messages.

    Raises CorruptError, by name, for an FP8 tensor without scales, and for scales that are not one
    for each of its blocks.
    """
    import torch

    result = dict(tensors)
    for name, weight in tensors.items():
        if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            continue
        scales = result.pop(f"{name}{SCALES}", None)
        if block is None or scales is None or weight.dtype != torch.float8_e4m3fn:
            raise CorruptError(
                f"{where}: {name} is of {weight.dtype}, which is read only as float8_e4m3fn with "
                f"{name}{SCALES} beside it and a quantization_config with weight_block_size"
            )
        if len(weight.shape) < 2:
            raise CorruptError(f"{where}: {name} is {weight.shape} of FP8, which a matrix alone is")
        # A matrix for each expert has blocks of its own.
        sizes = (*(1 for _ in weight.shape[2:]), *block)
        blocks = tuple(-(-n // size) for n, size in zip(weight.shape, sizes, strict=True))
        if scales.shape != blocks or not scales.dtype.is_floating_point:
            raise CorruptError(
                f"{where}: {name}{SCALES} is {scales.shape} of {scales.dtype}, {name} "
                f"{weight.shape} asks for {blocks}, a scale for each block of {block}"
            )
        fill = partial(_fill, weight, scales, sizes)
        result[name] = LazyTensor(weight.shape, torch.float32, fill)
    return result


def _fill(
    weight: LazyTensor,
    scales: LazyTensor,
    sizes: Sequence[int],
    target: torch.Tensor,
    region: tuple[slice, ...],
) -> None:
    """Fill `target`, in place, with one region (start and stop per dimension) of `weight` times
    `scales`, computed in fp32. `sizes` is a block's shape; only scales of blocks that the region
    overlaps are read."""
    import torch

    grid = zip(region, sizes, strict=True)
    factors = scales[tuple(slice(each.start // n, -(-each.stop // n)) for each, n in grid)].float()
    for dim, (each, n) in enumerate(zip(region, sizes, strict=True)):
        block = torch.arange(each.start, each.stop) // n - each.start // n
        factors = factors.index_select(dim, block)
    target.copy_(weight[region].float().mul_(factors))
