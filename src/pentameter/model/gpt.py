"""A GPT, whole or a slice of its layers. It is read in the order in which it runs.

It is plain: it knows nothing of devices, processes or precision, which are applied from outside.

Shapes: B batch, T time, D d_model, H heads, K head size, V vocabulary (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.config.choices import look_up, refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.model.attention import Attention, Read, read
from pentameter.model.cache import KVCache
from pentameter.model.dropout import EMBEDDING_SITE, StreamDropout, mlp_output_site
from pentameter.model.initial import initialize
from pentameter.model.loss import HeadLoss, softcapped
from pentameter.model.positions import Positions, rotation, sinusoidal_positions
from pentameter.planning.architecture import (
    embedding_dropout,
    feed_forward_width,
    has_final_norm,
    has_gate,
    has_position_table,
    layer_range,
    norm_has_bias,
    padded_vocab_size,
)

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,
    "geglu": F.gelu,
}
"""`model.activation` → what acts on the layer's inner width, or on its gate."""


class GPT(nn.Module):
    """Layers `first_layer` up to and without `last_layer` (n_layers when absent) of a GPT.

    The slice that begins at layer 0 embeds tokens, the one that ends at n_layers gives logits;
    blocks keep their global numbers, so that names survive slicing. A slice with a tied head but
    without the embeddings holds its own `token_embedding.weight`, to be kept equal to the other.

    Names and shapes of its parameters are those of `planning.architecture.parameter_table`.
    Parameters are not meaningful before `initialize` or loading; `build_model` does both steps.

    Raises:
        ConfigError: the configuration's `vocab_size` is not set.
        ValueError: the layer range is empty or leaves the model.
    """

    def __init__(
        self, config: ModelConfig, *, first_layer: int = 0, last_layer: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.first_layer, self.last_layer = layer_range(config, first_layer, last_layer)
        self.is_first = self.first_layer == 0
        self.is_last = self.last_layer == config.n_layers
        self.has_final_norm = has_final_norm(config)
        self.attention_positions: Callable[[Tensor], Tensor] | None = None
        """Picks from the positions (context_length,) of a sequence those that this process's
        attention gets, where processes divide the context; None where it gets all."""
        self.stream_positions: Callable[[Tensor], Tensor] | None = None
        """Picks from these the ones whose residual stream is here, where processes that share
        matrices divide time; None where all of it is."""
        self.stream_channels = slice(None)
        """Channels of the residual stream that are here, where processes divide them."""
        V, D = padded_vocab_size(config), config.d_model

        if self.is_first or (self.is_last and config.tied_head):
            self.token_embedding = nn.Embedding(V, D)
        if self.is_first:
            if has_position_table(config):
                self.position_embedding = nn.Embedding(config.context_length, D)
            self.embedding_dropout = StreamDropout(EMBEDDING_SITE, embedding_dropout(config))
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, layer) for layer in range(*self.layers)}
        )
        if self.is_last:
            if self.has_final_norm:
                self.final_norm = _norm(config)
            if config.tied_head:
                self.head: nn.Module = TiedHead(V if config.head_bias else None)
            else:
                self.head = nn.Linear(D, V, bias=config.head_bias)
            assert config.vocab_size is not None  # padded_vocab_size has refused that
            self.head_loss = HeadLoss(config.vocab_size, config.logit_softcap)

    @property
    def layers(self) -> tuple[int, int]:
        """The slice: (first_layer, last_layer)."""
        return self.first_layer, self.last_layer

    def forward(
        self,
        x: Tensor,
        *,
        targets: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the summed loss of `targets` from the last layers, logits (B, T, V) where none are
        given; from other layers the residual stream (B, T, D).

        `targets` are int64 (B, T), with -1 for places that do not count; the caller divides by
        the step's global number of target tokens. The other arguments are `hidden_states`'.
        """
        x = self.hidden_states(x, dropout_keys=dropout_keys, cache=cache, positions=positions)
        if not self.is_last:
            return x
        if targets is None:
            return self.logits(x)
        return self.head_loss(x, *self.head_parameters(), targets)

    def hidden_states(
        self,
        x: Tensor,
        *,
        dropout_keys: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return what the head reads, the final norm included, or the residual stream (B, T, D).

        x is tokens, int64 (B, T), where the slice begins at layer 0, else (B, T, D). Dropout acts
        in training when `dropout_keys` (B, n_sites, 2) are given. With a `cache`, x continues
        what the cache holds, and is appended to it. `positions`, int64 (T,), are those of all
        tokens that attention sees, in order; where absent they follow what the cache holds.

        Raises:
            ValueError: the context is longer than `context_length`, or dropout meets a cache.
        """
        n_past = 0 if cache is None else cache.length
        n_new = x.shape[1]
        self._check_context(n_past, n_new, dropout_keys, cache)
        if positions is None:
            positions = self._positions(n_past, n_new, x.device)
        of_stream = positions if self.stream_positions is None else self.stream_positions(positions)
        if self.is_first:
            x = self.embed(x, of_stream)
            x = self.embedding_dropout(x, dropout_keys, of_stream)
        turning = rotation(positions, self.config, x.dtype)
        both = Positions(of_stream, positions, turning)
        for block in self.blocks.values():
            x = block(x, both, dropout_keys, cache)
        if cache is not None:
            cache.advance(n_new)
        if self.is_last and self.has_final_norm:
            x = self.final_norm(x)
        return x

    def _positions(self, n_past: int, n_new: int, device: torch.device) -> Tensor:
        """Return the positions of the tokens that attention sees, int64 (T,), after n_past."""
        if self.attention_positions is not None:
            whole = torch.arange(self.config.context_length, device=device)
            return self.attention_positions(whole)
        # A later slice gets its part of a divided stream, of which the whole is the context.
        divided = self.stream_positions is not None and not self.is_first
        n_seen = self.config.context_length if divided else n_new
        return torch.arange(n_past, n_past + n_seen, device=device)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return what the first block sees, (B, T, D), of tokens (B, T) at `positions` (T,).

        Where the embedding gives a part of the time only, `positions` are that part's.
        """
        x = self.token_embedding(tokens)
        if self.config.embedding_scale:
            x = x * self.config.d_model**0.5
        match self.config.positions:
            case "learned":
                return x + self.position_embedding(positions)
            case "rotary":
                return x
            case "sinusoidal":
                table = sinusoidal_positions(positions, self.config.d_model, x.dtype)
                return x + table[:, self.stream_channels]
            case unknown:
                refuse_unknown(unknown, "model.positions", "the model")

    def logits(self, x: Tensor) -> Tensor:
        """Return logits (B, T, V) of hidden states (B, T, D)."""
        weight = (self.token_embedding.weight,) if self.config.tied_head else ()
        return softcapped(self.head(x, *weight), self.config.logit_softcap)

    def head_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return the head's weight (V, D), the embedding's where it is tied, and bias (V,)."""
        weight = (self.token_embedding if self.config.tied_head else self.head).weight
        bias = self.head.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        return weight, bias

    def _check_context(
        self, n_past: int, n_new: int, dropout_keys: Tensor | None, cache: KVCache | None
    ) -> None:
        if n_past + n_new > self.config.context_length:
            raise ValueError(
                f"{n_past} cached and {n_new} new tokens exceed "
                f"context_length={self.config.context_length}; reset the cache or pass fewer"
            )
        if dropout_keys is not None and cache is not None:
            raise ValueError("dropout_keys and cache exclude each other: pass only one")


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm_position = config.norm_position
        self.parallel_residual = config.parallel_residual
        self.attention_norm = _norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config, layer)

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the residual stream (B, T, D) after this layer."""
        match self.norm_position:
            case "pre":
                attended = x + self.attention(
                    self.attention_norm(x), positions, dropout_keys, cache
                )
                reads = x if self.parallel_residual else attended
                x = attended + self.mlp(self.mlp_norm(reads), positions, dropout_keys)
            case "post":
                x = self.attention_norm(x + self.attention(x, positions, dropout_keys, cache))
                x = self.mlp_norm(x + self.mlp(x, positions, dropout_keys))
            case "output":
                x = x + self.attention_norm(self.attention(x, positions, dropout_keys, cache))
                x = x + self.mlp_norm(self.mlp(x, positions, dropout_keys))
            case unknown:
                refuse_unknown(unknown, "model.norm_position", "the model")
        return x


class MLP(nn.Module):
    """The feed-forward layer, token by token."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D, d_ff = config.d_model, feed_forward_width(config)
        name = config.activation
        self.activation = look_up(ACTIVATIONS, name, "model.activation", "the model")
        self.gate = nn.Linear(D, d_ff, bias=config.bias) if has_gate(config) else None
        self.up = nn.Linear(D, d_ff, bias=config.bias)
        self.down = nn.Linear(d_ff, D, bias=config.bias)
        self.read: Read = read
        """As in `Attention`."""
        self.dropout = StreamDropout(mlp_output_site(layer), config.dropout)

    def forward(
        self, x: Tensor, positions: Positions, dropout_keys: Tensor | None = None
    ) -> Tensor:
        """Return (B, T, D)."""
        if self.gate is None:
            (up,) = self.read(x, self.up)
            inner = self.activation(up)  # (B, T, d_ff)
        else:
            gate, up = self.read(x, self.gate, self.up)
            inner = self.activation(gate) * up
        return self.dropout(self.down(inner), dropout_keys, positions.stream)


class TiedHead(nn.Module):
    """The output projection that shares the token embedding's weight; a bias of n_rows, or none."""

    def __init__(self, n_rows: int | None) -> None:
        super().__init__()
        self.bias = None if n_rows is None else nn.Parameter(torch.zeros(n_rows))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return logits (B, T, V) of x (B, T, D) with the weight (V, D)."""
        return F.linear(x, weight, self.bias)


def build_model(
    config: ModelConfig,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    first_layer: int = 0,
    last_layer: int | None = None,
) -> GPT:
    """Return an initialised GPT, or a slice of one, on `device` in `dtype`.

    It is shaped without memory first, so that no random generator is used and nothing is
    written twice. `seed` picks the weights.
    """
    with torch.device("meta"):
        model = GPT(config, first_layer=first_layer, last_layer=last_layer).to(dtype)
    model.to_empty(device=device)
    initialize(model, config, seed)
    return model


def _norm(config: ModelConfig) -> nn.Module:
    match config.norm:
        case "layernorm":
            return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=norm_has_bias(config))
        case "rmsnorm":
            return nn.RMSNorm(config.d_model, eps=config.norm_eps)
        case unknown:
            refuse_unknown(unknown, "model.norm", "the model")
