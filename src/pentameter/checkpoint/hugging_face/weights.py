"""GPT-2's parameters and ours: names, and where the same numbers lie in each.

GPT-2's linear layers are `Conv1D`: their weight is (n_in, n_out), ours (n_out, n_in). Its fused
attention projection holds all queries, then all keys, then all values, (3, H, K); ours goes head
by head, (H, 3, K), so that heads can be cut.

Shapes: D d_model, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from pentameter.checkpoint.safetensors_writer import LazyTensor, materialize
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import ParameterSpec, parameter_table

if TYPE_CHECKING:
    import torch

    from pentameter.checkpoint.stored import Weights

BODY = "transformer."
"""Before every name in a GPT2LMHeadModel, but the head's; absent in a GPT2Model."""
HEAD = "lm_head.weight"

_WHOLE = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "final_norm": "ln_f",
}
_OF_A_LAYER = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


@dataclass(frozen=True)
class Pair:
    """A parameter of ours and where GPT-2 keeps it."""

    ours: ParameterSpec
    theirs: str
    """Its name in a GPT2LMHeadModel."""
    layout: Literal["same", "transposed", "fused"]
    n_heads: int

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape there."""
        return self.ours.shape if self.layout == "same" else self.ours.shape[::-1]

    def to_theirs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Our tensor as GPT-2 has it; padded rows of the vocabulary are left out."""
        if self.ours.axes[0] == "vocab":
            tensor = tensor[: self.ours.shape[0]]
        if self.layout == "fused":
            tensor = tensor.unflatten(0, (self.n_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return tensor if self.layout == "same" or tensor.ndim == 1 else tensor.t()

    def to_ours(self, tensor: torch.Tensor) -> torch.Tensor:
        """GPT-2's tensor as we have it."""
        if self.layout != "same" and tensor.ndim == 2:
            tensor = tensor.t()
        if self.layout == "fused":
            tensor = tensor.unflatten(0, (3, self.n_heads, -1)).transpose(0, 1).flatten(0, 2)
        return tensor


def pairs(model: ModelConfig) -> Iterator[Pair]:
    """Every parameter that the GPT-2 of this architecture has: with all biases, without padding."""
    whole = model.model_copy(update={"bias": True, "qkv_bias": True, "vocab_multiple": 1})
    for spec in parameter_table(whole):
        place, _, kind = spec.name.rpartition(".")  # `blocks.0.attention.qkv`, `weight`
        if spec.layer is None:
            name = HEAD if place == "head" else f"{BODY}{_WHOLE[place]}.{kind}"
            yield Pair(spec, name, "same", model.n_heads)
            continue
        place = place.removeprefix(f"blocks.{spec.layer}.")
        name = f"{BODY}h.{spec.layer}.{_OF_A_LAYER[place]}.{kind}"
        if place == "attention.qkv":
            yield Pair(spec, name, "fused", model.n_heads)
        else:
            is_matrix = len(spec.shape) == 2
            yield Pair(spec, name, "transposed" if is_matrix else "same", model.n_heads)


def to_gpt2(model: ModelConfig, weights: Weights) -> dict[str, LazyTensor]:
    """GPT-2's tensors by name, each converted when it is asked for.

    A bias that our model does not have is zero there, which changes no result.
    """
    import torch

    dtype = next(iter(weights.values())).dtype
    converted = {}
    for pair in pairs(model):
        source = weights.get(pair.ours.name)
        if source is None:
            compute = partial(torch.zeros, pair.their_shape, dtype=dtype)
        else:
            compute = partial(_export, pair, source)
        converted[pair.theirs] = LazyTensor(pair.their_shape, dtype, compute)
    return converted


def from_gpt2(
    model: ModelConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Our tensors by name in `dtype`, each converted when it is asked for.

    tensors: GPT-2's, complete and of the right shapes, named as in a GPT2LMHeadModel.
    """
    return {
        pair.ours.name: LazyTensor(
            pair.ours.shape, dtype, partial(_import, pair, tensors[pair.theirs], dtype)
        )
        for pair in pairs(model)
    }


def _export(pair: Pair, source: torch.Tensor | LazyTensor) -> torch.Tensor:
    return pair.to_theirs(materialize(source)).contiguous()


def _import(pair: Pair, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return pair.to_ours(tensor.to(dtype)).contiguous()
