"""Causal self-attention: the projections before and after the run's attention (`dot_product.py`).

Shapes: B batch, T tokens, D d_model, H heads, G KV heads (G = H without grouping), K head size; Q
new tokens (queries), S all tokens (keys), the last Q being the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.model.attention.cache import Cache
from pentameter.model.attention.dot_product import (
    PLAIN_ATTENTION,
    DotProductAttention,
    Weighting,
)
from pentameter.model.dropout import (
    AttentionDropout,
    StreamDropout,
    attention_output_site,
    attention_weights_site,
)
from pentameter.model.positions import Positions, Rotation


class Read(Protocol):
    """Protocol of the function that applies several linear layers to one input: `read` below, or
    another under tensor parallelism, which all-gathers the input once."""

    def __call__(self, x: Tensor, *linears: nn.Linear) -> Sequence[Tensor]:
        """Return each linear's output (B, T, N) for x (B, T, D), in the given order."""


class CausalAttention(nn.Module):
    """Base class for attention sub-layers, with what they have in common: the window, the run's
    attention (`attend`), and dropout on attention weights and on the output. A subclass adds its
    projections, the last one being `out`. `layer` is the block's index in the whole model, from
    which the window, the rotation and the dropout sites follow."""

    out: nn.Linear

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.window(layer)
        self.rotates_by = config.rotates_by(layer)
        self.weights_dropout = AttentionDropout(
            attention_weights_site(layer), config.attention.dropout, config.context_length
        )
        self.attend = PLAIN_ATTENTION
        self.dropout = StreamDropout(
            attention_output_site(layer), config.dropout, config.context_length
        )

    def means(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention: return the mean of the values that each query sees, weighted by
        attention, (B, T, H, K), from q (B, H, T, K), k and v (B, G, S, K), cached ones included.

        positions: the tokens' positions in their sequence.
        dropout_keys: int32 (B, n_sites, 2), None for no dropout.
        sinks: each head's score (H,) for one more key, None for none.
        """
        dropout = self.weights_dropout.acting(dropout_keys)
        how = Weighting(self.window, sinks, dropout, positions.attention)
        return self.attend(q, k, v, how).transpose(1, 2)

    def project_out(self, y: Tensor, positions: Positions, dropout_keys: Tensor | None) -> Tensor:
        """Return the sub-layer's output (B, T, D), after dropout, from all heads' means
        (B, T, H, K)."""
        return self.dropout(self.out(y.flatten(2)), dropout_keys, positions.stream)


def attend_by(model: nn.Module, attention: DotProductAttention) -> None:
    """Have every attention sub-layer in `model` compute by `attention`, in place."""
    for module in model.modules():
        if isinstance(module, CausalAttention):
            module.attend = attention


@contextmanager
def attending_by(model: nn.Module, attention: DotProductAttention) -> Iterator[None]:
    """Have every attention sub-layer in `model` compute by `attention` inside the `with` block."""
    modules = [module for module in model.modules() if isinstance(module, CausalAttention)]
    before = [module.attend for module in modules]
    attend_by(model, attention)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.attend = own


class Sinks(nn.Module):
    """Module that holds each head's sink: a learned score for one more key, whose value is 0, in
    the softmax over its keys. The weights of the others then sum to less than 1."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self) -> Tensor:
        """Return the scores (H,) of the heads' sinks, in the parameter's dtype."""
        return sink_scores(self.weight)


def sink_scores(weight: Tensor) -> Tensor:
    """Return a copy of the sinks' scores (H,). A copy, as ZeRO frees gathered weights after the
    module's forward pass, and attention reads them later."""
    return weight.to(weight.dtype, copy=True)


class Attention(CausalAttention):
    """Causal multi-head self-attention, with optional grouped KV heads, query and key norms, rotary
    positions, a sliding window and sinks.

    The fused projection `qkv` has weight rows (H, 3, K): query, key and value, head by head. With
    grouped KV heads there are instead `q` with rows (H, K) and `kv` with rows (G, 2, K).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        D, H, G = config.d_model, config.attention.n_heads, config.attention.kv_heads
        K = self.head_size = config.head_channels
        self.query_factor = config.query_factor
        self.shares_kv = config.attention.shares_kv_heads
        if self.shares_kv:
            self.q = nn.Linear(D, H * K, bias=config.attention.qkv_bias)
            self.kv = nn.Linear(D, 2 * G * K, bias=config.attention.qkv_bias)
        else:
            self.qkv = nn.Linear(D, 3 * H * K, bias=config.attention.qkv_bias)
        self.read: Read = read
        """Function that applies the column-parallel linears to the residual stream. Tensor
        parallelism replaces it by one that all-gathers the stream and sums its gradient."""
        self.qk_norm = config.attention.qk_norm
        match config.attention.qk_norm:
            case None:
                pass
            case "head":
                self.q_norm, self.k_norm = (nn.RMSNorm(K, eps=config.norm_eps) for _ in range(2))
            case "width":
                self.q_norm = nn.RMSNorm(H * K, eps=config.norm_eps)
                self.k_norm = nn.RMSNorm(G * K, eps=config.norm_eps)
            case unknown:
                refuse_unknown(unknown, "model.attention.qk_norm", "the model")
        self.sinks = Sinks(H) if config.attention.sinks else None
        self.out = nn.Linear(H * K, D, bias=config.out_bias)

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return (B, T, D), without the residual sum: for each token of x (B, T, D), the attention
        over itself and the tokens before it, projected by `out`.

        positions: the tokens' positions and rotation. dropout_keys: int32 (B, n_sites, 2), None for
        no dropout. With a `cache`, x's keys and values are appended to it, and attention also sees
        the cached ones.
        """
        q, k, v = (
            each.transpose(1, 2) for each in self.project(x, positions.rotation(self.rotates_by))
        )
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, G, past + T, K)
        sinks = None if self.sinks is None else self.sinks()
        y = self.means(q, k, v, positions, dropout_keys, sinks)
        return self.project_out(y, positions, dropout_keys)

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, D) to queries (B, T, H, K), keys and values (B, T, G, K). Queries and
        keys are normed if `attention.qk_norm` is set, and rotated unless `rotation` is None;
        queries are multiplied by `query_factor`."""
        K = self.head_size
        if self.shares_kv:
            q, kv = self.read(x, self.q, self.kv)
            q = q.unflatten(-1, (-1, K))
            k, v = kv.unflatten(-1, (-1, 2, K)).unbind(-2)
        else:
            (qkv,) = self.read(x, self.qkv)
            q, k, v = qkv.unflatten(-1, (-1, 3, K)).unbind(-2)
        k_made = k
        if self.qk_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        if k is not k_made:
            v = v.contiguous()  # so that the projection's output, shared by all three, can be freed
        return q, k, v

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return queries or keys x (B, T, H, K) after `norm`, over each head or over all heads
        together."""
        return normed(norm, x) if self.qk_norm == "head" else normed(norm, x.flatten(2)).view_as(x)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Return x (…, N) after `norm`, over the last dimension: computed in the dtype of the norm's
    weight, returned in x's."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    y: Tensor = norm(x.to(weight.dtype))
    return y.to(x.dtype)


def read(x: Tensor, *linears: nn.Linear) -> Sequence[Tensor]:
    """Apply each linear to x (B, T, D): return their outputs (B, T, N), one for each."""
    return [linear(x) for linear in linears]
