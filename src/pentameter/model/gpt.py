"""A GPT, whole or a slice of its layers, written in the order in which it runs.

It is plain: devices, ranks and precision are applied from outside, by code in `parallel/` that it
does not know. Where ranks shard the sequence or the channels, that code hands it a part, and says
which by three attributes of `GPT`: `attention_positions`, `stream_positions` and `stream_channels`.

Shapes: B batch, T tokens, D d_model, H heads, K head size, V vocabulary (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from pentameter.config.choices import look_up, refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.model.attention.attention import Attention
from pentameter.model.attention.cache import Cache, KVCache
from pentameter.model.attention.latent_attention import LatentAttention
from pentameter.model.dropout import EMBEDDING_SITE, StreamDropout
from pentameter.model.experts import Experts, Router
from pentameter.model.feed_forward import MLP
from pentameter.model.initial import initialize
from pentameter.model.loss import AuxiliaryLoss, HeadLoss, softcapped
from pentameter.model.matmul import PLAIN, Matmul
from pentameter.model.positions import Positions, rotations, sinusoidal_positions
from pentameter.planning.gpt import layer_range, norm_names, sub_layers

SUB_LAYERS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {
    "attention": Attention,
    "latent_attention": LatentAttention,
    "mlp": MLP,
    "experts": Experts,
}
"""Maps a sub-layer's name in `planning/sub_layers/` to a function (configuration, block's index)
that builds its module. The module's forward takes the same arguments as `MLP.forward`."""


