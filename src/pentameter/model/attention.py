"""The core of causal attention: softmax(q·kᵀ / √K) · v, in whichever form is fastest.

Shapes: B batch, H heads, K head size; Q the new tokens (queries), S all tokens (keys), of which
the last Q are the new ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pentameter.model.dropout import AttentionDropout


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: AttentionDropout | None = None,
    dropout_keys: Tensor | None = None,
) -> Tensor:
    """Return each query's mix of values, (B, H, Q, K); a query sees no key after its own.

    q is (B, H, Q, K), k and v are (B, H, S, K) with S ≥ Q: the first S - Q keys come from a
    cache. `dropout` is applied to the attention weights where `dropout_keys` are given.
    """
    if dropout is not None and dropout.acts(dropout_keys):
        return attend_explicitly(q, k, v, dropout=dropout, dropout_keys=dropout_keys)
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
) -> Tensor:
    """Return the same as `attend`, with the weights written out so that they can be dropped."""
    Q, S, K = q.shape[2], k.shape[2], q.shape[3]
    scores = (q * K**-0.5) @ k.transpose(-2, -1)  # (B, H, Q, S)
    scores = scores.masked_fill(_future(Q, S, q.device), float("-inf"))
    # The sum of many exponentials needs fp32 even where the products are bf16 or fp16.
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if dropout is not None:
        weights = dropout(weights, dropout_keys, first_query=S - Q)
    return weights.to(v.dtype) @ v


def _future(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """Return bool (Q, S): true where the key lies after the query."""
    query = torch.arange(n_keys - n_queries, n_keys, device=device)
    return torch.arange(n_keys, device=device) > query[:, None]
