"""Causal self-attention: the projections, and softmax(q·kᵀ / √K) · v in the fastest available form.

Shapes: B batch, T tokens, D d_model, H heads, G KV heads (G = H without grouping), K head size; Q
new tokens (queries), S all tokens (keys), the last Q being the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.model.attention.cache import Cache
from pentameter.model.dropout import (
    AttentionDropout,
    StreamDropout,
    attention_output_site,
    attention_weights_site,
)
from pentameter.model.positions import Positions, Rotation
from pentameter.planning.sub_layers.attention import SINK_CHANNELS


class Attend(Protocol):
    """Type of the function that computes causal attention from queries, keys and values: `attend`
    below, or one that takes its place under context parallelism. Arguments as for `attend`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: AttentionDropout,
        dropout_keys: Tensor | None,
        positions: Tensor,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return each query's weighted mean value, (B, H, Q, K), from q (B, H, Q, K), k and v
        (B, G, S, K).

        dropout: the module that drops weights, in training, if `dropout_keys`, int32
        (B, n_sites, 2), are given; None means no dropout. positions: the keys' (S,). window: how
        many keys a query sees, its own included; None for all. sinks: each head's score (H,) for
        one more key, whose value is 0; None for none.
        """


class Read(Protocol):
    """Type of the function that applies several linear layers to one input: `read` below, or one
    that takes its place under tensor parallelism."""

    def __call__(self, x: Tensor, *linears: nn.Linear) -> Sequence[Tensor]:
        """Return each linear's output (B, T, N) for x (B, T, D), in the given order."""


class CausalAttention(nn.Module):
    """Base for attention sub-layers: the sliding window, attention, and both dropouts. A subclass
    adds its projections, the last one being `out`. `layer` is the block's index in the whole model,
    from which the window and the dropout sites follow."""

    out: nn.Linear

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.window(layer)
        self.weights_dropout = AttentionDropout(
            attention_weights_site(layer), config.attention_dropout, config.context_length
        )
        self.attend: Attend = attend
        """Function that computes attention from queries, keys and values. Context parallelism
        replaces it by one that reaches the keys and values on other ranks."""
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
        """Return each query's weighted mean value, (B, T, H, K), from q (B, H, T, K), k and v
        (B, G, S, K), which include cached ones. Other arguments are as for `Attend`."""
        y = self.attend(
            q,
            k,
            v,
            dropout=self.weights_dropout,
            dropout_keys=dropout_keys,
            positions=positions.attention,
            window=self.window,
            sinks=sinks,
        )
        return y.transpose(1, 2)

    def project_out(self, y: Tensor, positions: Positions, dropout_keys: Tensor | None) -> Tensor:
        """Return the sub-layer's output (B, T, D), after dropout, from all heads' means
        (B, T, H, K)."""
        return self.dropout(self.out(y.flatten(2)), dropout_keys, positions.stream)


class Sinks(nn.Module):
    """A learned score per head for one more key, whose value is 0, in the softmax over its keys:
    the weights of the others then sum to less than 1."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self) -> Tensor:
        """Return the scores (H,), in the parameter's dtype."""
        return sink_scores(self.weight)


def sink_scores(weight: Tensor) -> Tensor:
    """Return a copy of the sinks' scores (H,): ZeRO frees what is gathered after a module's forward
    pass, and attention reads them later."""
    return weight.to(weight.dtype, copy=True)