class GPT(nn.Module):
    """Layers `first_layer` up to but excluding `last_layer` (default n_layers) of a GPT.

    The slice that begins at layer 0 embeds tokens; the one that ends at n_layers gives logits or
    the loss. Blocks keep their global numbers, so parameter names survive slicing. A slice with
    a tied head but without the embeddings holds its own `token_embedding.weight`, to be kept
    equal to the other.

    Names and shapes of its parameters are those in `planning.gpt.parameter_table`. Parameters are
    uninitialized before `initialize` or loading; `build_model` builds and initializes.

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
        self.has_final_norm = config.has_final_norm
        self.attention_positions: Callable[[Tensor], Tensor] | None = None
        """Function that selects, from all positions of a sequence (context_length,), those of the
        tokens that this rank's attention gets under context parallelism; None if it gets all. Set
        from outside."""
        self.stream_positions: Callable[[Tensor], Tensor] | None = None
        """Function that selects, from the attention's positions (T,), those of the tokens that are
        in this rank's residual stream, if ranks shard the stream along the sequence; None if all
        are. Set from outside."""
        self.text_length: int | None = None
        """Number of tokens by which rotary frequencies go that depend on a text's length; None: as
        a call says. Set from outside: a run has it as long as its context, in every layout."""
        self.stream_channels = slice(None)
        """Slice of the residual stream's channels that this rank has; all, unless ranks shard
        channels and set it."""
        self.stream_dtype: torch.dtype | None = None
        """Dtype of the residual stream in training; None for the embeddings'. Set from outside."""
        V, D = config.padded_vocab_size, config.d_model

        if self.is_first or (self.is_last and config.tied_head):
            self.token_embedding = _embedding(V, D)
        if self.is_first:
            if config.has_position_table:
                self.position_embedding = _embedding(config.context_length, D)
            self.embedding_dropout = StreamDropout(
                EMBEDDING_SITE, config.embedding_dropout_rate, config.context_length
            )
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, layer) for layer in range(*self.layers)}
        )
        if self.is_last:
            if self.has_final_norm:
                self.final_norm = _norm(config)
            # Called for logits only: for a loss `head_loss` multiplies by its weight.
            if config.tied_head:
                self.head: nn.Module = TiedHead(V if config.head_bias else None)
            else:
                self.head = nn.Linear(D, V, bias=config.head_bias)
            assert config.vocab_size is not None  # padded_vocab_size has refused None
            self.head_loss = HeadLoss(config.vocab_size, config.logit_softcap)

    @property
    def layers(self) -> tuple[int, int]:
        """The slice's layers: (first_layer, last_layer), the last one excluded."""
        return self.first_layer, self.last_layer

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Give parameters memory on `device`, uninitialized, and buffers their first values, which
        PyTorch leaves out: an auxiliary loss would be multiplied by what was in memory."""
        super().to_empty(device=device, recurse=recurse)
        for module in self.modules():
            if isinstance(module, Router):
                module.start_step()
            elif isinstance(module, AuxiliaryLoss):
                module.start_step(1.0)
        return self

    def forward(
        self,
        x: Tensor,
        *,
        targets: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        length: int | Tensor | None = None,
    ) -> Tensor:
        """Run the slice. A slice with the last layer returns the summed loss in nats against
        `targets`, 0-dim, or logits (B, T, V) if `targets` is None. Any other slice returns the
        residual stream (B, T, D). `StageModule`, by which a run calls the slice, makes the 0-dim
        loss (1,).

        x is tokens, int64 (B, T), if the slice begins at layer 0, else the residual stream
        (B, T, D). `targets` are int64 (B, T), -1 for tokens that the loss mask excludes; the caller
        divides by the step's global number of target tokens. Dropout acts in training if
        `dropout_keys`, int32 (B, n_sites, 2), are given. With a `cache`, x continues the cached
        tokens and is appended to them. `positions`, int64 (T,), are those of all tokens that
        attention sees; by default they follow the cached ones. `length` is the number of tokens
        in the text so far, by which some rotary frequencies go; by default those cached and new.
        Raises ValueError if the context exceeds `context_length`, or dropout keys meet a cache.
        """
        x = self.hidden_states(
            x, dropout_keys=dropout_keys, cache=cache, positions=positions, length=length
        )
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
        length: int | Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream (B, T, D) after this slice's layers; from the last slice after
        the final norm, ready for the head.

        x is tokens, int64 (B, T), if the slice begins at layer 0, else the residual stream
        (B, T, D). Dropout acts in training if `dropout_keys`, int32 (B, n_sites, 2), are given.
        With a `cache`, x continues the cached tokens and is appended to them. `positions`,
        int64 (T,), are those of all tokens that attention sees, in order; by default they
        follow the cached ones. `length` is as in `forward`.

        Raises:
            ValueError: the context exceeds `context_length`, or dropout keys meet a cache.
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
            if self.training and self.stream_dtype is not None:
                x = x.to(self.stream_dtype)
        if self.text_length is not None:
            length = self.text_length
        length = n_past + n_new if length is None else length
        rotary = rotations(positions, self.config, x.dtype, length)
        all_positions = Positions(of_stream, positions, rotary)
        for block in self.blocks.values():
            x = block(x, all_positions, dropout_keys, cache)
        if cache is not None:
            cache.advance(n_new)
        if self.is_last and self.has_final_norm:
            x = self.final_norm(_wide(x, self.final_norm))
        return x

    def _positions(self, n_past: int, n_new: int, device: torch.device) -> Tensor:
        """Return the positions of the tokens that attention sees, int64 (T,), for `n_new` tokens
        after `n_past` cached ones."""
        if self.attention_positions is not None:
            whole = torch.arange(self.config.context_length, device=device)
            return self.attention_positions(whole)
        # A later slice gets a local block of a sharded stream; the whole stream is the context.
        is_sharded = self.stream_positions is not None and not self.is_first
        n_seen = self.config.context_length if is_sharded else n_new
        return torch.arange(n_past, n_past + n_seen, device=device)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed tokens, int64 (B, T), at `positions` (T,) into the first block's input
        (B, T, D), before dropout.

        If the embedding returns only a local block of the sequence, `positions` are that block's.
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
        """Return softcapped logits (B, T, V) for hidden states (B, T, D). Only here is `head`
        called; a loss is computed from `head_parameters` instead."""
        weight = (self.token_embedding.weight,) if self.config.tied_head else ()
        return softcapped(self.head(x, *weight), self.config.logit_softcap)

    def head_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return the head's weight (V, D), which is the token embedding's if they are tied, and its
        bias (V,), or None without one. `head_loss` gets them as arguments: in training `head` only
        holds them, and its forward is not called."""
        weight = (self.token_embedding if self.config.tied_head else self.head).weight
        bias = self.head.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        return weight, bias

    def _check_context(
        self, n_past: int, n_new: int, dropout_keys: Tensor | None, cache: KVCache | None
    ) -> None:
        """Raise ValueError if cached and new tokens exceed `context_length`, or if both dropout
        keys and a cache are given."""
        if n_past + n_new > self.config.context_length:
            raise ValueError(
                f"{n_past} cached and {n_new} new tokens exceed "
                f"context_length={self.config.context_length}; reset the cache or pass fewer"
            )
        if dropout_keys is not None and cache is not None:
            raise ValueError("dropout_keys and cache exclude each other: pass only one")


