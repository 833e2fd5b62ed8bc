"""Dropout whose mask is a pure function of integers: seed, step, site, global batch row, and the
element's index in the row. A site is one of the model's dropout layers, by number.

It needs no generator and no saved mask: any slice of a batch, any positions and any heads drop
exactly the elements that the whole would drop, on any device, eager or compiled. And a hash fuses
into its neighbours under `torch.compile`; a generator's call cannot.

The integers enter in two parts. A batch row's *keys* at a site are two random 32-bit words, from
seed, step, site and row. An element's *number* is its index in the row. The hash of key and number
says whether the element is dropped.

Shapes: B batch, T tokens, D channels, H heads; Q query tokens, S key tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.keyed import bits, folded, make_key

EMBEDDING_SITE = 0

WORDS = 2**32
"""Number of elements that a 32-bit number tells apart: the most in one block."""


class Numbers(NamedTuple):
    """Numbers of the elements of a tensor within their batch row, from which dropout masks are
    computed (`stream_index`, `weight_index`). A row with more than 2^32 elements is numbered in
    several blocks, each from 0; each block has a random key of its own."""

    words: Tensor
    """The element's number in its block, int32, in the elements' shape without the batch."""
    block: Tensor | None = None
    """The element's block, int32, in a shape that broadcasts to that of `words`; None if there is
    one block."""


def attention_weights_site(layer: int) -> int:
    """Return the site number of a layer's attention weights: the index of their keys along
    dimension 1 in the result of `dropout_keys`."""
    return 1 + 3 * layer


def attention_output_site(layer: int) -> int:
    """Return the site number for a layer's attention output: the index of its keys along dimension
    1 in the result of `dropout_keys`."""
    return 2 + 3 * layer


def mlp_output_site(layer: int) -> int:
    """Return the site number for a layer's feed-forward output: the index of its keys along
    dimension 1 in the result of `dropout_keys`."""
    return 3 + 3 * layer


def dropout_keys(
    config: ModelConfig, seed: int, step: int, rows: Sequence[int] | np.ndarray | Tensor
) -> Tensor:
    """Return the keys to one step's dropout masks, int32 (B, n_sites, 2) on the CPU: two random
    words for each batch row and site.

    `rows` (B,) are batch-row numbers in the global batch, so that a batch row keeps its mask on any
    rank. Sites: 0 is the embedding, followed for each layer by attention weights, attention output
    and feed-forward output. The batch comes first, so that micro-batches split it.
    """
    n_sites = 1 + 3 * config.n_layers
    site_keys = np.array(
        [make_key(seed, "dropout", step, site) for site in range(n_sites)], dtype=np.int32
    )
    key = (site_keys[:, 0], site_keys[:, 1])
    row = np.asarray(rows, dtype=np.int32)[:, None]
    words = [bits(key, 2 * row + word) for word in (0, 1)]  # each (B, n_sites)
    return torch.from_numpy(np.stack(words, axis=-1))


def keep_mask(row_keys: Tensor, numbers: Numbers, p: float) -> Tensor:
    """Return the mask of elements to keep, bool (B, *numbers.words.shape), each true with
    probability 1 - p. `row_keys`, int32 (B, 2), are one site's keys; `numbers` are the
    elements'."""
    shape = (-1,) + (1,) * numbers.words.ndim
    key = (row_keys[:, 0].view(shape), row_keys[:, 1].view(shape))
    if numbers.block is not None:
        key = folded(key, numbers.block)
    return bits(key, numbers.words) >= keep_bound(p)


def keep_bound(p: float) -> int:
    """Return the bound below which a 32-bit hash drops its element. Hashes are taken as signed, and
    are uniform over -2^31 … 2^31 - 1, so that a fraction p lies below it."""
    return round(p * 2**32) - 2**31


def drop(x: Tensor, row_keys: Tensor, numbers: Numbers, p: float) -> Tensor:
    """Return x (B, *numbers.words.shape) with a fraction p zeroed and the rest multiplied by 1 / (1
    - p). A dropped element that is not finite becomes NaN, not 0.

    `row_keys` is one site's keys, int32 (B, 2); `numbers` are the elements'.
    """
    # Multiplied, as in PyTorch's own dropout: selecting numbers or zeros (`torch.where`) takes
    # a CPU three times as long, in both passes.
    return x * (1 / (1 - p)) * keep_mask(row_keys, numbers, p)


class KeyedDropout(nn.Module):
    """Base module of dropout layers: the site's number, the probability p, and whether to drop."""

    def __init__(self, site: int, p: float) -> None:
        super().__init__()
        self.site = site
        self.p = p

    def acts(self, keys: Tensor | None) -> bool:
        """Return True if elements are dropped: in training mode, given keys, with p above 0."""
        return self.training and keys is not None and self.p > 0

    def extra_repr(self) -> str:
        """Return this module's settings as `print(model)` shows them."""
        return f"site={self.site}, p={self.p}"


