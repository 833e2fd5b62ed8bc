"""The attention that a run computes, softmax(q·kᵀ / √K) · v over the keys that a query sees, behind
one class.

The model's sub-layers call the `DotProductAttention` that whoever assembles the run has handed
them. So another kind, by other kernels, over several ranks or from another cache, is one subclass,
and the model knows nothing of it.

Shapes: B batch, H heads, G KV heads (G = H without grouping), K head size; Q new tokens (queries),
S all tokens (keys), the last Q being the new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pentameter.model.compiled import constant
from pentameter.model.dropout import WeightsDropout
from pentameter.planning.sub_layers.attention import SINK_CHANNELS

FLASH_CAPABILITY = 80
"""Minimum CUDA compute capability for PyTorch's flash attention, times ten."""
FLASH_CHANNELS = 256
"""Largest head size in channels for flash attention on a GPU."""
CUDNN_CHANNELS = 256
"""Largest head size in channels for cuDNN's attention where PyTorch prefers that."""


class Weighting(NamedTuple):
    """The settings of one attention call, beside q, k and v: which keys a query sees, one more key
    (a sink), and dropout. Always causal: a query sees no key after its own position."""

    window: int | None = None
    """Number of keys that a query sees, the last being its own; None for all up to its own."""
    sinks: Tensor | None = None
    """Each head's score (H,) for one more key, whose value is 0; None for no such key."""
    dropout: WeightsDropout | None = None
    """Dropout on the attention weights; None drops none."""
    positions: Tensor | None = None
    """The keys' positions in the sequence (S,), from which the dropout mask of each weight follows;
    None for 0 … S - 1."""

    def key_positions(self, k: Tensor) -> Tensor:
        """Return the positions (S,) of the keys k (B, G, S, K)."""
        S = k.shape[2]
        return torch.arange(S, device=k.device) if self.positions is None else self.positions


ALL_KEYS = Weighting()
"""The Weighting without window, sinks and dropout: a query sees every key up to its own."""


class DotProductAttention:
    """Causal attention of queries to keys, as a function object that a run hands to its model: by
    PyTorch's fused operations or, if some weights are dropped, with the weights in memory.

    A subclass for another way to drop weights overrides `dropping`, for another way to attend
    `__call__`.
    """

    equal_widths: ClassVar[bool] = False
    """True if it asks for values as wide as keys on every device."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, how: Weighting = ALL_KEYS) -> Tensor:
        """Return each query's weighted mean value, (B, H, Q, K), from q (B, H, Q, K), k and v
        (B, G, S, K) with S ≥ Q: the first S - Q keys come from a cache."""
        return _attend(q, k, v, how) if how.dropout is None else self.dropping(q, k, v, how)

    def dropping(self, q: Tensor, k: Tensor, v: Tensor, how: Weighting) -> Tensor:
        """Return attention with dropout, (B, H, Q, K), for q (B, H, Q, K), k and v (B, G, S, K).
        Called instead of the fused operations when `how.dropout` is not None; a subclass may
        override it. Here the attention weights are stored."""
        return attend_explicitly(q, k, v, how)


PLAIN_ATTENTION = DotProductAttention()
"""The `DotProductAttention` that modules use unless given another."""


def _attend(q: Tensor, k: Tensor, v: Tensor, how: Weighting) -> Tensor:
    """Return each query's weighted mean value, (B, H, Q, K), without dropout, by PyTorch's fused
    operations; q is (B, H, Q, K), k and v are (B, G, S, K)."""
    Q, S, window = q.shape[2], k.shape[2], how.window
    attention: Callable[..., Tensor] = attend_fused
    if how.sinks is not None:
        attention = partial(_attend_beside_sinks, how.sinks)
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


class NewestTokenAttention(DotProductAttention):
    """Attention of one new token per sequence, all at one `position`, a tensor (1,) on the device,
    to keys (B, G, S, K) of which those after it hold nothing yet. So neither shapes nor memory
    depend on the position."""

    def __init__(self, position: Tensor) -> None:
        self._position = position
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, how: Weighting = ALL_KEYS) -> Tensor:
        """Return each query's weighted mean value, (B, H, 1, K), from q (B, H, 1, K), k and v
        (B, G, S, K)."""
        n_keys = k.shape[2]
        if (n_keys, how.window) not in self._masks:
            key = torch.arange(n_keys, device=q.device)
            seen = key <= self._position
            if how.window is not None:
                seen &= key > self._position - how.window
            self._masks[n_keys, how.window] = seen[None]
        mask = self._masks[n_keys, how.window]
        if how.sinks is not None:
            return _attend_beside_sinks(how.sinks, q, k, v, attn_mask=mask)
        return attend_fused(q, k, v, attn_mask=mask)


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` of q (B, H, Q, K), k and v (B, G, S, K), for G KV
    heads that divide H. Returns (B, H, Q, K). KV heads are repeated where no fused kernel takes
    them as they are: PyTorch would then write out the weights and say nothing."""
    is_grouped = k.shape[1] != q.shape[1]
    if is_grouped and repeats_kv_heads(
        cuda_capability(q.device), q.dtype, (q.shape[-1], v.shape[-1]), masked=attn_mask is not None
    ):
        k, v, is_grouped = for_each_head(k, q), for_each_head(v, q), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )


