"""Which experts the tokens of a text are sent to, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pentameter.errors import ConfigError
from pentameter.model.experts import Router, Routing
from pentameter.model.gpt import GPT


@dataclass(frozen=True)
class LayerChoices:
    """One layer's experts for N tokens, k for each."""

    layer: int
    experts: npt.NDArray[np.int64]
    """(N, k), in the order in which they were chosen; the number of experts, which none has, where
    an expert had no room (`model.expert_capacity`)."""
    weights: npt.NDArray[np.float64]
    """(N, k), factors of the experts' outputs."""
    n_experts: int


@torch.no_grad()
def expert_choices(model: nn.Module, tokens: npt.NDArray[np.int64]) -> list[LayerChoices]:
    """Return the experts that each layer of a mixture sends the tokens (N,) to, N > 0.

    A text longer than the context is read in pieces of that length, each by itself. Raises
    ConfigError for a model without experts.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not isinstance(model, GPT) or not routers:
        raise ConfigError("the model has no experts: model.n_experts is not set")
    config, device = model.config, next(model.parameters()).device
    layers = [layer for layer in range(config.n_layers) if config.has_experts(layer)]
    found: dict[int, list[Routing]] = defaultdict(list)

    def keep(layer: int, _module: nn.Module, _inputs: Any, routing: Routing) -> None:
        found[layer].append(routing)

    handles = [
        router.register_forward_hook(partial(keep, layer))
        for layer, router in zip(layers, routers, strict=True)
    ]
    try:
        for piece in torch.from_numpy(tokens).split(config.context_length):
            model.hidden_states(piece[None].to(device))
    finally:
        for handle in handles:
            handle.remove()
    assert config.n_experts is not None
    return [
        LayerChoices(
            layer,
            torch.cat([each.experts for each in routings]).cpu().numpy(),
            torch.cat([each.weights for each in routings]).cpu().double().numpy(),
            config.n_experts,
        )
        for layer, routings in found.items()
    ]
