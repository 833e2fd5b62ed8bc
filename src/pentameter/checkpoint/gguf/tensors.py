"""The tensors of a GGUF file: their names in llama.cpp, their numbers, and the order of rotated
channels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.gguf.architectures import Architecture
from pentameter.checkpoint.gguf.rotary import rotary_factors
from pentameter.config.model.architecture import ModelConfig
from pentameter.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

DTYPES = ("F32", "F16", "BF16", "Q8_0")
"""Names, in GGUF, of the numbers that matrices may be written in. `Q8_0` is blocks of 32 bytes with
a common scale."""
_WHOLE = (
    "_norm.weight",
    "position_embd.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
)
"""Endings of the names of matrices that llama.cpp reads as fp32 whatever the file's dtype."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a GGUF file."""

    name: str
    values: torch.Tensor | LazyTensor
    dtype: str
    """One of DTYPES."""
    n_heads: int | None = None
    """The number of heads whose rows are rotated channels that shall be neighbors; None if rows
    stay in their order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.values.shape)

    def n_bytes(self, gguf: Any) -> int:
        """Return the tensor's size in the file in bytes."""
        kind = gguf.GGMLQuantizationType[self.dtype]
        return math.prod(gguf.quant_shape_to_byte_shape(self.shape, kind))

    def data(self, gguf: Any) -> np.ndarray[Any, Any]:
        """Read the tensor, and return it as the file has it. Raises ConfigError if `F16` cannot
        hold it."""
        import torch

        values = self.values[...].to(torch.float32)
        if self.n_heads is not None:  # (H, 2, R / 2) → (H, R / 2, 2)
            halves = values.unflatten(0, (self.n_heads, 2, -1))
            values = halves.transpose(1, 2).flatten(0, 2)
        if self.dtype == "F16" and values.abs().max() > torch.finfo(torch.float16).max:
            raise ConfigError(
                f"{self.name} has numbers up to {float(values.abs().max()):.3g}, more than F16 "
                "holds; take --dtype BF16"
            )
        found: np.ndarray[Any, Any] = gguf.quants.quantize(
            values.contiguous().numpy(), gguf.GGMLQuantizationType[self.dtype]
        )
        return found


def file_tensors(
    weights: Mapping[str, LazyTensor],
    chosen: Architecture,
    model: ModelConfig,
    dtype: str,
    gguf: Any,
) -> Iterator[FileTensor]:
    """Yield a file's tensors in order.

    weights: the family's name → tensor, as `Architecture.as_family` has them.
    chosen, model: the architecture and the model.
    dtype: of matrices, one of DTYPES; rows that `Q8_0` cannot cut into blocks are `F16`.
    gguf: the package.
    """
    kind = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[chosen.architecture]
    names = gguf.get_tensor_name_map(kind, model.n_layers)
    family = chosen.as_family()
    whole = dict(weights)
    if chosen.needs_head and model.tied_head:
        whole[family.head] = whole[f"{family.body}{family.names['token_embedding']}.weight"]
    for name, factors in rotary_factors(model, chosen.rope_scalings).items():
        yield FileTensor(name, factors, "F32")
    for theirs, tensor in whole.items():
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ConfigError(
                f"the installed package gguf has no name for {theirs} in llama.cpp's "
                f"{chosen.architecture!r}; `pip install -U gguf`"
            )
        yield FileTensor(
            name, tensor, _dtype(name, tensor, dtype), _n_turning_heads(theirs, chosen, model)
        )


def _dtype(name: str, tensor: LazyTensor, asked: str) -> str:
    """Return the dtype, one of DTYPES, of the tensor `name` in a file whose matrices are
    `asked`."""
    if len(tensor.shape) == 1 or name.endswith((*_WHOLE, ".bias")):
        return "F32"
    return "F16" if asked == "Q8_0" and tensor.shape[-1] % 32 else asked


def _n_turning_heads(theirs: str, chosen: Architecture, model: ModelConfig) -> int | None:
    """Return the number of heads in the tensor called `theirs` if its rows are rotated channels
    that llama.cpp wants beside each other; else None."""
    if not chosen.neighbors:
        return None
    queries, keys, _ = chosen.as_family().projections.names
    module = theirs.rpartition(".")[0]
    if module.endswith(queries):
        return model.attention.n_heads
    return model.attention.kv_heads if module.endswith(keys) else None
