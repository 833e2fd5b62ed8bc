"""The feed-forward layer: two matrices, or three with a gate, around an activation function.

Shapes: B batch, T tokens, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.config.choices import look_up
from pentameter.config.schema import ModelConfig
from pentameter.model.attention import Read, read
from pentameter.model.cache import Cache
from pentameter.model.dropout import StreamDropout, mlp_output_site
from pentameter.model.positions import Positions

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,
    "geglu": F.gelu,
}
"""Value of `model.activation` → the function on the first linear's output; with a gate, on
the gate's output."""


class FeedForward(nn.Module):
    """Linear layers around an activation function, with `width` channels in between, applied to
    each token by itself."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        D, name = config.d_model, config.activation
        self.activation = look_up(ACTIVATIONS, name, "model.activation", "the model")
        self.gate = nn.Linear(D, width, bias=config.bias) if config.has_gate else None
        self.up = nn.Linear(D, width, bias=config.bias)
        self.down = nn.Linear(width, D, bias=config.bias)
        self.read: Read = read
        """Applies the column-parallel linears, as `Attention.read` does."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D) for x (B, T, D)."""
        if self.gate is None:
            (up,) = self.read(x, self.up)
            return self.down(self.activation(up))
        gate, up = self.read(x, self.gate, self.up)  # (B, T, width) each
        return self.down(self.activation(gate) * up)


class MLP(FeedForward):
    """The feed-forward layer of a block, with dropout."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, config.feed_forward_width)
        self.dropout = StreamDropout(mlp_output_site(layer), config.dropout)

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