class Attention(CausalAttention):
    """Causal multi-head self-attention, with optional grouped KV heads, query and key norms, rotary
    positions, a sliding window and sinks.

    The fused projection `qkv` has weight rows (H, 3, K): query, key and value, head by head. With
    grouped KV heads there are instead `q` with rows (H, K) and `kv` with rows (G, 2, K).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        D, H, G = config.d_model, config.n_heads, config.kv_heads
        K = self.head_size = config.head_channels
        self.shares_kv = config.shares_kv_heads
        if self.shares_kv:
            self.q = nn.Linear(D, H * K, bias=config.qkv_bias)
            self.kv = nn.Linear(D, 2 * G * K, bias=config.qkv_bias)
        else:
            self.qkv = nn.Linear(D, 3 * H * K, bias=config.qkv_bias)
        self.read: Read = read
        """Function that applies the column-parallel linears to the residual stream. Tensor
        parallelism replaces it by one that all-gathers the stream and sums its gradient."""
        self.qk_norm = config.qk_norm
        match config.qk_norm:
            case None:
                pass
            case "head":
                self.q_norm, self.k_norm = (nn.RMSNorm(K, eps=config.norm_eps) for _ in range(2))
            case "width":
                self.q_norm = nn.RMSNorm(H * K, eps=config.norm_eps)
                self.k_norm = nn.RMSNorm(G * K, eps=config.norm_eps)
            case unknown:
                refuse_unknown(unknown, "model.qk_norm", "the model")
        self.sinks = Sinks(H) if config.attention_sinks else None
        self.out = nn.Linear(H * K, D, bias=config.bias)

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
        q, k, v = (each.transpose(1, 2) for each in self.project(x, positions.rotation))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, G, past + T, K)
        sinks = None if self.sinks is None else self.sinks()
        y = self.means(q, k, v, positions, dropout_keys, sinks)
        return self.project_out(y, positions, dropout_keys)

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, D) to queries (B, T, H, K), keys and values (B, T, G, K). Queries and
        keys are normed if `model.qk_norm` is set, and rotated unless `rotation` is None."""
        K = self.head_size
        if self.shares_kv:
            q, kv = self.read(x, self.q, self.kv)
            q = q.unflatten(-1, (-1, K))
            k, v = kv.unflatten(-1, (-1, 2, K)).unbind(-2)
        else:
            (qkv,) = self.read(x, self.qkv)
            q, k, v = qkv.unflatten(-1, (-1, 3, K)).unbind(-2)
        q_made = q
        if self.qk_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        if q is not q_made:
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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: AttentionDropout | None = None,
    dropout_keys: Tensor | None = None,
    positions: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return each query's weighted mean value, (B, H, Q, K). A query sees keys up to its own
    position; with a `window`, only the last `window` keys, its own included.

    q is (B, H, Q, K), k and v are (B, G, S, K) with S ≥ Q: the first S - Q keys come from a cache.
    `dropout` is applied to the attention weights in training if `dropout_keys`, int32
    (B, n_sites, 2), are given. `positions` (S,) are the keys' positions, by default 0 … S - 1.
    `sinks` (H,) are each head's score for one more key, whose value is 0; None for none.
    """
    Q, S = q.shape[2], k.shape[2]
    if dropout is not None and dropout.acts(dropout_keys):
        drop = attend_explicitly if dropout.kernel is None or Q != S else dropout.kernel
        if sinks is not None:
            drop = partial(attend_explicitly, sinks=sinks)
        return drop(
            q,
            k,
            v,
            dropout=dropout,
            dropout_keys=dropout_keys,
            positions=positions,
            window=window,
        )
    attention = partial(F.scaled_dot_product_attention, enable_gqa=k.shape[1] != q.shape[1])
    if sinks is not None:
        attention = partial(_attend_beside_sinks, sinks)
    if window is not None and window < S:
        if Q == S and S % window == 0 and 2 * window < S:
            return _attend_in_windows(q, k, v, window, attention)
        first = max(0, S - Q - window + 1)  # no query sees an earlier key
        k, v = k[:, :, first:], v[:, :, first:]
        hidden = _hidden(Q, k.shape[2], window, q.device)
        return attention(q, k, v, attn_mask=~hidden)
    if Q == S:
        return attention(q, k, v, is_causal=True)
    if Q == 1:  # the newest token sees everything
        return attention(q, k, v)
    hidden = _hidden(Q, S, None, q.device)
    return attention(q, k, v, attn_mask=~hidden)


def _attend_beside_sinks(
    sinks: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` of q (B, H, Q, K), k and v (B, G, S, K) with a sink
    for each head: one more key, which every query sees, with the score `sinks` (H,) and the value
    0. Returns (B, H, Q, K).

    A fused kernel gives no gradient for a mask. So the score is in a channel of its own, in which
    this key is 1 and the others are 0. Kernels ask for multiples of SINK_CHANNELS.
    """
    K, n_keys = q.shape[-1], k.shape[2]
    if is_causal:
        attn_mask = ~_hidden(q.shape[2], n_keys, None, q.device)
    scores = (sinks * K**0.5).to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    q = torch.cat((q, F.pad(scores, (0, SINK_CHANNELS - 1))), dim=-1)
    sink_key = (torch.arange(K + SINK_CHANNELS, device=k.device) == K).to(k.dtype)
    k = torch.cat((F.pad(k, (0, SINK_CHANNELS)), sink_key.expand(*k.shape[:2], 1, -1)), dim=2)
    v = F.pad(v, (0, SINK_CHANNELS, 0, 1))
    mask = None if attn_mask is None else F.pad(attn_mask, (0, 1), value=True)
    is_grouped = k.shape[1] != q.shape[1]
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=K**-0.5, enable_gqa=is_grouped
    )
    return y[..., :K]