class Block(nn.Module):
    """One transformer layer: sub-layers (attention, feed-forward), each with a norm, and each added
    to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm_position = config.norm_position
        self.parallel_residual = config.parallel_residual
        self.names = [each.name for each in sub_layers(config, layer)]
        for name in self.names:
            for norm_name in norm_names(config, name):
                self.add_module(norm_name, _norm(config))
            build = look_up(SUB_LAYERS, name, "a sub-layer's name", "the model")
            self.add_module(name, build(config, layer))

    def sub_layers(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return (norm, sub-layer) pairs in execution order, with the first norm of each."""
        return [(getattr(self, f"{name}_norm"), getattr(self, name)) for name in self.names]

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the residual stream (B, T, D) after this layer, from x (B, T, D) before it.
        `positions` are the tokens', for attention and dropout. Dropout acts in training if
        `dropout_keys`, int32 (B, n_sites, 2), are given. Attention appends its keys and values to
        `cache`, if given, and reads it. Norms compute in their weights' dtype; in training the
        stream keeps its own."""
        dtype, reads = x.dtype, None
        for name, (norm, sub_layer) in zip(self.names, self.sub_layers(), strict=True):
            match self.norm_position:
                case "pre":
                    if reads is None or not self.parallel_residual:
                        reads = _wide(x, norm)
                    x = x + sub_layer(norm(reads), positions, dropout_keys, cache)
                case "post":
                    x = x + sub_layer(x, positions, dropout_keys, cache)
                    x = norm(_wide(x, norm))
                case "both":
                    y = sub_layer(norm(_wide(x, norm)), positions, dropout_keys, cache)
                    x = x + self.get_submodule(f"{name}_output_norm")(y)
                case "output":
                    x = x + norm(sub_layer(x, positions, dropout_keys, cache))
                case unknown:
                    refuse_unknown(unknown, "model.norm_position", "the model")
            if self.training:
                x = x.to(dtype)
        return x


class TiedHead(nn.Module):
    """Output projection with the token embedding's weight, which is passed at each call. It holds
    only its own bias (n_rows,), or none if `n_rows` is None."""

    def __init__(self, n_rows: int | None) -> None:
        super().__init__()
        self.bias = None if n_rows is None else nn.Parameter(torch.zeros(n_rows))

    def forward(self, x: Tensor, weight: Tensor, matmul: Matmul = PLAIN) -> Tensor:
        """Return logits (B, T, V) = x · weightᵀ + bias for x (B, T, D) and the embedding's weight
        (V, D), computed by `matmul`."""
        return matmul.linear(x, weight, self.bias)


def build_model(
    config: ModelConfig,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    first_layer: int = 0,
    last_layer: int | None = None,
) -> GPT:
    """Build and initialize a GPT in one process, on `device` in `dtype`; or its slice from
    `first_layer` up to but excluding `last_layer`. `seed` determines the weights. Runs do not use
    it: `parallel/assemble.py` builds their models, with the same initial weights, sharded over
    ranks.

    The model is first built on the meta device, without memory, so that no random generator is used
    and nothing is written twice.
    """
    with torch.device("meta"):
        model = GPT(config, first_layer=first_layer, last_layer=last_layer).to(dtype)
    model.to_empty(device=device)
    initialize(model, config, seed)
    return model


def _wide(x: Tensor, norm: Any) -> Tensor:
    """Return the stream x (B, T, D) in the dtype of the norm's weight if that is wider: autocast
    would widen it on a GPU, and not on a CPU."""
    return x.to(torch.promote_types(x.dtype, norm.weight.dtype))


def _norm(config: ModelConfig) -> nn.Module:
    match config.norm:
        case "layernorm":
            return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.norm_has_bias)
        case "rmsnorm":
            return nn.RMSNorm(config.d_model, eps=config.norm_eps)
        case unknown:
            refuse_unknown(unknown, "model.norm", "the model")


def _embedding(n: int, channels: int) -> nn.Embedding:
    """Return `nn.Embedding(n, channels)`, as PyTorch makes it. On `meta` nothing is drawn: PyTorch
    would import its compiler for it."""
    weight = torch.empty(n, channels)
    if not weight.is_meta:
        weight.normal_()
    return nn.Embedding.from_pretrained(weight, freeze=False)