def repeats_kv_heads(
    capability: int | None, dtype: torch.dtype, channels: tuple[int, int], *, masked: bool
) -> bool:
    """Return whether grouped KV heads must be repeated for a fused kernel to take them.

    capability: the GPU's compute capability times ten; None for any other device, whose kernels
    take all. channels: those of a head's keys and of its values.

    Of PyTorch's kernels for GPUs, flash attention alone takes grouped heads in all releases: from
    capability 8.0 on, in 16 bits, without a mask, for keys and values of one width (its `sdp_utils`
    list what each kernel refuses).
    """
    if capability is None:
        return False
    has_flash = capability >= FLASH_CAPABILITY and dtype.itemsize == 2
    return masked or not has_flash or channels[0] != channels[1] or channels[0] > FLASH_CHANNELS


def wants_equal_widths(
    capability: int | None, dtype: torch.dtype, channels: tuple[int, int]
) -> bool:
    """Return whether values narrower than keys must be padded for a fast kernel to take them. The
    arguments are those of `repeats_kv_heads`.

    In 16 bits that is flash attention, which asks for equal widths, but cuDNN's where PyTorch
    prefers it, on NVIDIA's capabilities 9.0 and 10.0: an H200 took 2.6 ms for 192 channels of keys
    and 128 of values, 4.1 padded. In 32 bits it is the memory-efficient kernel, which takes both.
    """
    if capability is None or torch.version.hip is not None:
        return True
    if dtype.itemsize != 2:
        return False
    fits = max(channels) <= CUDNN_CHANNELS and not any(each % 8 for each in channels)
    return not (fits and capability // 10 in (9, 10))


@constant
def cuda_capability(device: torch.device) -> int | None:
    """Return the compute capability of a GPU times ten (80 for 8.0); None for any other device. An
    AMD chip's is what PyTorch gives it: 90 and more."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _attend_beside_sinks(
    sinks: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Compute `attend_fused` of q (B, H, Q, K), k and v (B, G, S, K) with a sink for each head: one
    more key, which every query sees, with the score `sinks` (H,) and the value 0. Returns
    (B, H, Q, K).

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
    return attend_fused(q, k, v, attn_mask=mask, scale=K**-0.5)[..., :K]


def _attend_in_windows(
    q: Tensor, k: Tensor, v: Tensor, window: int, attention: Callable[..., Tensor]
) -> Tensor:
    """Compute attention for as many queries as keys, T, with a window that divides T, (B, H, T, K).
    Each block of `window` queries attends to its own keys and to the block before, so that work
    grows with T and not with its square.

    `attention` is called like `attend_fused`, with q (B, H, T, K), k and v (B, G, T, K) and a mask.
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


def attend_explicitly(q: Tensor, k: Tensor, v: Tensor, how: Weighting = ALL_KEYS) -> Tensor:
    """Return each query's weighted mean value, (B, H, Q, K), like a `DotProductAttention`, but with
    the attention weights (B, H, Q, S) in memory, so that dropout can act on them."""
    Q, S, K = q.shape[2], k.shape[2], q.shape[3]
    k, v = for_each_head(k, q), for_each_head(v, q)
    scores = (q * K**-0.5) @ k.transpose(-2, -1)  # (B, H, Q, S)
    scores = scores.masked_fill(_hidden(Q, S, how.window, q.device), float("-inf"))
    if how.sinks is not None:
        sink_column = how.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink_column), dim=-1)  # (B, H, Q, S + 1)
    # The sum of many exponentials needs fp32 even if the matmuls are bf16 or fp16.
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights[..., :S]
    if how.dropout is not None:
        positions = how.key_positions(k)
        weights = how.dropout(weights, positions[S - Q :], positions)
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
