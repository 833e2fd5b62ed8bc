"""A mixture of experts that begins with a dense model's weights: each expert is a copy of the
feed-forward layer (Komatsuzaki et al. 2022, "Sparse upcycling").

If the weights of a token's chosen experts sum to 1, the mixture computes what the dense model does,
whichever experts its router chooses. To make experts differ from the start, noise may be added, and
some channels of each copy may be initialized anew.

Shapes: E experts, F inner width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.config.model.architecture import ModelConfig
from pentameter.config.model.feed_forward import ExpertsConfig, RouterConfig
from pentameter.config.schema import Config
from pentameter.keyed import bits, make_key
from pentameter.planning.architecture import ParameterSpec

if TYPE_CHECKING:
    import torch


def dense_architecture(model: ModelConfig) -> ModelConfig:
    """Return the architecture with a feed-forward layer in place of each layer's experts."""
    return model.updated({"experts": ExpertsConfig(), "router": RouterConfig()})


def dense_name(name: str) -> str:
    """Return the name that a parameter of a model with experts has in the dense model whose
    feed-forward layers the experts are copied from: `blocks.0.mlp.up.weight` for
    `blocks.0.experts.up.weight`. For a router's parameters, the returned name does not exist in the
    dense model, as they have no counterpart there."""
    return name.replace(".experts", ".mlp", 1)


def needed_settings(dense: ModelConfig, mixture: ModelConfig) -> list[str]:
    """Return the settings that `mixture` must change to compute what the model `dense` does, given
    that every expert is a copy of its feed-forward layer: one phrase each, with the reason. Empty
    if nothing must change."""
    E, k, capacity = mixture.experts.count, mixture.experts.n_chosen, mixture.experts.capacity
    assert E is not None
    needed = []
    takes_all = mixture.router.score_function == "softmax" and k == E
    if not (mixture.router.renormalize or mixture.router.top_k_first or takes_all):
        needed.append(
            "model.router.renormalize=true or model.router.top_k_first=true (a token's weights "
            "then sum to 1)"
        )
    if mixture.router.scale != 1.0:
        needed.append(f"model.router.scale=1 instead of {mixture.router.scale:g} (as above)")
    if mixture.expert_width != dense.feed_forward_width:
        needed.append(
            f"model.experts.width={dense.feed_forward_width} instead of {mixture.expert_width} "
            "(the width of what is copied)"
        )
    if mixture.experts.n_shared:
        needed.append(
            f"model.experts.n_shared=0 instead of {mixture.experts.n_shared} (these are added)"
        )
    if capacity is not None and capacity * k < E:
        needed.append(
            f"model.experts.capacity={E / k:g} or more, or none, instead of {capacity:g} (an "
            "expert may get all tokens)"
        )
    return needed


def fill_experts(
    target: torch.Tensor,
    region: tuple[slice, ...],
    dense: torch.Tensor | LazyTensor,
    spec: ParameterSpec,
    config: Config,
) -> None:
    """Fill `target`, in place, with one region of the stack (E, …) of copies of the dense model's
    tensor `dense`.

    target: holds the parameter's random initial values. A fraction of them (`train.upcycle_noise`)
    is added to the copies. They stay as they are in the channels of the inner width that an expert
    does not copy (`train.upcycle_drop`). region: one slice per dimension of the stack, experts
    first. spec: the parameter's name, layer and axes. config: the run's.
    """
    import torch

    experts, *inner = region
    copy = dense[tuple(inner)].to(target.device, target.dtype)
    noise, drop = config.train.upcycle_noise, config.train.upcycle_drop
    for number, own in zip(range(experts.start, experts.stop), target, strict=True):
        copied = own.mul(noise).add_(copy) if noise else copy
        if drop and "expert_mlp" in spec.axes:
            dim = spec.axes.index("expert_mlp") - 1  # within one expert
            fresh = _fresh_channels(spec, number, inner[dim], config)
            shape = [-1 if at == dim else 1 for at in range(own.ndim)]
            copied = torch.where(fresh.to(own.device).view(shape), own, copied)
        own.copy_(copied)


def _fresh_channels(
    spec: ParameterSpec, expert: int, channels: slice, config: Config
) -> torch.Tensor:
    """Return a mask, bool (n,), over the n `channels` (a slice of F): True where `expert` keeps its
    random initial values instead of a copy. It is drawn from the seed, layer, expert and channel,
    so all matrices of an expert have the same mask."""
    import torch

    assert spec.layer is not None
    key = make_key(config.seed, "upcycle_drop", spec.layer, expert)
    index = torch.arange(channels.start, channels.stop, dtype=torch.int32)
    # Signed words, uniform: the lowest fraction of them.
    fresh: torch.Tensor = bits(key, index).double() < config.train.upcycle_drop * 2**32 - 2**31
    return fresh
