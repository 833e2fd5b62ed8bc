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


class MLP(nn.Module):
    """The feed-forward layer, applied to each token by itself: down(f(up(x))), or with a gate
    down(f(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D, d_ff = config.d_model, config.feed_forward_width
        name = config.activation
        self.activation = look_up(ACTIVATIONS, name, "model.activation", "the model")
        self.gate = nn.Linear(D, d_ff, bias=config.bias) if config.has_gate else None
        self.up = nn.Linear(D, d_ff, bias=config.bias)
        self.down = nn.Linear(d_ff, D, bias=config.bias)
        self.read: Read = read
        """Function that applies the column-parallel linears to the residual stream; tensor
        parallelism replaces it, as it does `Attention.read`."""
        self.dropout = StreamDropout(mlp_output_site(layer), config.dropout)

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Apply the layer to x (B, T, D), and return (B, T, D), without the residual sum. Dropout
        acts in training if `dropout_keys` (B, n_sites, 2) are given; `positions.stream` numbers its
        elements. `cache` is ignored: it is attention's."""
        if self.gate is None:
            (up,) = self.read(x, self.up)
            inner = self.activation(up)  # (B, T, d_ff)
        else:
            gate, up = self.read(x, self.gate, self.up)
            inner = self.activation(gate) * up
        return self.dropout(self.down(inner), dropout_keys, positions.stream)
