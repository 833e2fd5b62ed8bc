"""The feed-forward layer: two matrices, or three with a gate, around an activation function.

Shapes: B batch, T tokens, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.config.choices import look_up
from pentameter.config.schema import ModelConfig
from pentameter.model.attention.attention import Read, read
from pentameter.model.attention.cache import Cache
from pentameter.model.dropout import StreamDropout, mlp_output_site
from pentameter.model.positions import Positions

Activation = Callable[..., Tensor]
"""Type of an activation function: the outputs (…, F) of `up`, or with a gate those of `gate` and of
`up`, → the input (…, F) of `down`."""

ACTIVATIONS: Mapping[str, Activation] = {
    "relu": F.relu,
    "relu2": lambda up: F.relu(up).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swiglu_clamped": lambda gate, up, *, alpha, limit: _clamped_swiglu(gate, up, alpha, limit),
}
"""Maps a value of `model.feed_forward.activation` to its function; `activation_of` binds a model's
numbers to it."""


def _clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gate · sigmoid(alpha · gate) · (up + 1), for gate and up (…, F) clamped to at most
    `limit`, and `up` also to at least -`limit` (OpenAI 2025, "gpt-oss")."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def activation_of(config: ModelConfig) -> Activation:
    """Return the model's activation function, which `model.feed_forward.activation` names."""
    name = config.feed_forward.activation
    function = look_up(ACTIVATIONS, name, "model.feed_forward.activation", "the model")
    if name != "swiglu_clamped":
        return function
    return partial(
        function, alpha=config.feed_forward.swiglu_alpha, limit=config.feed_forward.swiglu_limit
    )


class FeedForward(nn.Module):
    """Linear layers around an activation function, with `width` channels in between, applied to
    each token by itself."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        D = config.d_model
        self.activation = activation_of(config)
        self.gate = nn.Linear(D, width, bias=config.bias) if config.feed_forward.has_gate else None
        self.up = nn.Linear(D, width, bias=config.bias)
        self.down = nn.Linear(width, D, bias=config.bias)
        self.read: Read = read
        """Function that applies the column-parallel linears to one input. Tensor parallelism
        replaces it, as it does `Attention.read`."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x (B, T, D), each token by itself; return (B, T, D), without the
        residual sum."""
        linears = (self.up,) if self.gate is None else (self.gate, self.up)
        return self.down(self.activation(*self.read(x, *linears)))


class MLP(FeedForward):
    """The feed-forward layer of a block, with dropout."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, config.feed_forward_width)
        self.dropout = StreamDropout(mlp_output_site(layer), config.dropout, config.context_length)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Apply the layer to x (B, T, D), and return (B, T, D), without the residual sum.
        positions: the tokens', for dropout. dropout_keys: int32 (B, n_sites, 2), None for no
        dropout. `cache` is ignored: only attention has one."""
        return self.dropout(super().forward(x), dropout_keys, positions.stream)
