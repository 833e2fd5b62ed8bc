"""Causal self-attention: the projections, and softmax(q·kᵀ / √K) · v in the fastest form there is.

Shapes: B batch, T time, D d_model, H heads, K head size; Q the new tokens (queries), S all tokens
(keys), of which the last Q are the new ones.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.model.cache import KVCache
from pentameter.model.dropout import (
    AttentionDropout,
    StreamDropout,
    attention_output_site,
    attention_weights_site,
)
from pentameter.model.positions import Positions
from pentameter.planning.architecture import head_size


class Attend(Protocol):
    """Causal attention of queries to keys and values, as `attend` below computes it."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: AttentionDropout,
        dropout_keys: Tensor | None,
        positions: Tensor,
    ) -> Tensor:
        """Return each query's mix of values, (B, H, Q, K)."""


class Attention(nn.Module):
    """Causal multi-head self-attention; the fused projection's rows are (H, 3, K), head by head."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        D = config.d_model
        self.layer = layer
        self.head_size = head_size(config)
        self.qkv = nn.Linear(D, 3 * D, bias=config.qkv_bias)
        self.weights_dropout = AttentionDropout(
            attention_weights_site(layer), config.attention_dropout, config.context_length
        )
        self.attend: Attend = attend
        """How queries, keys and values become a mix of values; processes that divide time put
        another function here, which reaches the keys and values of the others."""
        self.out = nn.Linear(D, D, bias=config.bias)
        self.dropout = StreamDropout(attention_output_site(layer), config.dropout)

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return (B, T, D): what each token gathers from itself and the tokens before it."""
        qkv = self.qkv(x)  # (B, T, H·3·K)
        B, T = qkv.shape[:2]
        q, k, v = qkv.view(B, T, -1, 3, self.head_size).transpose(1, 2).unbind(3)  # (B, H, T, K)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, H, past + T, K)
        y = self.attend(
            q,
            k,
            v,
            dropout=self.weights_dropout,
            dropout_keys=dropout_keys,
            positions=positions.attention,
        )
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, H·K)
        return self.dropout(self.out(y), dropout_keys, positions.stream)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: AttentionDropout | None = None,
    dropout_keys: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return each query's mix of values, (B, H, Q, K); a query sees no key after its own.

    q is (B, H, Q, K), k and v are (B, H, S, K) with S ≥ Q: the first S - Q keys come from a
    cache. `dropout` is applied to the attention weights where `dropout_keys` are given; `positions`
    (S,) are those of the keys, 0 … S - 1 where absent.
    """
    if dropout is not None and dropout.acts(dropout_keys):
        return attend_explicitly(
            q, k, v, dropout=dropout, dropout_keys=dropout_keys, positions=positions
        )
    Q, S = q.shape[2], k.shape[2]
    if Q == S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if Q == 1:  # the newest token sees everything
        return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~_future(Q, S, q.device))


def attend_explicitly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: AttentionDropout | None = None,
    dropout_keys: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return the same as `attend`, with the weights written out so that they can be dropped."""
    Q, S, K = q.shape[2], k.shape[2], q.shape[3]
    scores = (q * K**-0.5) @ k.transpose(-2, -1)  # (B, H, Q, S)
    scores = scores.masked_fill(_future(Q, S, q.device), float("-inf"))
    # The sum of many exponentials needs fp32 even where the products are bf16 or fp16.
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if dropout is not None:
        positions = torch.arange(S, device=q.device) if positions is None else positions
        weights = dropout(weights, dropout_keys, positions[S - Q :], positions)
    return weights.to(v.dtype) @ v


def _future(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """Return bool (Q, S): true where the key lies after the query."""
    query = torch.arange(n_keys - n_queries, n_keys, device=device)
    return torch.arange(n_keys, device=device) > query[:, None]