class StreamDropout(KeyedDropout):
    """Module: dropout on the residual stream (B, T, D), whose elements `stream_index` numbers, in a
    context of `context_length` tokens.

    If ranks shard channels, tensor parallelism sets `first_channel` to the first local channel and
    `d_model` to the number of all channels; None means that all are local.
    """

    def __init__(self, site: int, p: float, context_length: int) -> None:
        super().__init__(site, p)
        self.context_length = context_length
        self.first_channel = 0
        self.d_model: int | None = None

    def forward(self, x: Tensor, keys: Tensor | None, positions: Tensor) -> Tensor:
        """Return x (B, T, D), with dropout in training if `keys`, int32 (B, n_sites, 2), are given.

        `positions` (T,) are x's positions in the sequence: any slice of the sequence drops the
        elements that the whole sequence drops there.
        """
        if keys is None or not self.acts(keys):
            return x
        channels = range(self.first_channel, self.first_channel + x.shape[2])
        d_model = self.d_model or len(channels)
        numbers = stream_index(positions, channels, d_model, self.context_length)
        return drop(x, keys[:, self.site], numbers, self.p)


class WeightsDropout(NamedTuple):
    """Dropout on attention weights (B, H, Q, S) in one pass, as a function object: call it with the
    weights. Its mask depends only on the keys and on each weight's number in the whole matrix of
    `context_length` queries and keys per head (`weight_index`)."""

    row_keys: Tensor
    """The site's keys, int32 (B, 2)."""
    p: float
    first_head: int
    """The number in the whole model of the first head in the weights."""
    context_length: int

    def __call__(self, weights: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return the weights (B, H, Q, S), or their gradients, with dropout. `query_positions` (Q,)
        and `key_positions` (S,) are positions in the sequence: they say which part of the whole
        attention matrix this is."""
        heads = range(self.first_head, self.first_head + weights.shape[1])
        numbers = weight_index(heads, query_positions, key_positions, self.context_length)
        return drop(weights, self.row_keys, numbers, self.p)


class AttentionDropout(KeyedDropout):
    """Module: dropout on a layer's attention weights. It drops nothing itself: `acting` gives the
    attention an object that does. If ranks shard heads, `head_offset` is the first local one's
    number in the whole model."""

    def __init__(self, site: int, p: float, context_length: int) -> None:
        super().__init__(site, p)
        self.context_length = context_length
        self.head_offset = 0

    def acting(self, keys: Tensor | None) -> WeightsDropout | None:
        """Return the dropout for a pass with these keys of all sites, int32 (B, n_sites, 2); None
        if nothing is dropped in it."""
        if keys is None or not self.acts(keys):
            return None
        return WeightsDropout(keys[:, self.site], self.p, self.head_offset, self.context_length)


# The numbering of elements within a batch row: every mask in Python uses it. Kernels in
# C++ (`fused_cpu/cpp`) and Triton repeat it, and tests compare their masks.


def stream_index(positions: Tensor, channels: range, d_model: int, context_length: int) -> Numbers:
    """Number a residual stream's elements within their batch row, (T, D): position · d_model +
    channel. `positions` are (T,), out of `context_length`. `channels` are the numbers of the D
    channels at hand, out of `d_model` in the whole stream."""
    channel = torch.arange(
        channels.start, channels.stop, dtype=torch.int32, device=positions.device
    )
    in_block = rows_per_block(context_length, d_model)
    rows = positions.to(torch.int32 if in_block is None else torch.int64)
    return _numbered(rows, channel, d_model, in_block)


def weight_index(
    heads: range, query_positions: Tensor, key_positions: Tensor, context_length: int
) -> Numbers:
    """Number attention weights within their batch row, (H, Q, S): (head · context_length + query
    position) · context_length + key position, for positions (Q,) and (S,). `heads` are the numbers
    of the H heads at hand in the whole model."""
    in_block = rows_per_block(heads.stop * context_length, context_length)
    dtype = torch.int32 if in_block is None else torch.int64
    head = torch.arange(heads.start, heads.stop, dtype=dtype, device=query_positions.device)
    rows = head[:, None] * context_length + query_positions.to(dtype)  # (H, Q)
    return _numbered(rows, key_positions.to(torch.int32), context_length, in_block)


def rows_per_block(n_rows: int, width: int) -> int | None:
    """Return how many of `n_rows` rows with `width` elements each are numbered in one block of up
    to 2^32 elements; None if one block holds them all. A row is never split, so that its elements
    have one key."""
    return None if n_rows * width <= WORDS else WORDS // width


def _numbered(rows: Tensor, columns: Tensor, width: int, in_block: int | None) -> Numbers:
    """Return the Numbers (…, C) of the elements at `rows` (…,) and `columns`, int32 (C,), of a
    matrix whose rows have `width` elements. `in_block` is how many rows form a block, with `rows`
    as int64; None if all are in one block, with `rows` as int32."""
    if in_block is None:
        return Numbers(rows[..., None] * width + columns)
    first = (rows % in_block * width).to(torch.int32)
    return Numbers(first[..., None] + columns, (rows // in_block).to(torch.int32)[..., None])
