"""The experts to which each layer's router sends the tokens of a text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from rich.text import Text
from torch import nn

from pentameter.errors import ConfigError, printable
from pentameter.machine.on_host import on_host
from pentameter.model.experts import Router, Routing
from pentameter.model.gpt import GPT


@dataclass(frozen=True)
class LayerChoices:
    """The experts to which one layer sends each of N tokens, k per token."""

    layer: int
    experts: npt.NDArray[np.int64]
    """(N, k), indices below `n_experts` in the order in which they were chosen. If an expert had no
    room for the token (`model.experts.capacity`), `n_experts` stands in its place."""
    weights: npt.NDArray[np.float64]
    """(N, k) factors by which the outputs of the chosen experts are multiplied."""
    n_experts: int
    """Number of experts in the layer, without shared ones."""

    def to_json(self) -> dict[str, Any]:
        """Return the layer's JSON object, with each token's experts and weights."""
        lists = {"experts": self.experts.tolist(), "weights": self.weights.tolist()}
        return {"layer": self.layer, **lists}


@torch.no_grad()
def expert_choices(model: nn.Module, tokens: npt.NDArray[np.int64]) -> list[LayerChoices]:
    """Return the expert choices of each layer with experts, in order, for the tokens (N,), N > 0.
    The model runs without gradients.

    A text longer than `context_length` is read in pieces of that many tokens, each without the
    tokens before it. Raises ConfigError for a model without experts, and for a custom one.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not isinstance(model, GPT) or not routers:
        raise ConfigError("the model has no experts: model.experts.count is not set")
    config, device = model.config, next(model.parameters()).device
    layers = [layer for layer in range(config.n_layers) if config.experts.are_in(layer)]
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
    assert config.experts.count is not None
    return [
        LayerChoices(
            layer,
            torch.cat([each.experts for each in routings]).cpu().numpy(),
            on_host(torch.cat([each.weights for each in routings])),
            config.experts.count,
        )
        for layer, routings in found.items()
    ]


MOST_TOKENS_NAMED = 12
"""Maximum number of different tokens listed for an expert."""


def expert_table(choices: LayerChoices, shown: Sequence[str]) -> Table:
    """Return a table with a row for each expert of one layer: how many tokens chose it, and which
    ones, the most frequent first. `shown` has the tokens' texts (N,)."""
    title = (
        f"layer {choices.layer}: {len(shown):,} tokens, {choices.experts.shape[1]} experts for each"
    )
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in ("expert", "tokens", "share"):
        table.add_column(heading, justify="right")
    table.add_column("which, the most frequent first", no_wrap=True, overflow="ellipsis")
    for expert in range(choices.n_experts):
        takes = (choices.experts == expert).any(1)
        words = Counter(word for word, taken in zip(shown, takes, strict=True) if taken)
        named = [
            f"{printable(repr(word))}{f' ×{count}' if count > 1 else ''}"
            for word, count in words.most_common(MOST_TOKENS_NAMED)
        ]
        listed = [*named, "…"] if len(words) > MOST_TOKENS_NAMED else named
        share = f"{takes.sum() / choices.experts.size:.1%}"
        table.add_row(str(expert), f"{takes.sum():,}", share, Text("  ".join(listed)))
    if n_left := int((choices.experts == choices.n_experts).sum()):
        table.caption = f"no room (model.experts.capacity) for {n_left:,}"
        table.caption_justify = "left"
    return table
