"""Dropout whose mask is a function of (seed, step, site, global row, place in the row).

No generator, no saved mask state: any slice of a batch, any positions, any heads drop exactly
what the whole would drop there, on any device, eager or compiled. And a hash fuses into
its neighbours under `torch.compile`, where a generator's call cannot.

Shapes: B batch, T time, D channels, H heads; Q and S the times of queries and of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.keyed import bits, make_key

EMBEDDING_SITE = 0


def attention_weights_site(layer: int) -> int:
    """Return the dropout site of a layer's attention weights."""
    return 1 + 3 * layer


def attention_output_site(layer: int) -> int:
    """Return the dropout site of a layer's attention output projection."""
    return 2 + 3 * layer


def mlp_output_site(layer: int) -> int:
    """Return the dropout site of a layer's feed-forward output."""
    return 3 + 3 * layer


def dropout_keys(
    config: ModelConfig, seed: int, step: int, rows: Sequence[int] | np.ndarray | Tensor
) -> Tensor:
    """Return the keys of one step's dropout masks, int32 (B, n_sites, 2), on the CPU.

    `rows` (B,) are the rows' numbers in the global batch, so that a row keeps its mask wherever
    it is computed. Sites: 0 the embedding, then for each layer attention weights, attention
    output, feed-forward output. The batch comes first, so that micro-batches split it.
    """
    n_sites = 1 + 3 * config.n_layers
    site_keys = np.array(
        [make_key(seed, "dropout", step, site) for site in range(n_sites)], dtype=np.int32
    )
    key = (site_keys[:, 0], site_keys[:, 1])
    row = np.asarray(rows, dtype=np.int32)[:, None]
    words = [bits(key, 2 * row + word) for word in (0, 1)]  # each (B, n_sites)
    return torch.from_numpy(np.stack(words, axis=-1))


def keep_mask(row_keys: Tensor, index: Tensor, p: float) -> Tensor:
    """Return where to keep: bool (B, *index.shape), true with probability 1 - p.

    `row_keys` is int32 (B, 2), `index` the int32 number of each element within its row.
    """
    shape = (-1,) + (1,) * index.ndim
    key = (row_keys[:, 0].view(shape), row_keys[:, 1].view(shape))
    return bits(key, index) >= keep_bound(p)


def keep_bound(p: float) -> int:
    """Return the bound below which a share p of the hash lies, uniform over -2^31 … 2^31 - 1."""
    return round(p * 2**32) - 2**31


def drop(x: Tensor, row_keys: Tensor, index: Tensor, p: float) -> Tensor:
    """Return x (B, *index.shape) with a share p zeroed and the rest scaled by 1 / (1 - p); what is
    not finite stays so where it is dropped."""
    # Multiplied, as PyTorch's own dropout: choosing between numbers and zeros (`torch.where`) takes
    # a CPU three times as long, in both passes.
    return x * (1 / (1 - p)) * keep_mask(row_keys, index, p)


class KeyedDropout(nn.Module):
    """The base of both kinds of dropout: a site, a probability, and when they act."""

    def __init__(self, site: int, p: float) -> None:
        super().__init__()
        self.site = site
        self.p = p

    def acts(self, keys: Tensor | None) -> bool:
        """Return whether anything is dropped: in training, given keys, with p above 0."""
        return self.training and keys is not None and self.p > 0

    def drop(self, x: Tensor, keys: Tensor, index: Tensor) -> Tensor:
        """Return x (B, *index.shape) with a share p zeroed and the rest scaled by 1 / (1 - p)."""
        return drop(x, keys[:, self.site], index, self.p)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"site={self.site}, p={self.p}"


class StreamDropout(KeyedDropout):
    """Dropout on the residual stream (B, T, D); channel d at position t has number t · D + d.

    Where processes divide channels, `first_channel` is the first that is here, `d_model` the number
    of all.
    """

    def __init__(self, site: int, p: float) -> None:
        super().__init__(site, p)
        self.first_channel = 0
        self.d_model: int | None = None

    def forward(self, x: Tensor, keys: Tensor | None, positions: Tensor) -> Tensor:
        """Return x (B, T, D), dropped from where `keys` (B, n_sites, 2) are given in training.

        `positions` (T,) are those of x in the sequence: any part of the time drops what the whole
        drops there.
        """
        if keys is None or not self.acts(keys):
            return x
        first, last = self.first_channel, self.first_channel + x.shape[2]
        channel = torch.arange(first, last, dtype=torch.int32, device=x.device)
        D = x.shape[2] if self.d_model is None else self.d_model
        return self.drop(x, keys, _word(positions)[:, None] * D + channel)  # index (T, D)


class AttentionDropout(KeyedDropout):
    """Dropout on attention weights (B, H, Q, S); query q of head h looking at key s has number
    (h · context_length + q) · context_length + s.

    `head_offset` is the first head that is here. `kernel` computes attention with it without
    writing weights out, as `attend_in_kernel` does; None where nothing here can.
    """

    def __init__(self, site: int, p: float, context_length: int) -> None:
        super().__init__(site, p)
        self.context_length = context_length
        self.head_offset = 0
        self.kernel: Callable[..., Tensor] | None = None

    def forward(
        self,
        weights: Tensor,
        keys: Tensor | None,
        query_positions: Tensor,
        key_positions: Tensor,
    ) -> Tensor:
        """Return the weights (B, H, Q, S), dropped where `keys` are given in training.

        `query_positions` (Q,) and `key_positions` (S,) say which block of the matrix it is.
        """
        if keys is None or not self.acts(keys):
            return weights
        first, last = self.head_offset, self.head_offset + weights.shape[1]
        index = weight_index(
            range(first, last), query_positions, key_positions, self.context_length
        )
        return self.drop(weights, keys, index)


def weight_index(
    heads: range, query_positions: Tensor, key_positions: Tensor, context_length: int
) -> Tensor:
    """Return the numbers of attention weights within their row, int32 (H, Q, S)."""
    head = torch.arange(heads.start, heads.stop, dtype=torch.int32, device=query_positions.device)
    row = head[:, None] * context_length + _word(query_positions)  # (H, Q)
    return row[:, :, None] * context_length + _word(key_positions)


def _word(positions: Tensor) -> Tensor:
    """Return positions in the 32-bit words that `bits` counts in."""
    return positions.to(torch.int32)