def _attend_in_windows(
    q: Tensor, k: Tensor, v: Tensor, window: int, attention: Callable[..., Tensor]
) -> Tensor:
    """Compute attention for as many queries as keys, with a window that divides T: each block of
    `window` queries attends to its own keys and to the block before, so work grows with T and not
    with its square. Returns (B, H, T, K).

    `attention` multiplies q (B, H, T, K), k and v (B, G, T, K) under a mask, like
    `F.scaled_dot_product_attention`.
    """
    B, n = len(q), q.shape[2] // window

    def with_block_before(x: Tensor) -> Tensor:  # (B, G, T, K) → (B · n, G, 2 · window, K)
        blocks = F.pad(x, (0, 0, window, 0)).unfold(2, 2 * window, window)  # (B, G, n, K, 2 W)
        return blocks.permute(0, 2, 1, 4, 3).flatten(0, 1)

    queries = q.unflatten(2, (n, window)).transpose(1, 2).flatten(0, 1)  # (B · n, H, window, K)
    hidden = _hidden(window, 2 * window, window, q.device).expand(n, -1, -1).clone()
    hidden[0, :, :window] = True  # before the first block there is nothing
    mask = ~hidden.repeat(B, 1, 1)[:, None]
    y = attention(queries, with_block_before(k), with_block_before(v), attn_mask=mask)
    return y.unflatten(0, (B, n)).transpose(1, 2).flatten(2, 3)


def attend_explicitly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: AttentionDropout | None = None,
    dropout_keys: Tensor | None = None,
    positions: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return each query's weighted mean value, (B, H, Q, K), like `attend`, but with the attention
    weights (B, H, Q, S) in memory, so that dropout can act on them.

    q is (B, H, Q, K), k and v are (B, G, S, K) with S ≥ Q. `dropout` acts in training if
    `dropout_keys`, int32 (B, n_sites, 2), are given. `positions` (S,) are the keys', by default 0 …
    S - 1. `window` is how many keys a query sees, its own included; None for all. `sinks` (H,) are
    each head's score for one more key, whose value is 0; None for none.
    """
    Q, S, K = q.shape[2], k.shape[2], q.shape[3]
    k, v = for_each_head(k, q), for_each_head(v, q)
    scores = (q * K**-0.5) @ k.transpose(-2, -1)  # (B, H, Q, S)
    scores = scores.masked_fill(_hidden(Q, S, window, q.device), float("-inf"))
    if sinks is not None:
        sink_column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink_column), dim=-1)  # (B, H, Q, S + 1)
    # The sum of many exponentials needs fp32 even if the matmuls are bf16 or fp16.
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights[..., :S]
    if dropout is not None:
        positions = torch.arange(S, device=q.device) if positions is None else positions
        weights = dropout(weights, dropout_keys, positions[S - Q :], positions)
    return weights.to(v.dtype) @ v


def for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values x (B, G, S, K) so that each query head in q (B, H, Q, K) has its own
    copy: (B, H, S, K). H must be a multiple of G; if they are equal, return x itself."""
    n_sharing = q.shape[1] // x.shape[1]
    return x if n_sharing == 1 else x.repeat_interleave(n_sharing, dim=1)


def _hidden(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask, bool (Q, S), true if a query may not see a key: the key lies after it, or
    before its window of `window` keys (None: no window). The queries are the last Q among the S
    tokens."""
    query = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    key = torch.arange(n_keys, device=device)
    return key > query if window is None else (key > query) | (key <= query - window)
